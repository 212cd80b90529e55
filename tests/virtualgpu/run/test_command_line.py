"""Bad options end with one sentence and status 2, before anything is started."""

import subprocess
import sys

import pytest

from virtualgpu import environment
from virtualgpu.run import cli


@pytest.mark.parametrize(
    ("line", "words"),
    [
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
        ("--rank 1 x.py", "--world-size N"),
        ("--world-size 2 x.py", "add --dry"),
        ("--dry --world-size many x.py", "--world-size 'many': give a whole number"),
        ("--dry --world-size 0 x.py", "--world-size 0: world_size=0: give a whole number, 1 at least"),
        ("--dry --world-size 2 --rank 2 x.py", "--world-size 2: rank=2 of world_size=2: ranks count from 0 to 1"),
        ("--dry --world-size 2 --gpus-per-node 0 x.py", "gpus_per_node=0: give a whole number"),
        ("--dry --world-size 4 --like 3090-NVLink x.py", "joins two equal cards"),
        ("--gpus 4 --gpus-per-node 3 x.py", "--gpus-per-node 3: gpus_per_node=3 does not divide 4 GPUs into nodes"),
        ("--gpus-per-node half x.py", "--gpus-per-node 'half': give a whole number"),
        ("--network wet x.py", "--network: there is no network called 'wet' here; choose one of InfiniBand HDR"),
        ("--gpus 3 --like TITAN-RTX-NVLink x.py", "joins two equal cards"),
    ],
)
def test_bad_options(line, words, capsys):
    assert cli.main(line.split()) == 2
    out, error = capsys.readouterr()
    assert not out and words in error
    assert error.startswith("python -m virtualgpu: ") and error.count("\n") == 1


def test_options_end_where_the_program_begins():
    found = cli.parse(["--gpus=4", "--dry", "--like", "L4", "-m", "train", "--gpus", "2", "--dry"])
    assert found.program == ("-m", "train", "--gpus", "2", "--dry")
    assert (found.gpus, found.dry, found.like, found.quiet) == (4, True, "L4", None)
    found = cli.parse(["train.py", "--quiet"])
    assert (found.program, found.quiet, found.like) == (("train.py", "--quiet"), None, "T4")
    assert cli.parse(["-"]).program == ("-",)


def settings_of(line: str):
    return cli._settings(cli.parse(line.split()))


def test_what_processes_are_told_of_nodes():
    told = settings_of("--gpus 4 --gpus-per-node 2 --network ndr x.py")
    assert (told.gpus_per_node, told.network, told.single_rank) == (2, "InfiniBand NDR", None)
    told = settings_of("--dry --world-size 64 --rank 9 --network=40Gb/s x.py")
    assert (told.gpus_per_node, told.network, told.single_rank) == (None, "40Gb/s", (64, 9, 8))
    told = settings_of("x.py")
    assert (told.gpus_per_node, told.network, told.single_rank) == (None, None, None)
    told = settings_of("--dry --world-size 64 --rank 9 --network=40Gb/s x.py")
    assert environment.settings({"VIRTUALGPU": told.text()})._replace(single_rank=(64, 9, 8)) == told


def test_cards_for_each_gpu(tmp_path, monkeypatch):
    assert [card.name for card in cli.find_cards(None, "T4", None)] == ["Tesla T4"] * 2
    mixed = cli.find_cards(None, "T4, A100", "16 GB")
    assert [(card.name, card.memory) for card in mixed] == [("Tesla T4", 16 << 30), ("NVIDIA A100-SXM4-40GB", 16 << 30)]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text('base = "T4"\nname = "Mine"\n')
    (mine,) = cli.find_cards(1, "mine.toml", None)
    assert (mine.name, mine.like) == ("Mine", str(tmp_path / "mine.toml"))  # wherever the program goes


def test_the_list_of_cards(capsys):
    assert cli.main(["--cards"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in ("T4", "NVIDIA H100 80GB HBM3", "TITAN RTX", "B200"))


def test_help(capsys):
    assert cli.main(["--help"]) == cli.main(["-h"]) == 0
    told = capsys.readouterr().out
    assert all(told.count(f"\n  {option} ") == 2 for option in cli.OPTIONS.keys() - {"--help"})


def test_the_runner_itself_imports_no_torch():
    code = """if True:
        import sys
        from virtualgpu.run import cli
        import virtualgpu.run.explain.cli, virtualgpu.run.fit.cli
        cli._settings(cli.parse("--dry --world-size 8 --network NDR --like A100 x.py".split()))
        print(cli.find_cards(2, "A100", "16GB")[1].memory, "torch" in sys.modules)"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == [str(16 << 30), "False"]


def test_python_told_to_heed_no_environment(capsys):
    command = [sys.executable, "-s", "-E", "-m", "virtualgpu", "-c", "print('never')"]
    found = subprocess.run(command, capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (2, "") and "-E" in found.stderr


def test_flags_of_python_are_the_programs():
    flags = cli.interpreter_flags
    assert flags(["python", "-X", "dev", "-u", "-m", "virtualgpu", "-m", "virtualgpu"]) == ["-X", "dev", "-u"]
    assert flags(["python", "-um", "virtualgpu", "x.py"]) == ["-u"]
    assert flags(["python", "-m", "virtualgpu", "x.py"]) == flags(["pytest", "x"]) == []
