"""torch.save, torch.load, loaders and what goes to another process: where it lies, what of it has values in a dry run, and no file is lost."""

import contextlib
import io
import os
import pickle
import shutil
from contextlib import nullcontext
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
import torch.multiprocessing as mp
from torch import nn
from torch.utils.data import DataLoader

import virtualgpu
from virtualgpu.engine.machine import dry_runs

ZERO, ONE, CPU = torch.device("cuda:0"), torch.device("cuda:1"), torch.device("cpu")


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


# -- what is loaded


@pytest.mark.parametrize(
    ("where", "found"),
    [
        (lambda storage, location: storage.cuda(1), ONE),
        (lambda storage, location: storage.cuda(), ZERO),
        (lambda storage, location: storage, CPU),
        (lambda storage, location: storage.cpu(), CPU),
        (lambda storage, location: None, ONE),
        (lambda storage, location: torch.serialization.default_restore_location(storage, "cuda:0"), ZERO),
        ("cuda:0", ZERO),
        (torch.device("cuda"), ZERO),
        ({"cuda:1": "cuda:0"}, ZERO),
        ({"cuda:1": "cpu"}, CPU),
        ({"cuda:0": "cpu"}, ONE),
        ("cpu", CPU),
    ],
)
def test_every_kind_of_map_location(gpus, where, found):
    file = saved({"x": torch.arange(4.0, device=ONE)})
    before = [torch.cuda.memory_allocated(i) for i in range(2)]
    x = torch.load(file, map_location=where)["x"]
    assert x.device == found and x.tolist() == [0, 1, 2, 3]
    grown = [torch.cuda.memory_allocated(i) - before[i] for i in range(2)]
    assert grown == [512 * (found == gpu) for gpu in (ZERO, ONE)]
    assert (x + torch.ones(4, device=found)).device == found


def test_shared_storages_stay_shared(gpus):
    x = torch.arange(4.0, device=ONE)
    loaded = torch.load(saved([x, x[1:]]))
    loaded[0][1] = 7
    assert loaded[1].tolist() == [7, 2, 3] and loaded[1].device == ONE


@pytest.fixture
def checkpoint(tmp_path):
    path = tmp_path / "checkpoint.pt"
    weight, bias = torch.arange(6.0).view(2, 3), nn.Parameter(torch.ones(2))
    torch.save({"weight": weight, "bias": bias, "count": torch.tensor([3, 4])}, path)
    return path


def test_what_is_loaded_in_a_dry_run_has_its_values(gpus, checkpoint):
    with virtualgpu.dry_run():
        found = torch.load(checkpoint)
        assert found["weight"].tolist() == [[0, 1, 2], [3, 4, 5]] and found["bias"].requires_grad
        assert found.pop("count").tolist() == [3, 4]
        model = nn.Linear(3, 2).cuda()
        model.load_state_dict(found)
        assert model(torch.ones(4, 3, device="cuda")).shape == (4, 2)


@pytest.mark.parametrize("mmap", [False, True], ids=["read", "mapped"])
@pytest.mark.parametrize("where", ["cuda:1", ONE, {"cpu": "cuda:1"}, lambda storage, location: storage.cuda(1)])
def test_loaded_onto_a_gpu_it_takes_the_same_bytes_in_a_dry_run(gpus, checkpoint, where, mmap):
    for dry in (False, True):
        with virtualgpu.dry_run() if dry else nullcontext():
            before = torch.cuda.memory_allocated(1)
            found = torch.load(checkpoint, map_location=where, mmap=mmap)
            assert torch.cuda.memory_allocated(1) - before == 3 * 512
            assert {t.device for t in found.values()} == {ONE}
            assert (found["weight"] @ found["weight"].T).shape == (2, 2)
            del found


