"""The command lines of the runner, `--explain` and `fit`, read before anything is started: options, cards, the program, and options behind it."""

import contextlib
import os
import sys
import threading

import pytest

from virtualgpu import environment, scratch
from virtualgpu.run import cli, launcher, options

LONE = "--dry --world-size"
REFUSED = [
    ("", "name a program"),
    ("-m", "-m needs a module"),
    ("-c", "-c needs code"),
    ("--gpus", "--gpus needs a value"),
    ("--gpus 0 x.py", "1 to 64"),
    ("--gpus 65 x.py", "1 to 64"),
    ("--gpus two x.py", "'two'"),
    ("--gpus=1.5 x.py", "'1.5'"),
    ("--like T5 x.py", "T4, V100"),
    ("--like T4,H100,L4 --gpus 2 x.py", "3 cards"),
    ("--memory lots x.py", "'lots' is not a size"),
    ("--memory 1MB x.py", "at least 2 MiB"),
    ("--speed x.py", "'--speed'"),
    ("--dry=yes x.py", "'--dry=yes'"),
    ("--trace /nowhere/t.json x.py", "'/nowhere/t.json'"),
    ("--quiet --report x.py", "contradict"),
    ("--timers cpu x.py", "--timers 'cpu': choose simulated or real"),
    ("--rank 1 x.py", "--world-size N"),
    ("--world-size 2 x.py", "add --dry"),
    (f"{LONE} many x.py", "--world-size 'many': give a whole number"),
    (f"{LONE} 0 x.py", "--world-size 0: world_size=0: give a whole number, 1 at least"),
    (f"{LONE} 2 --rank 2 x.py", "--world-size 2: rank=2 of world_size=2: ranks count from 0 to 1"),
    (f"{LONE} 2 --gpus-per-node 0 x.py", "gpus_per_node=0: give a whole number"),
    (f"{LONE} 4 --like 3090-NVLink x.py", "joins two equal cards"),
    ("--gpus 4 --gpus-per-node 3 x.py", "--gpus-per-node 3: gpus_per_node=3 does not divide 4 GPUs into nodes"),
    ("--gpus-per-node half x.py", "--gpus-per-node 'half': give a whole number"),
    ("--network wet x.py", "--network: there is no network called 'wet' here; choose one of InfiniBand HDR"),
    ("--gpus 3 --like TITAN-RTX-NVLink x.py", "joins two equal cards"),
    ("torchrn x.py", "'torchrn' is neither a file here nor a command on PATH"),
    *[(f"{option} x.py", "is of --explain") for option in ("--json", "--steps=3", "--jobs=1")],
    ("--explain --gpus 1", "name a program to run"),
    ("--explain --gpus 1 --like T5 x.py", "T5"),
    ("--explain --gpus 1 --trace t.json x.py", "leave out --trace"),
    ("--explain --gpus 1 --report x.py", "leave out --report"),
    ("--explain --gpus 1 --steps 1 x.py", "one step has the beginnings"),
    ("--explain --gpus 1 --steps two x.py", "give a whole number"),
    ("--explain --gpus 1 --jobs", "--jobs needs a value"),
    ("--explain --gpus 1 no_such_command", "neither a file here nor a command"),
    ("fit", "name a program to try"),
    ("fit --like T5 x.py", "T5"),
    ("fit --gpus two x.py", "--gpus 'two': give whole numbers with commas"),
    ("fit --vary batch-size x.py", "give an option of the program and its values"),
    ("fit --vary n=9..3 x.py", "n=9..3: the first number"),
    ("fit --vary n=1..3 --vary m=1..3 x.py", "one option can be searched at a time"),
    ("fit --prices nowhere.csv x.py", "columns card and usd_per_hour"),
    ("fit --cheap x.py", "there is no option '--cheap'"),
    ("fit --samples 8x2 x.py", "--samples: '8x2' is no product of numbers"),
    ("fit --world-size 8 --gpus 2 x.py", "one rank plays alone, on one GPU"),
]


def refusal(capsys, line) -> str:
    assert cli.main(line.split()) == 2
    out, error = capsys.readouterr()
    assert not out and error.count("\n") == 1
    return error


