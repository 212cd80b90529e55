"""Machines as they come: one core, 64 MB of shared memory, no usable home folder, a port that is taken, two notebooks at once, and
Ctrl-C. Afterwards: the result is right, no process is left, nothing is written where it should not be.

The other rows of docs/faults.md are tested with the module that they concern.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import uuid

import psutil
import series

from tests.processes import family, wait_until

# A little of everything: virtual GPUs, processes, a loader with workers, a checkpoint, a figure, Ray.
PROGRAM = """
import sys, time
from pathlib import Path
import torch, torch.distributed as dist
import virtualgpu
from helpers import plots
from notebooks.scripts import tuning

def rank_sum(size):
    loader = torch.utils.data.DataLoader(torch.arange(8.0), batch_size=4, num_workers=1)
    x = sum(batch.sum() for batch in loader).repeat(size)
    dist.all_reduce(x)
    return x

def trial(config):
    (Path(config["folder"]) / "tuning").touch()
    for epoch in range(2):
        time.sleep(config["slow"])
        tune.report({"loss": config["n"] + epoch})

def before_tuning(folder):
    gpu = virtualgpu.gpus(1)[0]
    with virtualgpu.Monitor() as monitor:
        model = torch.nn.Linear(8, 1).to(gpu)
        model(torch.ones(4, 8, device=gpu)).sum().backward()
        monitor.step()
    torch.save(model.state_dict(), folder / "model.pt")
    virtualgpu.reset()
    print([float(x.sum()) for x in virtualgpu.launch(rank_sum, 5_000_000)])  # 20 MB each

if __name__ == "__main__":
    folder, slow = Path(sys.argv[1]), float((sys.argv[2:] or [0])[0])
    if not slow:
        before_tuning(folder)
    there = tuning.start_ray(cpus=2)
    from ray import tune
    import ray
    large = ray.get(ray.put(torch.ones(5_000_000).numpy()))
    quiet = {"verbose": 0, "progress_reporter": tune.CLIReporter(), "callbacks": [tuning.Watch()]}
    run = tune.RunConfig(name="run", storage_path=str(folder), **quiet)
    space = {"n": tune.grid_search([1, 2]), "slow": slow, "folder": str(folder)}
    try:
        results = tune.Tuner(trial, param_space=space, run_config=run).fit()
        print(there, int(large.sum()), sorted(result.metrics["loss"] for result in results))
    except KeyboardInterrupt:
        print("interrupted")
    del large
    tuning.stop_ray()
    print("done")
"""
SAYS = ["[280000000.0, 280000000.0]", "{'CPU': 2.0} 5000000 [2, 3]", "done"]


class Run:
    """The program, in a folder and a session of its own; its family is known by a variable of its environment."""

    def __init__(self, folder, *before, slow="", **environment):
        folder.mkdir(exist_ok=True)
        (folder / "program.py").write_text(PROGRAM)
        self.folder, self.mark = folder, uuid.uuid4().hex
        environment = {"HELPERS_GPUS": "virtual", "PYTHONPATH": str(series.ROOT), "FAULT": self.mark} | environment
        self.process = subprocess.Popen(
            [*before, sys.executable, str(folder / "program.py"), str(folder), *([slow] if slow else [])],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={k: v for k, v in os.environ.items() if k not in environment} | environment,
            start_new_session=True,
        )

    def family(self) -> list[psutil.Process]:
        return family("FAULT", self.mark)

    def ends(self) -> tuple[list[str], str]:
        """What it printed and what it complained of, once all of its processes are gone."""
        try:
            said, complaint = self.process.communicate(timeout=200)
            wait_until(lambda: not self.family(), 20)
        finally:
            for process in self.family():
                process.kill()
        return said.splitlines(), complaint

    def is_right(self) -> None:
        said, complaint = self.ends()
        assert (said[-3:], self.process.returncode) == (SAYS, 0), complaint
        assert (self.folder / "model.pt").exists() and not list(self.folder.glob("*.part"))
        assert "Traceback" not in complaint


def test_two_at_once_of_which_one_is_interrupted(tmp_path):
    """The one has a core, fewer than its processes, and the address where torchrun's processes would meet is somebody else's. It is in a
    container that was given 64 MB of shared memory; not even root can write into its home folder, /dev/null; its TMPDIR is as long as
    macOS's, too long for Ray.

    Ctrl-C reaches the other's whole group: its search raises KeyboardInterrupt, and can be restored.
    """
    core = ["taskset", "-c", str(min(os.sched_getaffinity(0)))] if shutil.which("taskset") else []
    little = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"', "sh"]
    if not shutil.which("unshare") or subprocess.run([*little, "true"], capture_output=True).returncode:
        little = []  # this user may not mount
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        lacks = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.getsockname()[1]), "HOME": "/dev/null"}
        one = Run(tmp_path / "one", *core, *little, **lacks, TMPDIR=str(tmp_path))
        other = Run(tmp_path / "other", slow="600")
        wait_until(lambda: (other.folder / "tuning").exists() or other.process.poll() is not None, 100)
        os.killpg(other.process.pid, signal.SIGINT)
        said, complaint = other.ends()
        assert said[-2:] == ["interrupted", "done"], complaint
        assert (other.folder / "run" / "tuner.pkl").exists()
        one.is_right()
