"""Run a function of the notebook in several processes, one rank each, and bring back what each returns.

    def worker(x):
        import torch.distributed as dist
        ...                                   # the process group is ready: gloo on CPUs, nccl on GPUs
        return dist.get_rank()

    launch(worker, x, nprocs=2)               # [0, 1]

Processes come from a forkserver that has PyTorch loaded: the first call takes seconds, further calls a fraction of
one. They are fresh: nothing of the notebook is in them but the function, its arguments and the globals that it uses.
`output` is how their lines come back, `watch` who failed first and where each stands, `family` what becomes of
processes that they start.
"""

import contextlib
import faulthandler
import math
import multiprocessing
import numbers
import os
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

from virtualgpu.run import inherit, output, places, watch
from virtualgpu.run.process_tree import keep_tree, kill_tree
from virtualgpu.run.watch import WorkerError

__all__ = ["WorkerError", "launch"]

_starting = threading.Lock()


def launch(fn, *args, nprocs: int = 2, timeout: float = 60.0, dry: bool = False, **kwargs) -> list:
    """[fn(*args, **kwargs) of rank 0, of rank 1, ...]; what they print comes as `[rank i]` lines, in rank order, at
    the end.

    Each rank has the environment that torchrun gives (RANK, WORLD_SIZE, MASTER_ADDR, ...), a process group, and on the
    CPU one thread. Where virtual GPUs are on here, they are on there (`inherit`); dry: ranks work on shapes alone.
    Raises WorkerError when a rank raises, exits, is killed, or has not ended `timeout` seconds after all had begun; it names the rank
    that was first, and no process is left, nor one that a rank started. Raises ValueError for an impossible nprocs,
    timeout or GLOO_SOCKET_IFNAME, OSError where too few files may be open, ImportError where cloudpickle is missing.
    """
    if isinstance(nprocs, bool) or not isinstance(nprocs, int) or nprocs < 1:
        raise ValueError(f"nprocs={nprocs!r}: ask for one process or more")
    if isinstance(timeout, bool) or not isinstance(timeout, numbers.Real) or not 0 < timeout < math.inf:
        raise ValueError(f"timeout={timeout!r}: say after how many seconds to give up, such as 60")

    cloudpickle = _cloudpickle()
    offered = inherit.export_state(dry)
    payload = cloudpickle.dumps((offered, places.interface(), cloudpickle.dumps((fn, args, kwargs))))
    places.require_files(nprocs)
    store = places.store(nprocs)
    with places.folder() as folder:
        ranks = [Rank(i, Path(folder)) for i in range(nprocs)]
        try:
            for rank in ranks:
                rank.start(nprocs, store.port, payload)
            watch.until_done(ranks, timeout)
        finally:
            for rank in ranks:
                rank.end()
            for rank in ranks:
                output.show(f"[rank {rank.index}] {line}" for line in rank.lines())
    inherit.merge_traces([rank.left for rank in ranks])
    return [cloudpickle.loads(rank.result) for rank in ranks]


def _cloudpickle():
    try:
        import cloudpickle
    except ImportError:
        raise ImportError(
            "launch sends a notebook's function to other processes by cloudpickle, which is not installed: "
            "pip install cloudpickle"
        ) from None
    return cloudpickle


class Rank:
    """One process, as the parent sees it. state: starting, running the reader's function, or returned from it.

    stacks, words: files for where it stands, and for what C++ writes.
    """

    def __init__(self, index: int, folder: Path):
        self.index, self.stacks, self.words = index, folder / f"{index}.stacks", folder / f"{index}.words"
        self.state = "starting"
        self.result: bytes | None = None
        self.left: bytes | None = None  # what its GPUs did
        self.error: tuple[float, str] | None = None  # when (monotonic: one clock for all processes), and the traceback
        self.process = None

    def start(self, world_size: int, port: int, payload: bytes) -> None:
        method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
        context = multiprocessing.get_context(method)
        if method == "forkserver":
            context.set_forkserver_preload(["virtualgpu.run.warm"])
            places.for_sockets()
        self.pipe, theirs = context.Pipe()
        printed, their_stdout = context.Pipe(duplex=False)
        self.printed = output.Printed(printed)
        arguments = (theirs, their_stdout, self.index, world_size, port, str(self.stacks), str(self.words))
        self.process = context.Process(target=_work, args=arguments, name=f"rank {self.index}", daemon=True)
        with _starting, _no_main_module():
            try:
                self.process.start()
            except (EOFError, ConnectionError):  # what ranks are forked from has just died (out of memory, say)
                time.sleep(0.2)  # until the system knows that, and a new one is started
                self.process.start()
        theirs.close()
        their_stdout.close()
        with contextlib.suppress(BrokenPipeError):
            self.pipe.send_bytes(payload)

    @property
    def done(self) -> bool:
        return self.result is not None

    def sources(self) -> list:
        """What to wait for."""
        printed = [] if self.printed.ended else [self.printed.pipe]
        return [self.pipe, self.process.sentinel, *printed]

    def read(self) -> None:
        """Take in what it has sent."""
        self.printed.read()
        with contextlib.suppress(EOFError, OSError):
            while self.pipe.poll():
                setattr(self, *self.pipe.recv())  # state, result or error

    def lines(self) -> list[str]:
        return self.printed.lines() if self.process is not None else []

    def end(self) -> None:
        """End the process, and whatever it started."""
        if self.process is None:
            return
        if self.process.pid is not None:  # None: interrupted while it was being started; the closed pipe ends it
            kill_tree(self.process.pid)
            self.process.kill()
            self.process.join()
            self.read()
        self.pipe.close()
        self.printed.pipe.close()


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