@pytest.mark.parametrize(("line", "message"), REFUSED)
def test_what_is_wrong_is_one_sentence(line, message, capsys):
    error = refusal(capsys, line)
    assert message in error and error.startswith(f"python -m virtualgpu{' fit' * line.startswith('fit')}: ")


def raises(error):
    def stand_in(*arguments):
        raise error

    return stand_in


NO_FOLDER = FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")


@pytest.mark.parametrize(("place", "name", "error", "messages"), [
    (threading.Thread, "start", RuntimeError("can't start new thread"), ["no process or thread more", "`ulimit -u`"]),
    (cli, "run", OSError(11, "Resource temporarily unavailable"), ["temporarily unavailable", "`ulimit -u`"]),
    (cli, "run", OSError(24, "Too many open files"), ["Too many open files", "`ulimit -n 1024`"]),
    (scratch.tempfile, "gettempdir", NO_FOLDER, ["No usable temporary directory", "set TMPDIR"]),
])  # fmt: skip
def test_what_the_system_has_no_more_of_is_said_with_the_cure(monkeypatch, capsys, place, name, error, messages):
    monkeypatch.setattr(place, name, raises(error))
    error = refusal(capsys, "fit x.py" if place is threading.Thread else "x.py")
    assert all(message in error for message in messages)


def test_options_end_where_the_program_begins():
    line = cli.parse(["--gpus=4", "--dry", "--like", "L4", "-m", "train", "--gpus", "2", "--dry"])
    assert line.program == ("-m", "train", "--gpus", "2", "--dry")
    assert (line.gpus, line.dry, line.like, line.quiet) == (4, True, "L4", None)
    line = cli.parse(["train.py", "--quiet"])
    assert (line.program, line.quiet, line.like) == (("train.py", "--quiet"), None, "T4")
    assert cli.parse(["-"]).program == ("-",)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--gpus 4 --gpus-per-node 2 --network ndr x.py", (2, "InfiniBand NDR", None)),
        ("--dry --world-size 64 --rank 9 --network=40Gb/s x.py", (None, "40Gb/s", (64, 9, 8))),
        ("x.py", (None, None, None)),
    ],
)
def test_processes_learn_of_nodes(line, expected):
    settings = cli._settings(cli.parse(line.split()))
    assert (settings.gpus_per_node, settings.network, settings.single_rank) == expected
    passed_on = environment.settings({"VIRTUALGPU": settings.text()})
    assert passed_on._replace(single_rank=settings.single_rank) == settings


def test_cards_for_each_gpu(tmp_path, monkeypatch):
    assert [card.name for card in launcher.find_cards(None, "T4", None)] == ["Tesla T4"] * 2
    mixed = launcher.find_cards(None, "T4, A100", "16 GB")
    assert [(card.name, card.memory) for card in mixed] == [("Tesla T4", 16 << 30), ("NVIDIA A100-SXM4-40GB", 16 << 30)]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text('base = "T4"\nname = "Mine"\n')
    (mine,) = launcher.find_cards(1, "mine.toml", None)
    assert (mine.name, mine.like) == ("Mine", str(tmp_path / "mine.toml"))  # wherever the program goes


