"""Run a function of the notebook in several processes, one rank each, and bring back what each returns.

    def worker(x):
        import torch.distributed as dist
        ...                                   # the process group is ready: gloo on CPUs, nccl on GPUs
        return dist.get_rank()

    launch(worker, x, nprocs=2)               # [0, 1]

Processes come from a forkserver that has PyTorch loaded: the first call takes seconds, further calls a fraction of one. They
are fresh: nothing of the notebook is in them but the function, its arguments and the globals that it uses.
"""

import contextlib
import faulthandler
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
from multiprocessing.connection import Connection, wait
from pathlib import Path

import cloudpickle
import psutil

PRELOAD = ["torch", "torch.distributed", "torch._dynamo", "helpers.launch"]  # DDP's constructor imports torch._dynamo
GRACE = 0.3  # seconds in which a process that died may still be found before a survivor is blamed


class WorkerError(RuntimeError):
    """A rank failed; `rank` says which was first. After a timeout it is None, and `places` says where each rank stood."""

    def __init__(self, rank: int | None, message: str, places: list[str] | None = None):
        super().__init__(message)
        self.rank, self.places = rank, places or []


def launch(fn, *args, nprocs: int = 2, timeout: float = 60.0, **kwargs) -> list:
    """[fn(*args, **kwargs) of rank 0, of rank 1, ...]; what they print comes as `[rank i]` lines, in rank order, at the end.

    Each rank has the environment that torchrun gives (RANK, WORLD_SIZE, MASTER_ADDR, ...), a process group, and on the CPU
    one thread. Raises WorkerError when a rank raises, exits, is killed, or has not ended after `timeout` seconds; it names
    the rank that was first, and no process is left. Raises ValueError for an impossible nprocs.
    """
    if isinstance(nprocs, bool) or not isinstance(nprocs, int) or nprocs < 1:
        raise ValueError(f"nprocs={nprocs!r}: ask for one process or more")
    import torch.distributed as dist

    payload = cloudpickle.dumps((fn, args, kwargs))
    store = dist.TCPStore("127.0.0.1", 0, nprocs, is_master=True, wait_for_workers=False)  # on a port that is free
    with tempfile.TemporaryDirectory() as folder:
        ranks = [_Rank(i, Path(folder)) for i in range(nprocs)]
        try:
            for rank in ranks:
                rank.start(nprocs, store.port, payload)
            _await(ranks, time.monotonic() + timeout, timeout)
        finally:
            for rank in ranks:
                rank.end()
            for rank in ranks:
                for line in rank.lines:
                    print(f"[rank {rank.index}] {line}")
    return [cloudpickle.loads(rank.result) for rank in ranks]


class _Rank:
    """One process, as the parent sees it."""

    def __init__(self, index: int, folder: Path):
        self.index, self.stacks, self.output = index, folder / f"{index}.stacks", folder / f"{index}.output"
        self.lines: list[str] = []
        self.result: bytes | None = None
        self.error: tuple[float, str] | None = None
        self.process = None

    def start(self, world_size: int, port: int, payload: bytes) -> None:
        method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
        context = multiprocessing.get_context(method)
        if method == "forkserver":
            context.set_forkserver_preload(PRELOAD)
        self.pipe, theirs = context.Pipe()
        arguments = (theirs, self.index, world_size, port, str(self.stacks), str(self.output))
        self.process = context.Process(target=_work, args=arguments, name=f"rank {self.index}", daemon=True)
        with _no_main_module():
            self.process.start()
        theirs.close()
        with contextlib.suppress(BrokenPipeError):
            self.pipe.send_bytes(payload)

    @property
    def done(self) -> bool:
        return self.result is not None

    def read(self) -> None:
        """Take in what it has sent."""
        with contextlib.suppress(EOFError, OSError):
            while self.pipe.poll():
                kind, content = self.pipe.recv()
                if kind == "line":
                    self.lines.append(content)
                else:  # "result" or "error"
                    setattr(self, kind, content)

    def died(self) -> str | None:
        """How it ended, if it ended without a word."""
        if self.done or self.error or self.process.exitcode is None:
            return None
        code = self.process.exitcode
        if code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
            how += " (out of memory on this machine, perhaps)" if -code == getattr(signal, "SIGKILL", 0) else ""
        else:
            how = f"exited with status {code} before it was done"
        said = self.output.read_text(errors="replace").strip() if self.output.exists() else ""
        return how + (f". Its last words:\n{said[-2000:]}" if said else "")

    def where(self) -> str:
        """The line of the reader's code that it stands in, asked of the running process."""
        if self.done or self.process.exitcode is not None or not hasattr(signal, "SIGUSR1"):
            return "has ended"
        os.kill(self.process.pid, signal.SIGUSR1)
        time.sleep(GRACE)
        frames = re.findall(r'File "(.*)", line (\d+) in (.*)', self.stacks.read_text())
        if not frames:
            return "does not answer"
        foreign = ("site-packages", f"{os.sep}multiprocessing{os.sep}", "<string>", __file__)
        own = [(line, name) for file, line, name in frames if not any(part in file for part in foreign)]
        if not own:
            return "is done, and waits for the others"
        (line, name), (_, _, innermost) = own[0], frames[0]
        return f"stands in line {line}, in {name}" + (f", which waits in {innermost}" if innermost != name else "")

    def end(self) -> None:
        if self.process is None:
            return
        if self.process.pid is not None:  # None: interrupted while it was being started; the closed pipe ends it
            if self.process.is_alive():
                with contextlib.suppress(psutil.Error):
                    for child in psutil.Process(self.process.pid).children(recursive=True):  # a DataLoader's workers
                        child.kill()
                self.process.kill()
            self.process.join()
            self.read()
        self.pipe.close()


