"""`python -m virtualgpu --explain`, its options read."""

import sys
from collections.abc import Sequence

from virtualgpu.environment import Settings
from virtualgpu.run.explain import real, runs, table
from virtualgpu.run.trials import steps as steps_
from virtualgpu.run.trials.forked import ended_by_sigterm


def main(
    command: Sequence[str],
    settings: Settings,
    on_real: bool,
    steps: int | None = None,
    jobs: int | None = None,
    limit: float | None = None,
    json: bool = False,
) -> int:
    """Run the program and print. The status is 0 where there is something to tell, 2 where the program failed; 130 at an interrupt,
    of which, as of SIGTERM, no program is left.

    settings: the virtual GPUs. steps, jobs, limit: as of `runs.run`. on_real: this machine's own GPUs are taken, if it has some.

    Raises ValueError for a program that is not there.
    """
    steps = runs.STEPS if steps is None else steps
    try:
        with ended_by_sigterm(), steps_.line() as show:
            if on_real and real.gpus():
                machine, explanation = table.REAL, real.run(command, steps, limit, show)
            else:
                machine = table.machine(settings)
                explanation = runs.run(command, settings, steps, jobs, limit, show)
    except KeyboardInterrupt:
        print("\nInterrupted: no program is left.", file=sys.stderr)
        return 130
    if explanation.failed and not json:
        print(f"python -m virtualgpu: {explanation.failed}", file=sys.stderr)
    else:
        print(table.as_json(explanation) if json else "\n".join(table.lines(explanation, machine)))
    return 2 if explanation.failed else 0
