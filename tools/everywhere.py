"""Each notebook, Run all, as on machines without a GPU and with 1, 2 and 4: what `python -m tools.everywhere` calls.

    everywhere.py             all notebooks on all of them
    everywhere.py 2           on two GPUs
    everywhere.py 2 04 08     only these notebooks

Virtual GPUs play the real ones (HELPERS_GPUS=real under `python -m virtualgpu`): torch.cuda, NVML and nvidia-smi answer, and nothing
in `helpers` looks behind them. The exit status is 1 where a notebook does not reach its end.
"""

import os
import subprocess
import sys

import series

MACHINES = (0, 1, 2, 4)


def main(arguments: list[str]) -> int:
    chosen = [int(word) for word in arguments if word in map(str, MACHINES)] or MACHINES
    only = [word for word in arguments if word not in map(str, MACHINES)]
    failed = []
    for gpus in chosen:
        print(f"\n{gpus or 'no'} GPU{'s' * (gpus != 1)}", flush=True)
        if subprocess.run(command(gpus, only), env=environment(gpus), cwd=series.ROOT).returncode:
            failed.append(str(gpus))
    print(f"\nNot everything ran with {', '.join(failed)} GPUs." if failed else "\nEverything ran everywhere.")
    return int(bool(failed))


def command(gpus: int, only: list[str]) -> list[str]:
    played = ["-m", "virtualgpu", "--gpus", str(gpus), "--quiet"] if gpus else []
    return [sys.executable, *played, str(series.ROOT / "tools" / "run.py"), "--check", *only]


def environment(gpus: int) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "HELPERS_GPUS"}
    return kept | ({"HELPERS_GPUS": "real"} if gpus else {})


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
