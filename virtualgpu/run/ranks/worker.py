"""What the process of one rank does: the reader's function, in a process group; what it prints and answers goes through a pipe."""

import contextlib
import datetime
import faulthandler
import gc
import io
import multiprocessing
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from multiprocessing.connection import Connection
from typing import Any

from virtualgpu.run import inherit, prefork
from virtualgpu.run.processes import keep_tree, kill_tree
from virtualgpu.run.ranks import forkserver

# -- What ranks print, on its way to the notebook: bytes through a pipe of each rank's own, lines when all have ended.
#
# Small pieces, because the processes that a rank forks (a DataLoader's workers) write to the same pipe: the system
# keeps a write of up to PIPE_BUF bytes together (pipe(7)), and multiprocessing sends a message of that size, and the
# four bytes of its length before it, as one write.

PIECE = getattr(select, "PIPE_BUF", 512) - 4


def stdout_to(pipe: Connection) -> io.TextIOWrapper:
    """A text stream for `sys.stdout`: whole lines go to the pipe at once, the beginning of one when it is flushed."""
    pieces: Any = _Pieces(pipe)
    return io.TextIOWrapper(pieces, "utf-8", "backslashreplace", newline="\n", line_buffering=True)


class _Pieces(io.RawIOBase):
    """Bytes for the other end of a pipe."""

    def __init__(self, pipe: Connection):
        self._pipe = pipe
        self._renew()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._renew)  # another thread may hold it at that moment

    def _renew(self) -> None:
        self._lock = threading.RLock()  # a signal handler may print, too

    def writable(self) -> bool:
        return True

    def write(self, data) -> int:
        data = bytes(data)
        with self._lock:
            for start in range(0, len(data), PIECE):
                self._pipe.send_bytes(data[start : start + PIECE])
        return len(data)

    def fileno(self) -> int:
        """What C and other programs write to: it is shown only where the rank dies."""
        return 1


class Printed:
    """The notebook's end of the pipe. `ended`: nothing more will come."""

    def __init__(self, pipe: Connection):
        self.pipe, self.ended, self._content = pipe, False, bytearray()

    def read(self) -> None:
        """Take in what is there."""
        try:
            while not self.ended and self.pipe.poll():
                self._content += self.pipe.recv_bytes()
        except (EOFError, OSError):
            self.ended = True

    def lines(self) -> list[str]:
        """The last one may have had no end."""
        lines = self._content.decode("utf-8", "replace").split("\n")
        return lines if lines[-1] else lines[:-1]


def show(lines: Iterable[str]) -> None:
    """Print them; characters that the notebook's own stdout does not know (in an ASCII locale) as \\u escapes."""
    for line in lines:
        try:
            print(line)
        except UnicodeEncodeError:
            encoding = sys.stdout.encoding or "ascii"
            print(line.encode(encoding, "backslashreplace").decode(encoding))


# -- What the process of one rank does: the reader's function, in a process group, and its answer through a pipe.


FOR_EVER = datetime.timedelta(days=365)  # the parent ends a rank that waits when another one fails
ASK = getattr(signal, "SIGUSR1", None)  # makes a rank write down its stack (faulthandler); there is none on Windows


def import_cloudpickle():
    """The module. Raises ImportError, which says what to install."""
    try:
        import cloudpickle
    except ImportError:
        raise ImportError(
            "launch sends a notebook's function to other processes by cloudpickle, which is not installed: "
            "pip install cloudpickle"
        ) from None
    return cloudpickle


def work(pipe: Connection, stdout: Connection, rank: int, world_size: int, port: int, stacks: str, output: str) -> None:
    """Until the parent ends it. pipe: the function comes, and its answer goes. stacks, output: files, as of `Rank`."""
    vars(multiprocessing.current_process())["_config"]["daemon"] = False  # a DataLoader in it may have workers
    multiprocessing.set_start_method(None, force=True)  # started as everywhere else, not from the forkserver too
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupted cell reaches the whole group; the parent decides
    keep_tree()
    prefork.draw_own_numbers()
    gc.freeze()  # a collection would walk through PyTorch's million objects, and copy the pages that ranks share
    try:
        payload = pipe.recv_bytes()
    except (EOFError, OSError):
        os._exit(1)  # the parent was interrupted meanwhile, and has cleared everything away
    with open(output, "wb") as file:  # what C++ writes, gloo's greetings among it
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if ASK and hasattr(faulthandler, "register"):
        faulthandler.register(ASK, file=open(stacks, "wb"), all_threads=False)  # noqa: SIM115 - until the end
    threading.Thread(target=_end_with_parent, args=(pipe,), daemon=True).start()
    sys.stdout = sys.stderr = printed = stdout_to(stdout)
    try:
        answer: tuple[str, object] = ("result", _run(pipe, payload, rank, world_size, port))
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

    from virtualgpu import session

    cloudpickle, address = import_cloudpickle(), "127.0.0.1"
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update(
        {name: str(value) for name, value in variables.items()}, MASTER_ADDR=address, MASTER_PORT=str(port)
    )
    offered, interface, function = cloudpickle.loads(payload)
    if interface:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    inherit.import_state(offered)
    with forkserver.without_warnings():
        store = dist.TCPStore(address, port, world_size, is_master=False)
    machine: Any = session.current()
    dist.init_process_group(_backend(machine, rank, world_size), store=store, rank=rank, world_size=world_size)
    if machine is not None:
        machine.communicators.meet(store)  # there it learns which of the others have returned
    fn, args, kwargs = cloudpickle.loads(function)
    pipe.send(("state", "running"))
    result = cloudpickle.dumps(fn(*args, **kwargs))
    pipe.send(("state", "returned"))
    machine = session.current()
    if machine is not None:
        machine.communicators.returned(store, rank)
    if dist.is_initialized():
        _meet(store, rank, world_size)
        pipe.send(("trace", inherit.export_trace(offered)))
        with contextlib.suppress(RuntimeError):  # of a GPU that an assertion in a kernel has left unusable
            dist.destroy_process_group()
    return result


def _meet(store, rank: int, world_size: int) -> None:
    """Wait for all ranks: no socket may close while another rank reads from it. Not by `dist.barrier`, which needs GPUs that work."""
    store.set(f"ended/{rank}", "")
    store.wait([f"ended/{other}" for other in range(world_size)], FOR_EVER)


def _backend(machine, rank: int, world_size: int) -> str:
    """nccl where each rank has a GPU; with virtual ones, gloo for the CPU's tensors beside it. Otherwise gloo."""
    import torch

    if machine is not None or not torch.cuda.is_available():
        torch.set_num_threads(1)
    if torch.cuda.device_count() < world_size:
        return "gloo"
    if machine is not None:
        machine.local.use_device(rank)  # no use of the GPU yet: CUDA's variables may still be set
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
