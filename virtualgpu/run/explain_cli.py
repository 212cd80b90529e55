"""`python -m virtualgpu --explain`, its options read."""

import sys

from virtualgpu.environment import Settings
from virtualgpu.run import explain, explain_real, explain_table


def main(
    command: tuple[str, ...], settings: Settings, real: bool, most: int | None, jobs: int | None, json: bool
) -> int:
    """Run it and print. The status is 0 where there is something to tell, 2 where the program failed; 130 at an interrupt.

    real: on this machine's own GPUs, where it has some; nobody asked for virtual ones.

    Raises ValueError for a program that is not there.
    """
    bar, most = _Bar(), explain.STEPS if most is None else most
    try:
        if real and explain_real.gpus():
            where, found = explain_table.REAL, explain_real.run(command, most, bar.told)
        else:
            where, found = explain_table.machine(settings), explain.run(command, settings, most, jobs, bar.told)
    except KeyboardInterrupt:
        bar.end()
        print("\nInterrupted: no program is left.", file=sys.stderr)
        return 130
    bar.end()
    if found.failed and not json:
        print(f"python -m virtualgpu: {found.failed}", file=sys.stderr)
    else:
        print(explain_table.as_json(found) if json else "\n".join(explain_table.lines(found, where)))
    return 2 if found.failed else 0


class _Bar:
    """One line on a terminal: how far it is."""

    def __init__(self):
        self.shown = sys.stderr is not None and sys.stderr.isatty()

    def told(self, words: str) -> None:
        if self.shown:
            print(f"\r\033[K{words}", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        self.told("")
