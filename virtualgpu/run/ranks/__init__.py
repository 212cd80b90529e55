"""Run a function of the notebook in several processes, one rank each, and bring back what each returns.

    def worker(x):
        import torch.distributed as dist
        ...                                   # the process group is ready: gloo on CPUs, nccl on GPUs
        return dist.get_rank()

    launch(worker, x, nprocs=2)               # [0, 1]

Processes come from a forkserver that has PyTorch loaded: the first call takes seconds, further calls a fraction of
one. They are fresh: nothing of the notebook is in them but the function, its arguments and the globals that it uses.
`watch` is what the notebook sees of them, `worker` what each does, `forkserver` where they come from. `recorded` records a step of each.
"""

import math
import numbers
from pathlib import Path

from virtualgpu import scratch
from virtualgpu.run import inherit
from virtualgpu.run.ranks import forkserver, worker
from virtualgpu.run.ranks.watch import Rank, WorkerError, until_done
from virtualgpu.run.ranks.worker import import_cloudpickle

__all__ = ["WorkerError", "launch"]


def launch(fn, *args, nprocs: int = 2, timeout: float = 60.0, dry: bool = False, **kwargs) -> list:
    """``[fn(*args, **kwargs) of rank 0, of rank 1, ...]``; what they print comes as `[rank i]` lines, in rank order, at
    the end.

    Each rank has the environment that torchrun gives (RANK, WORLD_SIZE, MASTER_ADDR, ...), a process group, and on the
    CPU one thread. Where virtual GPUs are on here, they are on there (`inherit`); dry: ranks work on shapes alone.
    Raises WorkerError when a rank raises, exits, is killed, or has not ended `timeout` seconds after all had begun; it names the rank
    that was first, and no process is left, nor one that a rank started. Raises ValueError for an impossible nprocs,
    timeout or GLOO_SOCKET_IFNAME, OSError where too few files may be open or processes be started, ImportError where cloudpickle is missing.
    """
    if isinstance(nprocs, bool) or not isinstance(nprocs, int) or nprocs < 1:
        raise ValueError(f"nprocs={nprocs!r}: ask for one process or more")
    if isinstance(timeout, bool) or not isinstance(timeout, numbers.Real) or not 0 < timeout < math.inf:
        raise ValueError(f"timeout={timeout!r}: say after how many seconds to give up, such as 60")

    cloudpickle = import_cloudpickle()
    offered = inherit.export_state(dry)
    payload = cloudpickle.dumps((offered, forkserver.interface(), cloudpickle.dumps((fn, args, kwargs))))
    forkserver.require_files(forkserver.FILES + forkserver.FILES_PER_RANK * nprocs, f"{nprocs} processes")
    with forkserver.room_for_processes():
        store = forkserver.store(nprocs)
    with scratch.lent() as folder:
        ranks = [Rank(i, Path(folder)) for i in range(nprocs)]
        try:
            with forkserver.room_for_processes():
                for rank in ranks:
                    rank.start(nprocs, store.port, payload)
            until_done(ranks, timeout)
        finally:
            for rank in ranks:
                rank.end()
            for rank in ranks:
                worker.show(f"[rank {rank.index}] {line}" for line in rank.lines())
    inherit.merge_traces([rank.trace for rank in ranks])
    return [cloudpickle.loads(rank.result) for rank in ranks]
