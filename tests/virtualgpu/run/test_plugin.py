"""The pytest plugin: GPUs before conftest.py, fresh ones for each test, other ones by marker; races by option and by marker."""

from argparse import Namespace
from importlib import metadata

import pytest

from virtualgpu import pytest_plugin, session

pytest_plugins = "pytester"
RACE = """
        def races(torch):
            from virtualgpu.sanitizer import UnsynchronizedAccessError
            side, x = torch.cuda.Stream(), torch.zeros(8, device="cuda")
            try:
                with torch.cuda.stream(side):
                    x.add_(1)
            except UnsynchronizedAccessError:
                return True
            return False
"""
INSTALLED = metadata.entry_points(group="pytest11", name="virtualgpu")
PLUGIN = () if INSTALLED else ("-p", "virtualgpu.pytest_plugin")  # a checkout that was not installed again


@pytest.fixture
def run(pytester, monkeypatch):
    for name in ("VIRTUALGPU", "HELPERS_GPUS"):
        monkeypatch.delenv(name, raising=False)
    return lambda *arguments: pytester.runpytest_subprocess(*PLUGIN, *arguments)


def test_option(run, pytester):
    pytester.makeconftest("import torch\nAT_IMPORT = torch.cuda.device_count()\n")
    pytester.makepyfile(
        """
        import os, pytest, torch, virtualgpu
        from conftest import AT_IMPORT
        import torch.multiprocessing as mp

        HERE = torch.cuda.device_count()

        @pytest.fixture(scope="module")
        def draw():
            return []

        @pytest.mark.parametrize("n", [1, 2])
        def test_fresh(n, draw):
            assert (AT_IMPORT, HERE, torch.cuda.device_count()) == (2, 2, 2)
            assert torch.cuda.max_memory_allocated(1) == 0
            x = torch.rand(1000, device="cuda:1")
            assert torch.cuda.max_memory_allocated(1) > 0
            draw.append(x.tolist())
            assert draw[0] == draw[-1]

        @pytest.mark.virtual_gpus(3, like="A100", memory="2GB")
        def test_marker(virtual_gpus):
            assert virtual_gpus == [torch.device("cuda", index) for index in range(3)]
            assert torch.cuda.get_device_name(2) == "NVIDIA A100-SXM4-40GB"
            assert torch.cuda.mem_get_info(2)[1] == 2 << 30

        def test_marker_does_not_last(virtual_gpus):
            assert len(virtual_gpus) == torch.cuda.device_count() == 2
            assert torch.cuda.get_device_name() == "Tesla V100-SXM2-16GB"

        def rank(index, folder):
            (folder / str(index)).write_text(str(torch.ones(3, device=f"cuda:{index}").device))

        def test_spawn(tmp_path):
            mp.spawn(rank, (tmp_path,), nprocs=1)
            assert (tmp_path / "0").read_text() == "cuda:0"

        def test_races():
            assert races(torch)

        def test_races_on_its_own():
            virtualgpu.gpus(1)
            assert races(torch)
            virtualgpu.reset()

        @pytest.mark.virtual_gpus(like="A99")
        def test_bad_marker():
            pass
        """
        + RACE
    )
    found = run("--virtual-gpus", "2", "--virtual-gpus-like", "V100", "--virtual-gpus-sanitize")
    found.assert_outcomes(passed=7, errors=1)
    found.stdout.fnmatch_lines(
        ["virtual GPUs: Tesla V100-SXM2-16GB, Tesla V100-SXM2-16GB", "*virtual_gpus: there is no GPU called 'A99'*"]
    )


def test_without_the_option(run, pytester):
    pytester.makepyfile(
        """
        import os, sys, pytest

        def test_nothing_happens():
            assert "torch" not in sys.modules and "VIRTUALGPU" not in os.environ

        @pytest.mark.virtual_gpus(1)
        def test_marked():
            import torch
            assert torch.cuda.device_count() == 1 and torch.ones(1, device="cuda").is_cuda

        @pytest.mark.virtual_gpus(2)
        def test_no_races():
            import torch
            assert not races(torch)

        @pytest.mark.virtual_gpus(2, sanitize=True)
        def test_races():
            import torch
            assert races(torch)

        def test_off_again():
            import torch
            assert "VIRTUALGPU" not in os.environ
            with pytest.raises((RuntimeError, AssertionError)):
                torch.ones(1, device="cuda")

        def test_fixture(virtual_gpus):
            assert len(virtual_gpus) == 2
        """
        + RACE
    )
    run("--strict-markers").assert_outcomes(passed=6)


def options(number=None, like=None, sanitize=False):
    return Namespace(
        virtual_gpus=number, virtual_gpus_like=like, virtual_gpus_memory=None, virtual_gpus_sanitize=sanitize
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (options("0"), "--virtual-gpus: '0' GPUs: ask for 1 to 64"),
        (options("2", "A99"), "--virtual-gpus: there is no GPU called 'A99'"),
        (options(None, "A100"), "need --virtual-gpus N"),
    ],
)
def test_bad_options(given, message):
    with pytest.raises(pytest.UsageError, match=message):
        pytest_plugin._begin(Namespace(stash=pytest.Stash()), given)


def test_races_of_gpus_that_tests_make_themselves():
    """The option without --virtual-gpus."""
    try:
        pytest_plugin._begin(Namespace(stash=pytest.Stash()), options(sanitize=True))
        assert session.looks_for_races()
    finally:
        session.look_for_races(False)
