"""Tools that ask the driver: nvidia-smi, pynvml, GPUtil, our own Monitor, PyTorch's collect_env."""

import os
import re
import signal
import subprocess
import sys

import pytest
import torch
from torch.utils import collect_env

import virtualgpu
from tests.virtualgpu.run.test_environment import H100, T4
from virtualgpu import environment
from virtualgpu.environment import Settings
from virtualgpu.memory.ledger import Ledger
from virtualgpu.monitor import NVMLSource, Reading
from virtualgpu.run import launcher
from virtualgpu.torch_api import nvml
from virtualgpu.torch_api.patches import Patches

GIB, MIB = 1 << 30, 1 << 20


@pytest.fixture
def machine(monkeypatch):
    """Call it: this process is under a runner with these cards."""
    with launcher.folder() as folder:

        def call(cards, **settings) -> str:
            given = Settings(tuple(cards), folder=folder, **settings)
            for name, value in launcher.variables(given, os.environ).items():
                monkeypatch.setenv(name, value)
            return folder

        yield call


@pytest.fixture
def ledger(machine):
    """This process under a runner with a T4 and an H100; it holds 3 GiB of the H100, which was busy for 1 s of 4."""
    ledger = Ledger(machine((T4, H100)), 2)
    ledger.note(1, used=3 * GIB)
    ledger.time(1, busy=1.0, now=4.0)
    return ledger


def smi(arguments, status=0):
    ended = subprocess.run(["nvidia-smi", *arguments.split()], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (status, "")
    return ended.stdout


def test_lists_and_queries(ledger):
    assert smi("-L").splitlines() == [
        "GPU 0: Tesla T4 (UUID: GPU-00000000-0000-4000-7669-727475616c67)",
        "GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-00000001-0000-4000-7669-727475616c67)",
    ]
    fields = "--query-gpu=index,gpu_name,memory.total,memory.used,memory.free,utilization.gpu,power.draw,compute_cap"
    assert smi(f"{fields} --format=csv").splitlines() == [
        "index, name, memory.total [MiB], memory.used [MiB], memory.free [MiB], utilization.gpu [%], power.draw [W], compute_cap",
        "0, Tesla T4, 15095 MiB, 0 MiB, 15095 MiB, 0 %, [N/A], 7.5",
        "1, NVIDIA H100 80GB HBM3, 81079 MiB, 3072 MiB, 78007 MiB, 25 %, [N/A], 9.0",
    ]
    ledger.time(1, busy=2.5, now=6.0)  # since it was asked: 1.5 s of 2
    assert smi("--query-gpu=utilization.gpu --format=csv,noheader,nounits -i 1") == "75\n"
    assert smi("--query-gpu=utilization.gpu --format=csv,noheader --id=0,1") == "0 %\n0 %\n"
    for name in ("1", environment.uuid(1), environment.bus_id(1)):
        assert smi(f"-i {name} --query-gpu=pci.bus_id --format=csv,noheader") == "00000000:02:00.0\n"
    fields = smi("--help-query-gpu").splitlines()
    assert "memory.used" in fields and "used_gpu_memory" in smi("--help-query-compute-apps").splitlines()
    assert smi(f"--query-gpu={','.join(fields)} --format=csv,noheader -i 0").count("\n") == 1


def test_the_table_and_processes(ledger):
    table = smi("")
    assert "Driver Version: 580.65.06 " in table and "CUDA Version: 13.0 " in table
    assert "   3072MiB /  81079MiB" in table and "      0MiB /  15095MiB" in table and f" {os.getpid()} " in table
    assert {len(line) for line in table.splitlines()[1:]} == {0, 89}
    found = smi("--query-compute-apps=pid,name,used_memory,gpu_uuid --format=csv,noheader,nounits")
    assert found == f"{os.getpid()}, {nvml.process_name(os.getpid())}, 3072, {environment.uuid(1)}\n"
    assert "py" in nvml.process_name(os.getpid())
    ledger.end()
    assert smi("--query-compute-apps=pid,used_memory --format=csv") == "pid, used_gpu_memory [MiB]\n"


NOT_MODELLED = "is not modelled by virtual GPUs: -L, --query-gpu="
ELSE = ["topo -c 0", "topo -p2p r", "nvlink -s", "dmon -c 1", "-pm 1", "--nonsense", "-lms 5", "-f /tmp/x"]


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ("--query-gpu=name,speed --format=csv", 2, 'Field "speed" is not a valid field to query.\n\n'),
        ("--query-gpu=name", 1, '"--format=" argument missing'),
        ("-i 2 -L", 6, "No devices were found"),
        ("-i", 1, "Invalid combination of input arguments"),
        ("-l never", 1, "Invalid combination of input arguments"),
        ("-i 0 -q -d MEMORY", 2, f"nvidia-smi -q -d MEMORY {NOT_MODELLED}"),
        *[(arguments, 2, f"nvidia-smi {arguments} {NOT_MODELLED}") for arguments in ELSE],
    ],
)
def test_refusals(ledger, arguments, status, message):
    assert smi(arguments, status).startswith(message)