def _await(ranks: list[_Rank], deadline: float, timeout: float) -> None:
    """Until every rank is done. Raises WorkerError for the first that fails."""
    while not all(rank.done for rank in ranks):
        left = deadline - time.monotonic()
        if left <= 0:
            places = [f"rank {rank.index} {rank.where()}" for rank in ranks]
            lines = "\n  ".join([f"not done after {timeout:g} s (the timeout). Where each rank stood:", *places])
            raise WorkerError(None, lines, places)
        wait([x for rank in ranks if not rank.done for x in (rank.pipe, rank.process.sentinel)], timeout=left)
        for rank in ranks:
            rank.read()
        if any(rank.error or rank.died() for rank in ranks):
            _blame(ranks)


def _blame(ranks: list[_Rank]) -> None:
    """A process that died comes before those that miss it; among those that raised, the first."""
    time.sleep(GRACE)
    for rank in ranks:
        rank.read()
    for rank in ranks:
        if how := rank.died():
            raise WorkerError(rank.index, f"rank {rank.index} {how}")
    first = min((rank for rank in ranks if rank.error), key=lambda rank: rank.error[0])
    raise WorkerError(first.index, f"rank {first.index} failed first:\n{first.error[1]}")


@contextlib.contextmanager
def _no_main_module():
    """multiprocessing would run a script's file again in each process; the function travels by itself."""
    main = sys.modules["__main__"]
    hidden = {name: vars(main).pop(name) for name in ("__file__", "__spec__") if name in vars(main)}
    main.__spec__ = None
    try:
        yield
    finally:
        vars(main).update({"__spec__": None, **hidden})


# -- in the process of a rank


def _work(pipe: Connection, rank: int, world_size: int, port: int, stacks: str, output: str) -> None:
    multiprocessing.current_process()._config["daemon"] = False  # a DataLoader in it may have workers
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupted cell reaches the whole group; the parent decides
    try:
        payload = pipe.recv_bytes()
    except (EOFError, OSError):
        os._exit(1)  # the parent was interrupted meanwhile, and has cleared everything away
    with open(output, "wb") as file:  # what C++ writes, gloo's greetings among it
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if hasattr(faulthandler, "register"):
        faulthandler.register(signal.SIGUSR1, file=open(stacks, "w"), all_threads=False)  # noqa: SIM115 - until the end
    threading.Thread(target=_end_with_parent, args=(pipe,), daemon=True).start()
    sys.stdout = sys.stderr = _Lines(pipe)
    try:
        result = _run(payload, rank, world_size, port)
        sys.stdout.flush()
        pipe.send(("result", result))
    except BaseException as error:
        what = f"{type(error).__name__}: {error}" if isinstance(error, SystemExit) else _traceback(error)
        sys.stdout.flush()
        pipe.send(("error", (time.time(), what)))
        time.sleep(3600)  # until the parent ends it: its sockets must not close before the parent knows why
    os._exit(0)


def _run(payload: bytes, rank: int, world_size: int, port: int) -> bytes:
    import torch
    import torch.distributed as dist

    address = "127.0.0.1"
    ours = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    ours |= {"MASTER_ADDR": address, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in ours.items()})
    loopback = next((n for n, found in psutil.net_if_addrs().items() if any(a.address == address for a in found)), None)
    if loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    backend = "nccl" if torch.cuda.device_count() >= world_size else "gloo"
    if backend == "nccl":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    store = dist.TCPStore(address, port, world_size, is_master=False)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    fn, args, kwargs = cloudpickle.loads(payload)
    result = cloudpickle.dumps(fn(*args, **kwargs))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    return result


def _end_with_parent(pipe: Connection) -> None:
    """The other end closes when the notebook's kernel dies, however it does."""
    with contextlib.suppress(EOFError, OSError):
        pipe.recv_bytes()
    os._exit(1)


def _traceback(error: BaseException) -> str:
    """From the reader's function on; how it was called is ours."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames)).strip()


class _Lines:
    """A worker's stdout: whole lines, sent to the parent."""

    encoding = "utf-8"

    def __init__(self, pipe: Connection):
        self.pipe, self.rest = pipe, ""

    def write(self, text: str) -> int:
        *lines, self.rest = (self.rest + text).split("\n")
        for line in lines:
            self.pipe.send(("line", line))
        return len(text)

    def flush(self) -> None:
        """Nothing waits here but a line that has not ended."""

    def isatty(self) -> bool:
        return False