@pytest.mark.parametrize("where", [None, "cuda:1"])
def test_a_file_that_is_mapped_keeps_its_numbers(gpus, tmp_path, where):
    """As safetensors reads one."""
    (tmp_path / "file").write_bytes(bytes(range(16)))
    with virtualgpu.dry_run():
        storage = torch.UntypedStorage.from_file(str(tmp_path / "file"), False, 16)
        read = torch.asarray(storage[4:12], dtype=torch.uint8, device=where)
        assert read.device == torch.device(where or "cpu") and read.tolist() == list(range(4, 12))


# -- what is saved


def test_a_dry_run_leaves_a_file_as_it_is(gpus, checkpoint):
    """torch.save empties a file before it looks at the tensors: a dry run of a training would lose the last one's weights."""
    before = checkpoint.read_bytes()
    with virtualgpu.dry_run():
        model = nn.Linear(3, 2).cuda()
        with pytest.warns(UserWarning, match=r"a dry run has no values to save: .*checkpoint\.pt is not written"):
            torch.save({"epoch": 3, "model": model.state_dict()}, checkpoint)
        with pytest.warns(UserWarning, match="is not written"):
            torch.save(nn.Linear(3, 2), checkpoint.with_name("new.pt"))  # on the CPU, too
        with pytest.raises(RuntimeError, match="no values to save"):
            torch.save(model, io.BytesIO())
        with open(checkpoint.with_name("all.pt"), "wb") as file:
            file.write(b"header")
            with pytest.raises(RuntimeError, match="no values to save"):
                torch.save(model, file)
        os.remove(file.name)
    with pytest.raises(RuntimeError, match="no values to save"):
        torch.save(nn.ModuleList([model]), checkpoint)
    assert checkpoint.read_bytes() == before and os.listdir(checkpoint.parent) == [checkpoint.name]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_safetensors_leaves_a_file_as_it_is(gpus, tmp_path, device):
    """A Trainer of transformers saves by it at the end."""
    from safetensors.torch import load_file, save_file

    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.ones(3)}, path)
    with virtualgpu.dry_run():
        with pytest.warns(UserWarning, match=r"a dry run has no values to save: .*model\.safetensors is not written"):
            save_file(nn.Linear(3, 2, device=device).state_dict(), path)
        save_file(load_file(path), tmp_path / "copy")
    assert load_file(path)["weight"].tolist() == load_file(tmp_path / "copy")["weight"].tolist() == [1, 1, 1]


@pytest.mark.filterwarnings("ignore:a dry run has no values to save")
@pytest.mark.parametrize("whole", [False, True])
def test_the_copies_to_the_cpu_take_their_time_in_a_dry_run_too(gpus, tmp_path, whole):
    def seconds(path):
        model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(3)]).cuda()
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(2, 256, device="cuda")).sum().backward()
        optimizer.step()
        torch.cuda.synchronize()
        start = virtualgpu.machine().clock.host
        states = {"model": model.state_dict(), "more": [1, (optimizer.state_dict(),)]}
        torch.save(model if whole else states, path)
        return virtualgpu.machine().clock.host - start

    expected = seconds(tmp_path / "model.pt")
    with virtualgpu.dry_run():
        assert seconds(tmp_path / "another.pt") == pytest.approx(expected, rel=1e-9)


WAYS = {
    "replaced": lambda part, final: os.replace(part, final),
    "renamed by pathlib": lambda part, final: part.rename(final),
    "moved": lambda part, final: shutil.move(str(part), str(final)),
    "copied, then removed": lambda part, final: (shutil.copy2(part, final), part.unlink()),
    "linked, then removed": lambda part, final: (os.link(part, final), os.remove(part)),
    "copied into the folder": lambda part, final: (shutil.copy(part, final.parent), part.unlink()),
}
PATCHED = [(os, name) for name in ("replace", "rename", "link", "remove", "unlink")]
PATCHED += [(shutil, name) for name in ("copyfile", "copy", "copy2")]


