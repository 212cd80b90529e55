"""Tools that ask the driver: nvidia-smi, pynvml, GPUtil, our own Monitor, PyTorch's collect_env."""

import os
import signal
import subprocess
import sys

import pytest

from tests.virtualgpu.run.test_environment import H100, T4
from virtualgpu import environment
from virtualgpu.environment import Settings
from virtualgpu.memory.ledger import Ledger
from virtualgpu.run import cli
from virtualgpu.torch_api import nvml

GIB, MIB = 1 << 30, 1 << 20


@pytest.fixture
def ledger(monkeypatch):
    """This process under a runner with a T4 and an H100; it holds 3 GiB of the H100, which was busy for 1 s of 4."""
    with cli.folder() as folder:
        for name, value in cli.variables(Settings((T4, H100), folder=folder), os.environ).items():
            monkeypatch.setenv(name, value)
        ledger = Ledger(folder, 2)
        ledger.note(1, used=3 * GIB)
        ledger.time(1, busy=1.0, now=4.0)
        yield ledger


def smi(arguments, status=0):
    found = subprocess.run(["nvidia-smi", *arguments.split()], capture_output=True, text=True)
    assert (found.returncode, found.stderr) == (status, "")
    return found.stdout


def test_smi_lists(ledger):
    assert smi("-L").splitlines() == [
        "GPU 0: Tesla T4 (UUID: GPU-00000000-0000-4000-7669-727475616c67)",
        "GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-00000001-0000-4000-7669-727475616c67)",
    ]


def test_smi_queries(ledger):
    fields = "--query-gpu=index,gpu_name,memory.total,memory.used,memory.free,utilization.gpu,power.draw,compute_cap"
    assert smi(f"{fields} --format=csv").splitlines() == [
        "index, name, memory.total [MiB], memory.used [MiB], memory.free [MiB], utilization.gpu [%], power.draw [W], compute_cap",
        "0, Tesla T4, 15095 MiB, 0 MiB, 15095 MiB, 0 %, [N/A], 7.5",
        "1, NVIDIA H100 80GB HBM3, 81079 MiB, 3072 MiB, 78007 MiB, 25 %, [N/A], 9.0",
    ]
    ledger.time(1, busy=2.5, now=6.0)  # since it was asked: 1.5 s of 2
    assert smi("--query-gpu=utilization.gpu --format=csv,noheader,nounits -i 1") == "75\n"
    assert smi("--query-gpu=utilization.gpu --format=csv,noheader --id=0,1") == "0 %\n0 %\n"


def test_smi_processes(ledger):
    found = smi("--query-compute-apps=pid,name,used_memory,gpu_uuid --format=csv,noheader,nounits")
    assert found == f"{os.getpid()}, {nvml.process_name(os.getpid())}, 3072, {environment.uuid(1)}\n"
    assert "py" in nvml.process_name(os.getpid())
    ledger.end()
    assert smi("--query-compute-apps=pid,used_memory --format=csv") == "pid, used_gpu_memory [MiB]\n"


def test_smi_table(ledger):
    told = smi("")
    assert "Driver Version: 580.65.06 " in told and "CUDA Version: 13.0 " in told
    assert "   3072MiB /  81079MiB" in told and "      0MiB /  15095MiB" in told and f" {os.getpid()} " in told
    boxed = told.splitlines()[1:]
    assert {len(line) for line in boxed} == {0, 89}


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        ("--query-gpu=name,speed --format=csv", 2, 'Field "speed" is not a valid field to query.\n\n'),
        ("--query-gpu=name", 1, '"--format=" argument missing'),
        ("-i 2 -L", 6, "No devices were found"),
        ("topo -c 0", 2, "nvidia-smi topo -c 0 is not modelled by virtual GPUs: -L, --query-gpu="),
        ("nvlink -e", 2, "nvidia-smi nvlink -e is not modelled by virtual GPUs: "),
        ("dmon -c 1", 2, "nvidia-smi dmon -c 1 is not modelled by virtual GPUs: "),
        ("-i 0 -q -d MEMORY", 2, "nvidia-smi -q -d MEMORY is not modelled by virtual GPUs: "),
        ("-pm 1", 2, "nvidia-smi -pm 1 is not modelled by virtual GPUs: "),
        ("--nonsense", 2, "nvidia-smi --nonsense is not modelled by virtual GPUs: "),
        ("-i", 1, "Invalid combination of input arguments"),
        ("-l never", 1, "Invalid combination of input arguments"),
    ],
)
def test_smi_refuses(ledger, arguments, status, words):
    assert smi(arguments, status).startswith(words)


@pytest.mark.parametrize(
    ("command", "out", "error"),
    [
        ("nvidia-smi -l 1 | head -1 | wc -l", "1\n", ""),
        ("nvidia-smi >&-; echo $?", "0\n", ""),
        ("nvidia-smi --nonsense >&-; echo $?", "2\n", ""),
        ("nvidia-smi -L <&- | wc -l", "2\n", ""),
        (
            "nvidia-smi -f /nowhere/list; echo $?",
            "1\n",
            "nvidia-smi: [Errno 2] No such file or directory: '/nowhere/list'\n",
        ),
        ("nvidia-smi >/dev/full; echo $?", "1\n", "nvidia-smi: [Errno 28] No space left on device\n"),
    ],
)
def test_smi_where_nobody_reads(ledger, command, out, error):
    found = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert (found.stdout, found.stderr) == (out, error)