def _work(pipe: Connection, stdout: Connection, rank: int, world_size: int, port: int, stacks: str, words: str) -> None:
    multiprocessing.current_process()._config["daemon"] = False  # a DataLoader in it may have workers
    multiprocessing.set_start_method(None, force=True)  # started as everywhere else, not from the forkserver too
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupted cell reaches the whole group; the parent decides
    keep_tree()
    try:
        payload = pipe.recv_bytes()
    except (EOFError, OSError):
        os._exit(1)  # the parent was interrupted meanwhile, and has cleared everything away
    with open(words, "wb") as file:  # what C++ writes, gloo's greetings among it
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if watch.ASK and hasattr(faulthandler, "register"):
        faulthandler.register(watch.ASK, file=open(stacks, "wb"), all_threads=False)  # noqa: SIM115 - until the end
    threading.Thread(target=_end_with_parent, args=(pipe,), daemon=True).start()
    sys.stdout = sys.stderr = printed = output.stdout_to(stdout)
    try:
        answer = "result", _run(pipe, payload, rank, world_size, port)
    except BaseException as error:
        what = f"{type(error).__name__}: {error}" if isinstance(error, SystemExit) else _traceback(error)
        answer = "error", (time.monotonic(), what)
    for stream in (sys.stdout, sys.stderr, printed):
        with contextlib.suppress(Exception):  # the reader's code may have closed or replaced it
            stream.flush()
    pipe.send(answer)
    threading.Event().wait()  # the parent ends it: its sockets must not close before the parent knows why


def _run(pipe: Connection, payload: bytes, rank: int, world_size: int, port: int) -> bytes:
    import torch.distributed as dist

    cloudpickle, address = _cloudpickle(), "127.0.0.1"
    ours = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    ours |= {"MASTER_ADDR": address, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in ours.items()})
    offered, interface, function = cloudpickle.loads(payload)
    if interface:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    inherit.import_state(offered)
    store = dist.TCPStore(address, port, world_size, is_master=False)
    dist.init_process_group(_backend(rank, world_size), store=store, rank=rank, world_size=world_size)
    inherit.meet(store)
    fn, args, kwargs = cloudpickle.loads(function)
    pipe.send(("state", "running"))
    result = cloudpickle.dumps(fn(*args, **kwargs))
    pipe.send(("state", "returned"))
    inherit.returned(store, rank)
    if dist.is_initialized():
        dist.barrier()
        pipe.send(("left", inherit.export_trace(offered)))
        dist.destroy_process_group()
    return result


def _backend(rank: int, world_size: int) -> str:
    """nccl where each rank has a GPU; with virtual ones, gloo for the CPU's tensors beside it. Otherwise gloo."""
    import torch

    virtual = inherit.has_gpus()
    if virtual or not torch.cuda.is_available():
        torch.set_num_threads(1)
    if torch.cuda.device_count() < world_size:
        return "gloo"
    if virtual:
        inherit.choose(rank)
        return "cpu:gloo,cuda:nccl"
    torch.cuda.set_device(rank)
    return "nccl"


def _end_with_parent(pipe: Connection) -> None:
    """The other end closes when the notebook's kernel dies, however it does."""
    with contextlib.suppress(EOFError, OSError):
        pipe.recv_bytes()
    kill_tree(os.getpid())
    os._exit(1)


def _traceback(error: BaseException) -> str:
    """From the reader's function on; how it was called is ours."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames)).strip()
