"""Two threads at once: what one of them does is not done to the other."""

import contextlib
import functools
import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _python_dispatch

import virtualgpu
from virtualgpu.distributed.process_group import with_numbers
from virtualgpu.timing.host import LOCKED


def known() -> bool:
    """Does this thread compute with numbers?"""
    return bool(torch.rand(4, device="cuda").add(1).sum().item() >= 4)


class Turns:
    """Two functions in threads of their own that go on one after the other, at each `turn()`: in the order of their names."""

    def __init__(self, order: str):
        self.order, self.lock, self.error = list(order), threading.Condition(), None

    def turn(self, name: str) -> None:
        """Ends this one's part and waits for its next."""
        with self.lock:
            if self.order and self.order[0] == name:
                self.order.pop(0)
            self.lock.notify_all()
            assert self.lock.wait_for(lambda: not self.order or self.order[0] == name, 30)

    def run(self, **functions) -> dict:
        results = {}

        def part(name, function):
            try:
                with self.lock:
                    assert self.lock.wait_for(lambda: self.order[0] == name, 30)
                results[name] = function(lambda: self.turn(name))
            finally:
                with self.lock:
                    self.order = [other for other in self.order if other != name]
                    self.lock.notify_all()

        threads = [threading.Thread(target=part, args=item) for item in functions.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results


def dry(turn) -> list[bool]:
    found = []
    with virtualgpu.dry_run():
        turn()
        found.append(known())
        turn()
    turn()
    found.append(torch.cuda.is_available() and known())
    return found


@pytest.mark.parametrize("there", [True, False], ids=["GPUs that are there", "GPUs made for them"])
@pytest.mark.parametrize("order", ["ababab", "abbbaa", "abaabb", "aaabbb"])
@pytest.mark.filterwarnings("ignore:a dry run computes shapes")
def test_two_dry_runs_that_overlap(order, there):
    if there:
        virtualgpu.gpus(1)
    found = Turns(order).run(a=dry, b=dry)
    assert [found["a"][0], found["b"][0]] == [False, False]
    if there:
        assert found == {"a": [False, True], "b": [False, True]} and known()
    else:
        assert virtualgpu.machine() is None


@pytest.mark.filterwarnings("ignore:a dry run computes shapes")
def test_a_dry_run_leaves_other_threads_their_numbers():
    virtualgpu.gpus(1)

    def numbers(turn):
        found = [known()]
        turn()
        found.append(known())  # the other is in its dry run
        x = torch.ones(3, device="cuda", requires_grad=True)
        (x * 3).sum().backward()
        assert x.grad.tolist() == [3, 3, 3]
        return found

    assert Turns("babaa").run(a=dry, b=numbers) == {"a": [False, True], "b": [True, True]}


@pytest.mark.filterwarnings("ignore:a dry run computes shapes")
def test_threads_and_a_pools_work_are_in_the_dry_run_that_starts_them():
    virtualgpu.gpus(2)
    with ThreadPoolExecutor(1) as older:
        assert older.submit(known).result()
        with virtualgpu.dry_run():
            found = []
            thread = threading.Thread(target=lambda: found.append(known()))
            thread.start()
            thread.join()
            assert found == [False] and not older.submit(known).result()
            newer = ThreadPoolExecutor(1)
            assert not newer.submit(known).result()
            model = nn.DataParallel(nn.Linear(8, 8).cuda(), [0, 1])
            model(torch.ones(4, 8, device="cuda")).sum().backward()
            assert model.module.weight.grad.untyped_storage().nbytes() and not known()
        assert older.submit(known).result() and newer.submit(known).result() and known()
        newer.shutdown()


def test_the_world_of_a_dry_run_is_one_threads(monkeypatch):
    virtualgpu.gpus(1, like="H100")

    def alone(turn):
        with virtualgpu.dry_run(world_size=8):
            turn()

    def other(turn):
        with pytest.raises(RuntimeError, match="another thread has a dry run with world_size="):
            alone(turn)
        with virtualgpu.dry_run():
            return known()

    with pytest.warns(UserWarning, match="a dry run computes"):
        assert Turns("aba").run(a=alone, b=other) == {"a": None, "b": False}
    with virtualgpu.dry_run(world_size=8):
        pass
    assert virtualgpu.machine().single_rank is None


def test_what_has_numbers_in_a_dry_run_has_them_for_its_thread(monkeypatch):
    """As what DeviceMesh and all_gather_object compute; the one that began first ends first."""
    virtualgpu.gpus(1)

    def begun(turn):
        with virtualgpu.dry_run():
            inside = with_numbers(virtualgpu.machine(), lambda: (turn(), torch.ones(3).sum().item())[1])
            turn()
            return inside, virtualgpu.machine().dry

    found = Turns("abab").run(a=begun, b=begun)
    assert found == {"a": (3, True), "b": (3, True)} and not virtualgpu.machine().dry


@pytest.mark.parametrize("depths", [(2, 1), (1, 2), (1, 1)], ids=str)
def test_fake_tensors_of_two_threads(depths):
    """In a dry run our bookkeeping looks away from a FakeTensorMode: until that thread has left it, and not for ever."""
    virtualgpu.gpus(2)

    def fake(turn, device, depth):
        with virtualgpu.dry_run():
            mode = FakeTensorMode()
            with contextlib.ExitStack() as modes:
                for _ in range(depth):
                    modes.enter_context(mode)
                turn()
            turn()
            x = torch.ones(1 << 20, device=device)
            return torch.cuda.memory_allocated(device) == x.nbytes

    a, b = (functools.partial(fake, device=f"cuda:{at}", depth=depth) for at, depth in enumerate(depths))
    found = Turns("abab").run(a=a, b=b)
    assert found == {"a": True, "b": True}


def test_two_threads_with_streams_of_their_own():
    """The same numbers and the same simulated time in each run."""

    def work(device):
        torch.cuda.set_device(device)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            x = torch.arange(512.0 * 512, device="cuda").view(512, 512)
            for _ in range(5):
                x = x @ x.t() / x.square().mean()
            return x.sum().item(), stream.query()

    def once(devices):
        virtualgpu.reset()
        virtualgpu.gpus(2)
        found = [None] * 2
        threads = [
            threading.Thread(target=lambda at=at, device=device: found.__setitem__(at, work(device)))
            for at, device in enumerate(devices)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        torch.cuda.synchronize(0), torch.cuda.synchronize(1)
        return found, virtualgpu.machine().clock.host

    for devices in ((0, 1), (0, 0)):
        first = once(devices)
        assert first[0][0] == first[0][1]
        assert all(once(devices)[0] == first[0] for _ in range(3))
        if devices == (0, 1):  # on one GPU they share it in the order in which they come
            assert all(once(devices)[1] == first[1] for _ in range(3))


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
@pytest.mark.parametrize("one_by_one", [True, False])
def test_threads_share_pythons_lock(threads, one_by_one):
    """Each launches on its own GPU, and together no faster than the lock lets them: at least its time, and a third more where the order in
    which they are computed leaves gaps that none can use."""
    virtualgpu.gpus(4)
    clock = virtualgpu.machine().clock
    turn, ends, launches = threading.Lock(), [], 2000

    def launch(gpu):
        with turn if one_by_one else contextlib.nullcontext():
            for _ in range(launches):
                clock.launch(gpu, 1e-9, "add")
        ends.append(clock.host)

    start, workers = clock.host, [threading.Thread(target=launch, args=(gpu,)) for gpu in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert clock.host == max(ends)
    alone = launches * clock.costs.forward
    assert 0.99 < (clock.host - start) / (max(1, LOCKED * threads) * alone) < 1.34


@pytest.mark.parametrize("by_pool", [False, True])
def test_a_thread_has_no_mode_left_when_it_ends(by_pool):
    """C++ lets go of a thread's modes after Python has done with it; where Python itself ends just then, that aborts the process."""
    kept, modes = threading.local(), []

    class AtTheEnd:
        def __del__(self):
            modes.append(_python_dispatch._get_current_dispatch_mode_stack())

    def work():
        kept.until_the_end = AtTheEnd()
        return torch.ones(2, device="cuda").device.type

    if by_pool:
        with ThreadPoolExecutor(1) as pool:  # its worker is there before the GPUs are
            pool.submit(int).result()
            virtualgpu.gpus(2)
            assert pool.submit(work).result() == "cuda"
    else:
        virtualgpu.gpus(2)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    gc.collect()
    assert modes == [[]]