@pytest.mark.parametrize(
    ("command", "out", "error"),
    [
        ("nvidia-smi -l 1 | head -1 | wc -l", "1\n", ""),
        ("nvidia-smi >&-; echo $?", "0\n", ""),
        ("nvidia-smi --nonsense >&-; echo $?", "2\n", ""),
        ("nvidia-smi -L <&- | wc -l", "2\n", ""),
        ("nvidia-smi >/dev/full; echo $?", "1\n", "nvidia-smi: [Errno 28] No space left on device\n"),
    ],
)
def test_where_nobody_reads(ledger, command, out, error):
    ended = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert (ended.stdout, ended.stderr) == (out, error)


def test_loops_without_a_number(ledger):
    """Interrupted while it waits for the next time, which comes after five seconds."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(["nvidia-smi", "-l"], text=True, start_new_session=True, **pipes) as process:
        assert process.stdout.readline()
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        os.killpg(process.pid, signal.SIGTERM)
        assert process.stderr.read() == ""
    assert process.returncode == -signal.SIGTERM


# -- How GPUs reach each other


def ways(text):
    """The GPUs' part of a matrix."""
    titles, *rows = [line.split("\t") for line in text.partition("\n\nLegend:")[0].splitlines()]
    count = sum(title.startswith("GPU") and title[3:].isdigit() for title in titles)
    assert [row[0].strip() for row in rows] == titles[1 : count + 1] == [f"GPU{i}" for i in range(count)]
    return [" ".join(cell.strip() for cell in row[1 : count + 1]) for row in rows]


@pytest.mark.parametrize(
    ("like", "way"),
    [
        ("T4", "PHB"),  # as on Kaggle
        ("V100", "NV2"),
        ("A100", "NV12"),
        ("H100", "NV18"),
        ("RTX 3090 NVLink", "NV4"),
        ("A100,T4", "PHB"),
    ],
)
def test_topology(machine, like, way):
    machine(launcher.find_cards(2, like, None))
    matrix = smi("topo -m")
    assert ways(matrix) == [f"X {way}", f"{way} X"]
    first, row = matrix.splitlines()[:2]
    assert first == "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID"
    assert re.fullmatch(rf"GPU0\t X \t{way}\t[\d,-]+\tN/A\t\tN/A", row)
    assert matrix.endswith("\n  NV#  = Connection traversing a bonded set of # NVLinks\n")
    assert smi("topo --matrix") == matrix


def test_topology_of_nodes(machine):
    machine(launcher.find_cards(4, "H100", None), gpus_per_node=2)
    matrix = smi("topo -m")
    assert ways(matrix) == ["X NV18 N/A N/A", "NV18 X N/A N/A", "N/A N/A X NV18", "N/A N/A NV18 X"]
    assert matrix.endswith("\n  N/A  = On another node: reached over the network (virtual GPUs alone)\n")


def test_the_runner_finds_its_own_nvidia_smi():
    command = [sys.executable, "-m", "virtualgpu", "--gpus", "2", "--quiet", "nvidia-smi", "topo", "-m"]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ways(ended.stdout) == ["X PHB", "PHB X"]


# -- Other tools


def test_gputil_and_collect_env_read_smi(ledger):
    assert collect_env.get_nvidia_driver_version(collect_env.run) == "580.65.06"
    assert collect_env.get_gpu_info(collect_env.run) == "GPU 0: Tesla T4\nGPU 1: NVIDIA H100 80GB HBM3"
    pytest.importorskip("GPUtil")
    code = """if True:
        import GPUtil
        for gpu in GPUtil.getGPUs():
            print(gpu.id, gpu.name, gpu.memoryUsed, gpu.memoryTotal, gpu.load, gpu.driver, gpu.temperature)"""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # GPUtil as it is
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environ, check=True)
    assert ended.stdout.splitlines() == [
        "0 Tesla T4 0.0 15095.0 0.0 580.65.06 nan",
        "1 NVIDIA H100 80GB HBM3 3072.0 81079.0 0.25 580.65.06 nan",
    ]


@pytest.fixture
def pynvml(ledger, monkeypatch):
    pynvml = pytest.importorskip("pynvml")
    monkeypatch.setattr(pynvml, "nvmlLib", nvml.of_the_runner())
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    return pynvml


