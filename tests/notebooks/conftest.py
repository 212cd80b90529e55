"""What the graders' tests share: how an answer is tried."""

import cloudpickle
import pytest

import tests.processes
import virtualgpu
from tests.processes import HURRY
from virtualgpu.run import ranks


@pytest.fixture(autouse=True)
def no_gpus_before(monkeypatch):
    """As in a notebook before its first cell: virtual GPUs when somebody asks for some, and none is left."""
    monkeypatch.setenv("HELPERS_GPUS", "virtual")
    yield
    virtualgpu.reset()


@pytest.fixture(autouse=True, scope="module")
def answers_travel_as_a_notebooks_do(request):
    """By value: a rank has not to import this file's tests, and with them pytest, which takes longer than most graders."""
    for module in (request.module, tests.processes):
        cloudpickle.register_pickle_by_value(module)
    yield
    for module in (request.module, tests.processes):
        cloudpickle.unregister_pickle_by_value(module)


def hurried(*args, timeout, nprocs, **more):
    """A launch that waits a second, and one more for each rank that computes beside the first."""
    return ranks.launch(*args, timeout=HURRY * nprocs, nprocs=nprocs, **more)


@pytest.fixture
def says(capfd, monkeypatch):
    """says(said, grader, answer, ...): the grader's only line has these words ("..." between any), nothing is on stderr, and it returns
    whether it passed. Where it is to say "after so many seconds", it waits for a few."""

    monkeypatch.delenv("CHECKS", raising=False)

    def says(said: str, grader, *args, **kwargs) -> str:
        if said.startswith("after "):
            monkeypatch.setattr("checks.grader.launch", hurried)
        capfd.readouterr()
        passed = grader(*args, **kwargs)
        out, err = capfd.readouterr()
        right = said == "[passed]"
        assert all(part in out for part in said.split(" ... ")), out
        assert out.startswith("[passed] well done" if right else "[not yet] "), out
        assert passed is right and not err, err
        return out

    return says
