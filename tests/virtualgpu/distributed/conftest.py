import traceback

import pytest
import torch

import virtualgpu
from virtualgpu.run.ranks import launch


@pytest.fixture
def on_gpus(capfd):
    """on_gpus(function, *args, n=2): what each rank returns, on virtual GPUs."""

    def run(function, *args, n=2, like="T4", **options):
        virtualgpu.gpus(n, like=like)
        return launch(function, *args, nprocs=n, **options)

    return run


@pytest.fixture
def alone():
    """A group of nccl with this process alone, which needs no other."""
    import torch.distributed as dist

    virtualgpu.gpus(1, like="T4")
    dist.init_process_group("nccl", rank=0, world_size=1, store=dist.HashStore())
    yield dist.group.WORLD
    dist.destroy_process_group()


def started(cases: dict, gpus: int = 2, n: int = 2, like="T4", dry=False, timeout=300) -> dict[str, list]:
    """{case: what it gives on each of n ranks, or the error there}: one start for many. gpus: 0 for CPUs and gloo."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HELPERS_GPUS", "virtual")
        virtualgpu.reset()
        if gpus:
            virtualgpu.gpus(gpus, like=like)
        try:
            ranks = launch(every, cases, gpus > 0, nprocs=n, dry=dry, timeout=timeout)
        finally:
            virtualgpu.reset()
    return {name: [rank[name] for rank in ranks] for name in cases}


class Rows:
    """Programs of a module's tests, for ranks that are started once and run all of them, when the first test asks for one.

    ROWS = Rows(n=3)

    @ROWS.row           or ROWS.gives(what every rank gives), or ROWS.gives(what rank 0 gives, rank 1, ...)
    def program(): ...

    ROWS[program]       what it gives on each rank
    test_rows = ROWS.test()     of those that say what they give
    """

    def __init__(self, n: int = 2, **options):
        self.n, self.options, self._cases, self._expected, self._found = n, options, {}, {}, None

    def row(self, program):
        self._cases[program.__name__] = program
        return program

    def gives(self, *expected):
        def add(program):
            self._expected[program] = list(expected) if len(expected) > 1 else [*expected] * self.n
            return self.row(program)

        return add

    def __getitem__(self, program) -> list:
        if self._found is None:
            self._found = started(self._cases, self.n, self.n, **self.options)
        found = self._found[program.__name__]
        assert not (errors := [text for text in found if isinstance(text, Failed)]), "\n".join(errors)
        return found

    def test(self):
        """A test for each program that says what it gives."""

        @pytest.mark.parametrize("program", [pytest.param(one, id=one.__name__) for one in self._expected])
        def test(program):
            assert self[program] == self._expected[program]

        return test


class Failed(str):
    """A traceback."""


def every(cases: dict, on_gpus: bool) -> dict:
    """In a rank: each case's result, or its error. Without GPUs no real one is to be found either."""
    if not on_gpus:
        torch.cuda.is_available = lambda: False
    found, device = {}, torch.cuda.current_device() if on_gpus else None
    for name, case in cases.items():
        torch.cuda.set_device(device) if on_gpus else None
        try:
            found[name] = case()
        except Exception:
            found[name] = Failed(traceback.format_exc())
    return found
