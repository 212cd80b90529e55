"""The examples of docs/ do what is written there."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import virtualgpu.environment
from virtualgpu import _compat
from virtualgpu.run import cli

PACKAGE = Path(virtualgpu.environment.__file__).parent
DOCS = "\n".join(page.read_text("utf-8") for page in sorted((PACKAGE / "docs").glob("*.md")))


def written(name, folder):
    """Write the program called `name`; the command below it there, and the lines that follow."""
    program, command, shown = re.search(
        rf"```python\n(# {name}\n.*?)```\n\n```console\n\$ (.*?)\n(.*?)```", DOCS, re.DOTALL
    ).groups()
    (folder / name).write_text(program, "utf-8")
    return command, shown.splitlines()


def example(name, folder, environ, *options, status=0):
    """Run the command, with options before its own; its output's lines, and those that the page shows."""
    command, shown = written(name, folder)
    words = shlex.split(command.replace("virtualgpu", shlex.join(["virtualgpu", *options]), 1))
    words = [sys.executable, *(words[1:] if words[0] == "python" else ["-m", *words])]
    found = subprocess.run(words, cwd=folder, env=environ, text=True, capture_output=True)
    assert found.returncode == status, found.stdout + found.stderr
    return (found.stdout + found.stderr).splitlines(), shown


@pytest.fixture
def in_process(tmp_path, monkeypatch, capsys, warm):
    """The same for a command that tries a program many times, which is run by this process. less: what to replace in the
    command, and by what."""

    def start(main, name, less):
        command, shown = written(name, tmp_path)
        assert less[0] in command
        monkeypatch.chdir(tmp_path)
        monkeypatch.delenv("HELPERS_GPUS", raising=False)
        words = shlex.split(command.replace(*less))
        status = main(words[words.index("virtualgpu") + 1 :])
        captured = capsys.readouterr()
        assert status == 0, captured.err
        return captured.out.splitlines(), shown

    return start


of_2_15 = pytest.mark.skipif(_compat.KEEPS_WORKSPACES, reason="before PyTorch 2.15 cuBLAS's workspaces are kept")


@of_2_15
def test_the_runner(tmp_path, clean_environ):
    printed, shown = example("train.py", tmp_path, clean_environ)
    assert printed == shown and "\n".join(shown) in (PACKAGE / "README.md").read_text("utf-8")


@of_2_15
def test_several_processes(tmp_path, clean_environ):
    """And the trace of the ranks, in which a collective takes place on all of them at once."""
    printed, shown = example("ddp.py", tmp_path, clean_environ, "--trace", "trace.json")
    assert printed[-len(shown) - 1 : -1] == shown  # torchrun has words of its own before
    assert printed[-1].startswith("Trace of 2 processes in ")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert sorted(name.split(" (")[0] for name in names.values()) == ["rank 0", "rank 1"]
    zero, one = (
        [(e["name"], e["ts"], e["dur"]) for e in events if e.get("cat") == "communication" and e["pid"] == pid]
        for pid in names
    )
    assert zero == one and len(zero) > 12


@of_2_15
def test_what_fits(in_process):
    printed, shown = in_process(cli.main, "translate.py", less=("=128", "=128"))
    assert printed == shown


@of_2_15
def test_where_the_step_goes(in_process):
    """One rank of the two plays alone: all but the second column. Two ranks: test_explain_programs."""
    torchrun = "--gpus 2 torchrun --standalone --nproc-per-node 2"
    printed, shown = in_process(cli.main, "pair.py", less=(torchrun, "--world-size 2"))
    end = shown[1].index("rank 0") + len("rank 0")
    assert printed[1:13] == [line[:end] for line in shown[1:13]]
    assert all(line[:end].endswith(line[end:].strip()) for line in shown[2:13])
    assert printed[13:] == [line.replace("rank 0's step", "the step") for line in shown[13:]]


def test_a_race_and_the_plugin(tmp_path, clean_environ):
    printed, shown = example("race.py", tmp_path, clean_environ, status=1)
    assert printed[-len(shown) :] == shown  # a traceback before
    printed, shown = example("test_sharding.py", tmp_path, clean_environ)
    assert printed[-1].startswith(shown[-1]) and shown[-1] == "2 passed"
