"""`nvidia-smi topo` and `nvlink`: how the virtual GPUs reach each other."""

import os
import re
import subprocess
import sys

import pytest

from tests.virtualgpu.run.test_tools import smi
from virtualgpu.environment import Settings
from virtualgpu.run import cli


@pytest.fixture
def machine(monkeypatch):
    """Call it: this process is under a runner with so many cards of that name."""
    with cli.folder() as folder:

        def call(count, like, **settings):
            given = Settings(cli.find_cards(count, like, None), folder=folder, **settings)
            for name, value in cli.variables(given, os.environ).items():
                monkeypatch.setenv(name, value)

        yield call


def ways(text):
    """The GPUs' part of a matrix."""
    titles, *rows = [line.split("\t") for line in text.partition("\n\nLegend:")[0].splitlines()]
    count = sum(title.startswith("GPU") and title[3:].isdigit() for title in titles)
    assert [row[0].strip() for row in rows] == titles[1 : count + 1] == [f"GPU{i}" for i in range(count)]
    return [" ".join(cell.strip() for cell in row[1 : count + 1]) for row in rows]


@pytest.mark.parametrize(
    ("like", "way", "peers", "nvlink"),
    [
        ("T4", "PHB", "CNS", "NS"),  # as on Kaggle
        ("4090", "PHB", "CNS", "NS"),
        ("V100", "NV2", "OK", "OK"),
        ("A100", "NV12", "OK", "OK"),
        ("H100", "NV18", "OK", "OK"),
        ("RTX 3090 NVLink", "NV4", "OK", "OK"),
        ("A100,T4", "PHB", "CNS", "NS"),
    ],
)
def test_smi_says_how_gpus_reach_each_other(machine, like, way, peers, nvlink):
    machine(2, like)
    matrix = smi("topo -m")
    assert ways(matrix) == [f"X {way}", f"{way} X"]
    first, row = matrix.splitlines()[:2]
    assert first == "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID"
    assert re.fullmatch(rf"GPU0\t X \t{way}\t[\d,-]+\tN/A\t\tN/A", row)
    assert matrix.endswith("\n  NV#  = Connection traversing a bonded set of # NVLinks\n")
    assert smi("topo --matrix") == matrix
    for what, status in (("r", peers), ("w", peers), ("n", nvlink)):
        assert ways(smi(f"topo -p2p {what}")) == [f"X {status}", f"{status} X"]


def test_smi_topology_of_nodes(machine):
    machine(4, "H100", gpus_per_node=2)
    matrix = smi("topo -m")
    assert ways(matrix) == ["X NV18 N/A N/A", "NV18 X N/A N/A", "N/A N/A X NV18", "N/A N/A NV18 X"]
    assert matrix.endswith("\n  N/A  = On another node: reached over the network (virtual GPUs alone)\n")
    assert ways(smi("topo -p2p r"))[0] == "X OK TNS TNS"


def test_smi_lists_nvlinks(machine):
    machine(2, "A100,T4")
    assert smi("nvlink -s") == smi("nvlink --status")
    first, *links, second, none = smi("nvlink -s").splitlines()
    assert first.startswith("GPU 0: NVIDIA A100-SXM4-40GB (UUID: ") and second.startswith("GPU 1: Tesla T4 (UUID: ")
    assert links == [f"\t Link {number}: 25 GB/s" for number in range(12)]
    assert none == "\t NVML: Unable to retrieve NVLink information as all links are inActive"


def test_the_runner_finds_its_own_nvidia_smi():
    command = [sys.executable, "-m", "virtualgpu", "--gpus", "2", "--quiet", "nvidia-smi", "topo", "-m"]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ways(found.stdout) == ["X PHB", "PHB X"]