@pytest.mark.parametrize("opened", [False, True], ids=["by its path", "a file that the program opens"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("there", [True, False])
def test_a_checkpoint_written_beside_the_old_one(gpus, tmp_path, way, there, opened):
    """The old one stays. Where there was none there is none; or an empty one, where the program opened it (ignite's DiskSaver)."""
    if opened and way.startswith("linked"):
        pytest.skip("an empty file may have two names")
    part, final = tmp_path / "parts" / "good.pt", tmp_path / "good.pt"
    part.parent.mkdir()
    if there:
        torch.save({"epoch": 1}, final)
    originals = [getattr(owner, name) for owner, name in PATCHED]
    with virtualgpu.dry_run():
        for _ in range(2):
            noted = pytest.warns(UserWarning, match=f"good.pt is {'left empty' if opened else 'not written'}")
            with open(part, "wb") if opened else nullcontext(part) as file, noted as warned:
                torch.save(nn.Linear(3, 2).cuda().state_dict(), file)
            assert warned[0].filename == __file__
            WAYS[way](part, final)
        with pytest.raises(FileNotFoundError):
            os.replace(tmp_path / "another", final)
    virtualgpu.reset()
    assert originals == [getattr(owner, name) for owner, name in PATCHED]
    assert list(part.parent.iterdir()) == [] and final.exists() is (there or opened)
    if there:
        assert torch.load(final) == {"epoch": 1}
    elif opened:
        assert not final.read_bytes()
    with pytest.raises(FileNotFoundError):
        WAYS[way](part, final)


def test_what_is_there_moves_in_a_dry_run_too(gpus, tmp_path):
    part, final = tmp_path / "good.pt.part", tmp_path / "good.pt"
    with virtualgpu.dry_run():
        with pytest.warns(UserWarning, match="is not written"):
            torch.save(nn.Linear(3, 2).cuda().state_dict(), part)
        torch.save({"epoch": 1}, part)
        os.replace(part, final)
        with pytest.raises((RuntimeError, FileNotFoundError), match="folder"):
            torch.save({"epoch": 3}, tmp_path / "folder" / "file.pt")
    assert torch.load(final) == {"epoch": 1} and not part.exists()


class Counted:
    """How often it was pickled."""

    def __init__(self):
        self.times = 0

    def __reduce__(self):
        self.times += 1
        return dict, ()


@pytest.mark.parametrize("to_path", [True, False])
@pytest.mark.parametrize("when", ["never", "before", "inside"])
def test_what_has_values_is_saved_and_pickled_once(gpus, tmp_path, monkeypatch, when, to_path):
    """Whether or not there is, or was, a dry run, whose tensors may be in it."""
    monkeypatch.setattr(dry_runs, "epoch", 1)
    if when == "before":
        with virtualgpu.dry_run():
            pass
    counted, weight = Counted(), torch.arange(3.0)
    target = tmp_path / "saved.pt" if to_path else io.BytesIO()
    with virtualgpu.dry_run() if when == "inside" else nullcontext():
        state = torch.get_rng_state()
        torch.save({"counted": counted, "weight": weight, "random": state}, target)
    assert counted.times == 1
    if not to_path:
        target.seek(0)
    found = torch.load(target, weights_only=False)
    assert torch.equal(found["weight"], weight) and torch.equal(found["random"], state)
    if when == "never":  # PyTorch's own meta tensors, as ever
        assert torch.load(saved(torch.ones(3, device="meta"))).device.type == "meta"


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("make", [lambda net, x: torch.jit.script(net), torch.jit.trace], ids=["scripted", "traced"])
def test_a_torchscript_module_is_saved_from_the_cpu(gpus, make, tmp_path):
    net, x = nn.Linear(3, 2), torch.ones(1, 3)
    wanted, there = net(x), make(net.cuda(1), x.cuda(1))
    for save in (lambda: torch.jit.save(there, io.BytesIO()), lambda: there.save(tmp_path / "net.pt")):
        with pytest.raises(NotImplementedError, match=r"save module.cpu\(\), and load it with map_location"):
            save()
    torch.jit.save(make(net.cpu(), x), tmp_path / "net.pt")
    assert torch.equal(torch.jit.load(tmp_path / "net.pt")(x), wanted)
    loaded = torch.jit.load(tmp_path / "net.pt", map_location="cuda:1")
    assert loaded.weight.device == ONE and torch.equal(loaded(x.cuda(1)).cpu(), wanted)


# -- loaders, and other processes


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("data", ["numbers", "tensors", "without values"])
def test_loaders_with_workers_in_a_dry_run(gpus, data, pinned):
    with virtualgpu.dry_run():
        items, shape, options = {
            "numbers": (range(4), (2,), {}),
            "tensors": (torch.arange(12).view(4, 3), (2, 3), {"collate_fn": torch.stack}),
            "without values": (torch.randn(4, 1024), (2, 1024), {}),  # too large to have some
        }[data]
        batches = list(DataLoader(items, batch_size=2, num_workers=1, pin_memory=pinned, **options))
        assert [tuple(batch.shape) for batch in batches] == [shape] * 2
        assert {batch.to("cuda", non_blocking=True).device for batch in batches} == {ZERO}
        assert sum(batch.sum() for batch in batches).shape == ()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_pins_its_batches(gpus, workers):
    batches = list(DataLoader(torch.arange(6.0), batch_size=3, pin_memory=True, num_workers=workers))
    assert [batch.tolist() for batch in batches] == [[0, 1, 2], [3, 4, 5]]
    assert all(batch.is_pinned() for batch in batches)
    assert batches[0].to("cuda", non_blocking=True).device == ZERO


class OnGpu(torch.utils.data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return torch.ones(2, device="cuda")


def on_cpu(items):
    return items[0].cpu()


@pytest.mark.parametrize(
    ("used", "collate", "error"),
    [
        (True, on_cpu, pytest.raises(RuntimeError, match="Cannot re-initialize CUDA in forked subprocess")),
        (False, on_cpu, contextlib.nullcontext()),
        # refused where it is awaited: the thread that would send it has nobody to tell
        (False, None, pytest.raises(NotImplementedError, match="CUDA IPC")),
    ],
)
def test_a_gpu_in_a_workers_process(gpus, used, collate, error):
    """As on a GPU: refused once the parent has used CUDA; otherwise the worker's own."""
    if used:
        torch.ones(1, device="cuda")
    loader = DataLoader(OnGpu(), num_workers=1, multiprocessing_context="fork", collate_fn=collate, timeout=60)
    with error:
        assert [item.tolist() for item in loader] == [[1, 1], [1, 1]]


def answer(model, questions, answers):
    """A process that is in no dry run: it says what it was given."""
    given = [questions.get(), questions.get(), *model.parameters()]
    answers.put([(type(x).__name__, tuple(x.shape), x.device.type, x.requires_grad) for x in given])
    answers.put(given[0].tolist())


def test_what_a_dry_run_sends_to_another_process(gpus):
    context = mp.get_context("spawn")
    questions, answers = context.Queue(), context.Queue()
    with virtualgpu.dry_run():
        model = nn.Linear(128, 128, bias=False)  # its weight is too large to have numbers
        assert model.share_memory() is model
        process = context.Process(target=answer, args=(model, questions, answers))
        process.start()
        for tensor in (torch.arange(6.0).view(2, 3), torch.zeros(100, 100)):
            questions.put(tensor)
        said, first = answers.get(timeout=100), answers.get(timeout=100)
        with pytest.raises(NotImplementedError, match="CUDA IPC"):
            ForkingPickler.dumps(torch.ones(2, device="cuda"))
    process.join()
    assert said == [
        ("Tensor", (2, 3), "cpu", False),
        ("Tensor", (100, 100), "meta", False),
        ("Parameter", (128, 128), "meta", True),
    ]
    assert first == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]


def test_a_gpus_memory_counts_as_shared(gpus):
    tensor, there = torch.ones(3), torch.ones(3, device="cuda")
    assert not tensor.is_shared() and tensor.share_memory_().is_shared()
    assert there.is_shared() and there.untyped_storage().is_shared() and not there.cpu().is_shared()
    assert pickle.loads(pickle.dumps(there)).device == ZERO
