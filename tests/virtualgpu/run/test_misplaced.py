"""Options of the runner behind the program are named, where the program cannot have meant them; and never otherwise."""

import pytest

from virtualgpu.run import cli

OURS = cli.OPTIONS.keys() - {"--help"}
READS_NOTHING = "import torch, os\nfrom torch import nn\nx = torch.ones(3, device='cuda')\n"
PARSES = "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--lr')\nparser.parse_args()\n"
OWN = PARSES.replace("--lr", "--gpus")


@pytest.mark.parametrize(
    ("text", "words", "named"),
    [
        (READS_NOTHING, "x.py --gpus 2", "--gpus"),
        (READS_NOTHING, "x.py --like=H100 --dry", "--like"),
        (READS_NOTHING, "torchrun --nproc-per-node 2 x.py --quiet", "--quiet"),
        (READS_NOTHING, "-m torch.distributed.run x.py --trace t.json", "--trace"),
        (READS_NOTHING, "x.py", None),
        (READS_NOTHING, "x.py --lr 3 -- --gpus 2", None),
        (READS_NOTHING, "-m pytest x.py --report", None),
        (READS_NOTHING, "nowhere.py --gpus 2", None),
        (READS_NOTHING + "import lightning\n", "x.py --gpus 2", None),
        (READS_NOTHING + "from .options import options\n", "x.py --gpus 2", None),
        (READS_NOTHING + "import sys\nprint(sys.argv)\n", "x.py --gpus 2", None),
        (PARSES, "x.py --gpus 2", None),
        ("no Python at all", "x.py --gpus 2", None),
    ],
)
def test_said_at_the_start(text, words, named, tmp_path, monkeypatch):
    """A script that cannot look at its arguments got them."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.py").write_text(text)
    said = cli.at_start(tuple(words.split()), OURS)
    if named is None:
        assert said is None
    else:
        assert said.startswith(
            f"{named} stands behind x.py, which reads no arguments: options of `python -m virtualgpu`"
        )


@pytest.mark.parametrize(
    ("text", "words", "status", "named"),
    [
        (PARSES, "x.py --gpus 2", 2, "--gpus stands behind x.py, which got it"),
        (PARSES, "x.py --gpus 2", 0, None),
        (PARSES, "x.py --gpus 2", 1, None),
        (OWN, "x.py --gpus 2 --lear 3", 2, None),  # its own; the fault is another
        (OWN, "x.py --gpus 2 --like H100", 2, "--like stands behind x.py"),
        (PARSES, "torchrun --gpus 2 x.py", 2, "--gpus stands behind torchrun"),
        (PARSES, "-m train --memory 3GB", 2, "--memory stands behind train, which got it"),
        (PARSES, "x.py --help", 2, None),
    ],
)
def test_said_at_the_end(text, words, status, named, tmp_path, monkeypatch):
    """A program that ended as one ends that does not know its arguments."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.py").write_text(text)
    said = cli.at_end(tuple(words.split()), status, OURS)
    assert said is None if named is None else said.startswith(named)


def test_a_program_that_refuses_them(run, tmp_path):
    (tmp_path / "x.py").write_text(PARSES)
    found = run("--quiet", tmp_path / "x.py", "--gpus", 2)
    assert found.returncode == 2 and "unrecognized arguments: --gpus 2" in found.stderr
    last = found.stderr.splitlines()[-1]
    assert last.startswith(f"python -m virtualgpu: --gpus stands behind {tmp_path / 'x.py'}, which got it")