def test_cards_and_help_are_listed(capsys):
    assert cli.main(["--cards"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in ("T4", "NVIDIA H100 80GB HBM3", "TITAN RTX", "B200"))
    assert cli.main(["--help"]) == cli.main(["-h"]) == 0
    usage = capsys.readouterr().out
    assert all(usage.count(f"\n  {option} ") == 2 for option in cli.OPTIONS.keys() - {"--help"})


# -- Which program is started, with which of Python's flags


def executable(path, text):
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def test_a_script_goes_to_this_python_and_a_command_by_itself(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    commands = tmp_path / "bin"
    commands.mkdir()
    monkeypatch.setenv("PATH", f"{commands}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(sys, "orig_argv", [sys.executable, "-u", "-m", "virtualgpu", "x"])
    python = [sys.executable, "-u"]
    console = executable(commands / "trainer", "#!/opt/some/python3.11\nprint(1)\n")
    shell = executable(commands / "shelly", "#!/bin/sh /home/python/x\n")
    by_pip = "#!/bin/sh\n'''exec' \"/a b/python3\" \"$0\" \"$@\"\n' '''\n"
    spaced = executable(commands / "spaced", by_pip)
    own = executable(tmp_path / "run.sh", "#!/bin/sh\n")
    executable(tmp_path / "x.py", "print(3)\n")
    (tmp_path / "plain.sh").write_text("#!/bin/sh\n")  # not executable
    (tmp_path / "shelly").mkdir()  # a folder without a program does not hide a command
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "__main__.py").write_text("")
    for words, started in [
        (["trainer", "fit", "--gpus", "2"], [*python, console, "fit", "--gpus", "2"]),
        (["shelly", "x"], [shell, "x"]),
        (["-m", "trainer"], [*python, "-m", "trainer"]),
        (["-"], [*python, "-"]),
        (["folder"], [*python, "folder"]),
        (["spaced", "x"], [*python, spaced, "x"]),
        (["./x.py", "1"], [*python, "./x.py", "1"]),
        (["plain.sh"], [*python, "plain.sh"]),
        ([own], [own]),
    ]:
        assert launcher.command(words) == started
    (tmp_path / "trainer").write_text("print(2)\n")  # a file comes before a command
    assert launcher.command(["trainer"]) == [*python, "trainer"]
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    torchrun = os.path.join(os.path.dirname(sys.executable), "torchrun")
    if os.path.exists(torchrun):  # of this Python's environment, also where that is not on PATH
        assert launcher.command(["torchrun", "x.py"]) == [*python, torchrun, "x.py"]


def test_flags_of_python_are_the_programs():
    flags = launcher.interpreter_flags
    assert flags(["python", "-X", "dev", "-u", "-m", "virtualgpu", "-m", "virtualgpu"]) == ["-X", "dev", "-u"]
    assert flags(["python", "-um", "virtualgpu", "x.py"]) == ["-u"]
    assert flags(["python", "-m", "virtualgpu", "x.py"]) == flags(["pytest", "x"]) == []


# -- Options behind the program: named where it cannot have meant them, and never otherwise

READS_NOTHING = "import torch, os\nfrom torch import nn\nx = torch.ones(3, device='cuda')\n"
BEHIND = "reads no arguments: options of `python -m virtualgpu` come before the program"


@pytest.mark.parametrize(
    ("text", "words", "named"),
    [
        ("", "x.py --gpus 2", f"--gpus stands behind x.py, which {BEHIND}"),
        ("", "x.py --like=H100 --dry", "--like"),
        ("", "torchrun --nproc-per-node 2 x.py --quiet", "--quiet"),
        ("", "-m torch.distributed.run x.py --trace t.json", "--trace"),
        ("", "x.py", None),
        ("", "x.py --lr 3 -- --gpus 2", None),
        ("", "-m pytest x.py --report", None),
        ("", "nowhere.py --gpus 2", None),
        ("import lightning\n", "x.py --gpus 2", None),
        ("from .options import options\n", "x.py --gpus 2", None),
        ("import sys\nprint(sys.argv)\n", "x.py --gpus 2", None),
        ("import argparse\n", "x.py --gpus 2", None),
        ("no Python at all", "x.py --gpus 2", None),
    ],
)
def test_options_behind_the_program(text, words, named, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.py").write_text(READS_NOTHING + text)
    sentence = options.misplaced(tuple(words.split()), cli.OPTIONS.keys() - {"--help"})
    assert sentence is None if named is None else sentence.startswith(named)


def test_an_interrupt_before_anything_is_started(monkeypatch):
    monkeypatch.setattr(cli, "find_cards", raises(KeyboardInterrupt()))
    ends = []
    monkeypatch.setattr("virtualgpu.run.processes.end_as", lambda status: ends.append(status) or 130)
    with contextlib.suppress(KeyboardInterrupt):
        cli.main(["-c", ""])
    assert ends == [-2]