def test_nvml_answers_as_the_driver_would(pynvml, ledger):
    with pytest.raises(pynvml.NVMLError_Uninitialized):
        pynvml.nvmlDeviceGetCount()
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(1)
    for name, arguments, answer in [
        ("DeviceGetCount", (), 2),
        ("SystemGetDriverVersion", (), "580.65.06"),
        ("SystemGetCudaDriverVersion", (), 13000),
        ("DeviceGetName", (handle,), "NVIDIA H100 80GB HBM3"),
        ("DeviceGetUUID", (handle,), environment.uuid(1)),
        ("DeviceGetCudaComputeCapability", (handle,), (9, 0)),
        ("DeviceGetComputeRunningProcesses", (pynvml.nvmlDeviceGetHandleByIndex(0),), []),
        ("DeviceGetGraphicsRunningProcesses", (handle,), []),
    ]:
        assert getattr(pynvml, f"nvml{name}")(*arguments) == answer
    assert pynvml.nvmlDeviceGetPciInfo(handle).busId == "00000000:02:00.0"
    for again in (
        pynvml.nvmlDeviceGetHandleByUUID(environment.uuid(1)),
        pynvml.nvmlDeviceGetHandleByPciBusId("0000:02:00.0"),
    ):
        assert pynvml.nvmlDeviceGetIndex(again) == pynvml.nvmlDeviceGetMinorNumber(again) == 1
    for version in ((), (pynvml.nvmlMemory_v2,)):
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle, *version)
        assert (memory.total, memory.used, memory.free) == (81079 * MIB, 3 * GIB, 81079 * MIB - 3 * GIB)
    (process,) = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    assert (process.pid, process.usedGpuMemory) == (os.getpid(), 3 * GIB)
    assert [pynvml.nvmlDeviceGetUtilizationRates(handle).gpu for _ in range(2)] == [25, 0]
    ledger.time(1, busy=2.5, now=6.0)
    assert pynvml.nvmlDeviceGetUtilizationRates(handle).gpu == 75
    pynvml.nvmlShutdown()
    with pytest.raises(pynvml.NVMLError_Uninitialized):
        pynvml.nvmlDeviceGetName(handle)


def test_nvml_refuses_as_the_driver_would(pynvml):
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    for ask in (lambda: pynvml.nvmlDeviceGetTemperature(handle, 0), lambda: pynvml.nvmlDeviceGetPowerUsage(handle)):
        with pytest.raises(pynvml.NVMLError_NotSupported, match="Not Supported"):
            ask()
    with pytest.raises(pynvml.NVMLError_InvalidArgument):
        pynvml.nvmlDeviceGetHandleByIndex(2)
    with pytest.raises(pynvml.NVMLError_NotFound):
        pynvml.nvmlDeviceGetHandleByUUID("GPU-1")


def test_a_source_reads_nvml(pynvml, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", environment.uuid(1)[:12])
    source = NVMLSource()
    assert source.devices == ["cuda:0"] and source.read() == [Reading(25.0)]


def test_nvml_of_one_process_without_a_runner(monkeypatch):
    pynvml = pytest.importorskip("pynvml")
    monkeypatch.setenv("HELPERS_GPUS", "virtual")
    before = pynvml.nvmlLib
    with virtualgpu.gpus(2):
        patches = Patches()
        x = torch.ones(1 << 20, device="cuda:1")
        nvml.install(virtualgpu.machine(), patches)
        try:
            pynvml.nvmlInit()
            handle = pynvml.nvmlDeviceGetHandleByIndex(1)
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
            assert (memory.free, memory.total) == torch.cuda.mem_get_info(1) and memory.used > x.nbytes
            assert pynvml.nvmlDeviceGetUtilizationRates(handle).gpu > 0
        finally:
            patches.restore()
    assert pynvml.nvmlLib is before


def test_a_copy_of_pynvml_is_answered_when_imported(ledger, tmp_path):
    (tmp_path / "vendored").mkdir()
    (tmp_path / "vendored" / "__init__.py").write_text("")
    (tmp_path / "vendored" / "pynvml.py").write_text(
        "nvmlLib = None\ndef _nvmlGetFunctionPointer(name):\n    return getattr(nvmlLib, name)\n"
    )
    code = f"""if True:
        import sys; sys.path.insert(0, {str(tmp_path)!r})
        import ctypes, vendored.pynvml as p
        n = ctypes.c_uint()
        print(p._nvmlGetFunctionPointer("nvmlInit_v2")(), end=" ")
        print(p._nvmlGetFunctionPointer("nvmlDeviceGetCount_v2")(ctypes.byref(n)), n.value)"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.stdout == "0 0 2\n", ended.stderr