def test_smi_loops_without_a_number(ledger):
    """Interrupted while it waits for the next time, which comes after five seconds."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(["nvidia-smi", "-l"], text=True, start_new_session=True, **pipes) as process:
        assert process.stdout.readline()
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        os.killpg(process.pid, signal.SIGTERM)
        assert process.stderr.read() == ""
    assert process.returncode == -signal.SIGTERM


def test_smi_lists_its_fields(ledger):
    fields = smi("--help-query-gpu").splitlines()
    assert (
        "memory.used" in fields and smi(f"--query-gpu={','.join(fields)} --format=csv,noheader -i 0").count("\n") == 1
    )
    assert "used_gpu_memory" in smi("--help-query-compute-apps").splitlines()


def test_smi_by_id(ledger):
    for name in ("1", environment.uuid(1), environment.bus_id(1)):
        assert smi(f"-i {name} --query-gpu=pci.bus_id --format=csv,noheader") == "00000000:02:00.0\n"


def test_gputil_reads_smi(ledger):
    pytest.importorskip("GPUtil")
    code = """if True:
        import GPUtil
        for gpu in GPUtil.getGPUs():
            print(gpu.id, gpu.name, gpu.memoryUsed, gpu.memoryTotal, gpu.load, gpu.driver, gpu.temperature)"""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # GPUtil as it is
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environ, check=True)
    assert found.stdout.splitlines() == [
        "0 Tesla T4 0.0 15095.0 0.0 580.65.06 nan",
        "1 NVIDIA H100 80GB HBM3 3072.0 81079.0 0.25 580.65.06 nan",
    ]


def test_collect_env_reads_smi(ledger):
    from torch.utils import collect_env

    assert collect_env.get_nvidia_driver_version(collect_env.run) == "580.65.06"
    assert collect_env.get_gpu_info(collect_env.run) == "GPU 0: Tesla T4\nGPU 1: NVIDIA H100 80GB HBM3"


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
    assert pynvml.nvmlDeviceGetCount() == 2
    assert (pynvml.nvmlSystemGetDriverVersion(), pynvml.nvmlSystemGetCudaDriverVersion()) == ("580.65.06", 13000)
    handle = pynvml.nvmlDeviceGetHandleByIndex(1)
    assert pynvml.nvmlDeviceGetName(handle) == "NVIDIA H100 80GB HBM3"
    assert pynvml.nvmlDeviceGetUUID(handle) == environment.uuid(1)
    assert pynvml.nvmlDeviceGetCudaComputeCapability(handle) == (9, 0)
    assert pynvml.nvmlDeviceGetPciInfo(handle).busId == "00000000:02:00.0"
    for again in (
        pynvml.nvmlDeviceGetHandleByUUID(environment.uuid(1)),
        pynvml.nvmlDeviceGetHandleByPciBusId("0000:02:00.0"),
    ):
        assert pynvml.nvmlDeviceGetIndex(again) == pynvml.nvmlDeviceGetMinorNumber(again) == 1
    for memory in (
        pynvml.nvmlDeviceGetMemoryInfo(handle),
        pynvml.nvmlDeviceGetMemoryInfo(handle, pynvml.nvmlMemory_v2),
    ):
        assert (memory.total, memory.used, memory.free) == (81079 * MIB, 3 * GIB, 81079 * MIB - 3 * GIB)
    (process,) = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    assert (process.pid, process.usedGpuMemory) == (os.getpid(), 3 * GIB)
    assert pynvml.nvmlDeviceGetComputeRunningProcesses(pynvml.nvmlDeviceGetHandleByIndex(0)) == []
    assert pynvml.nvmlDeviceGetGraphicsRunningProcesses(handle) == []
    assert pynvml.nvmlDeviceGetUtilizationRates(handle).gpu == 25
    assert pynvml.nvmlDeviceGetUtilizationRates(handle).gpu == 0
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


def test_a_source_reads_nvml(pynvml, ledger, monkeypatch):
    from virtualgpu.monitor import NVMLSource, Reading

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", environment.uuid(1)[:12])
    source = NVMLSource()
    assert source.devices == ["cuda:0"] and source.read() == [Reading(25.0)]


def test_nvml_of_one_process_without_a_runner(monkeypatch):
    pynvml = pytest.importorskip("pynvml")
    import torch

    import virtualgpu
    from virtualgpu.torch_api.patches import Patches

    monkeypatch.setenv("HELPERS_GPUS", "virtual")
    before = pynvml.nvmlLib
    with virtualgpu.gpus(2):
        machine, patches = virtualgpu.machine(), Patches()
        x = torch.ones(1 << 20, device="cuda:1")
        nvml.install(machine, patches)
        try:
            pynvml.nvmlInit()
            memory = pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(1))
            assert (memory.free, memory.total) == torch.cuda.mem_get_info(1) and memory.used > x.nbytes
            assert pynvml.nvmlDeviceGetUtilizationRates(pynvml.nvmlDeviceGetHandleByIndex(1)).gpu > 0
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
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.stdout == "0 0 2\n", found.stderr
