"""Figures, history and snapshots of memory through PyTorch's own functions, and what its viewer makes of them."""

import base64
import io
import pickle
import re

import pytest
import torch
from torch.cuda import _memory_viz

import virtualgpu
from tests.virtualgpu.memory.programs import KIB, MIB, Time
from virtualgpu.memory.snapshot import kinds


@pytest.fixture
def gpus():
    """Two GPUs of 100 MiB, of which the first is current; under clocks that tests set."""
    virtualgpu.gpus(2, memory="100 MB")
    torch.ones(1, device="cuda"), torch.ones(1, device="cuda:1")
    gpus = virtualgpu.machine().gpus
    for gpu in gpus:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(gpu.index)
        gpu.memory.timeline = Time()
    return gpus


def made_here(gpu, nbytes: int):
    return gpu.memory.malloc(nbytes)


def actions(trace: list[dict]) -> list[str]:
    return [entry["action"] for entry in trace]


def test_figures_by_pytorchs_functions(gpus):
    block = made_here(gpus[1], 3 * MIB)
    assert torch.cuda.memory_allocated(1) == 3 * MIB and torch.cuda.memory_allocated() == 0
    assert torch.cuda.memory_reserved("cuda:1") == 20 * MIB == torch.cuda.memory_reserved(torch.device("cuda", 1))
    assert torch.cuda.memory_allocated(torch.cuda.device(1)) == 3 * MIB
    gpus[1].memory.free(block)
    assert torch.cuda.max_memory_allocated(1) == 3 * MIB
    torch.cuda.reset_peak_memory_stats(1)
    assert torch.cuda.max_memory_allocated(1) == 0
    torch.cuda.reset_accumulated_memory_stats(1)
    assert torch.cuda.memory_stats(1)["allocation.all.allocated"] == 0
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved(1) == 0 and torch.cuda.max_memory_reserved(1) == 20 * MIB
    with pytest.raises(RuntimeError, match="Invalid device argument 2: did you call init"):
        torch._C._cuda_memoryStats(2)


FIGURES = "allocated_bytes reserved_bytes active_bytes inactive_split_bytes requested_bytes allocation segment"
COUNTERS = "num_alloc_retries num_ooms num_sync_all_streams num_device_alloc num_device_free max_split_size"


def test_every_figure_of_memory_stats(gpus):
    """The names of PyTorch's own documentation, each a number; those of the accelerator; and a table of them."""
    made_here(gpus[0], 3 * MIB)
    stats, whens = torch.cuda.memory_stats(), ("current", "peak", "allocated", "freed")
    pools = [(figure, pool) for figure in FIGURES.split() for pool in ("all", "large_pool", "small_pool")]
    assert {f"{figure}.{pool}.{when}" for figure, pool in pools for when in whens} | set(COUNTERS.split()) <= set(stats)
    assert len(stats) > 110 and all(isinstance(value, int) for value in stats.values())
    assert torch.cuda.memory_stats_as_nested_dict()["requested_bytes"]["all"]["peak"] == 3 * MIB
    text = torch.cuda.memory_summary(0)
    for name, now in (("Allocated", "3072 KiB"), ("GPU reserved", "20480 KiB"), ("Non-releasable", "17408 KiB")):
        assert re.search(rf"\| {name} memory +\| +{now} ", text)
    assert text.count("from large pool") == 9 and "Oversize GPU segments" in text
    assert torch.cuda.memory_summary(abbreviated=True, device=1).count("\n") < text.count("\n")
    if hasattr(torch.accelerator, "memory_stats"):
        assert torch._C._accelerator_getDeviceStats(0) == torch._C._cuda_memoryStats(0)
        torch._C._accelerator_resetAccumulatedStats(0)
        torch._C._accelerator_resetPeakStats(0)
        assert torch._C._accelerator_getDeviceStats(0)["allocation"]["all"]["allocated"] == 0
        assert torch._C._accelerator_isAllocatorInitialized()


def test_fraction_and_settings(gpus):
    torch.cuda.set_per_process_memory_fraction(0.5, 1)
    assert torch.cuda.get_per_process_memory_fraction(1) == 0.5
    with pytest.raises(torch.OutOfMemoryError, match=r"50.00 MiB allowed"):
        made_here(gpus[1], 60 * MIB)
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    assert all(gpu.memory.config.expandable_segments for gpu in gpus)
    if hasattr(torch._C, "_accelerator_getAllocatorSettings"):  # since 2.12
        assert torch._C._accelerator_getAllocatorSettings() == "expandable_segments:True"
    assert torch.cuda.get_allocator_backend() == "native"


def test_memory_without_a_tensor(gpus):
    address = torch._C._cuda_cudaCachingAllocator_raw_alloc(3 * MIB, 0)
    assert torch.cuda.memory_allocated() == 3 * MIB
    torch.cuda.caching_allocator_delete(address)
    assert torch.cuda.memory_allocated() == 0
    with pytest.raises(RuntimeError, match="invalid device pointer"):
        torch.cuda.caching_allocator_delete(address)


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.cuda.memory.CUDAPluggableAllocator("lib.so", "a", "b"),
        lambda: torch.cuda.memory._get_current_allocator(),
        lambda: torch.cuda.host_memory_stats(),
        lambda: torch._C._cuda_beginAllocateToPool(0, (1, 0)),
        lambda: torch._C._cuda_record_memory_history("all", record_pinned_host_memory=True),
        lambda: torch._C._cuda_allocationTraceback(123),
    ],
)
def test_not_modelled_says_so(gpus, call):
    with pytest.raises(NotImplementedError, match="on virtual GPUs"):
        call()


def test_a_history_by_hand(gpus):
    torch.cuda.memory._record_memory_history(max_entries=100)
    gpus[0].memory.timeline.host = 0.25
    block = made_here(gpus[0], 3 * MIB)
    gpus[0].memory.free(block)
    torch.cuda.empty_cache()
    with pytest.raises(torch.OutOfMemoryError):
        made_here(gpus[0], 200 * MIB)
    snapshot = torch.cuda.memory._snapshot()
    first, second = snapshot["device_traces"]
    frees = ["free_requested", "free_completed", "segment_free"]
    assert actions(first) == ["segment_alloc", "alloc", *frees, "oom"] and second == []
    alloc, oom = first[1], first[-1]
    assert (alloc["addr"], alloc["size"], alloc["stream"], alloc["time_us"]) == (block.address, 3 * MIB, 0, 250_000)
    assert (alloc["compile_context"], alloc["user_metadata"], alloc["pool_id"]) == ("N/A", "", (0, 0))
    assert (oom["device_free"], oom["size"]) == (100 * MIB, 200 * MIB) and "addr" not in oom
    callers = [(frame["filename"], frame["name"]) for frame in alloc["frames"][:2]]
    assert callers == [(__file__, "made_here"), (__file__, "test_a_history_by_hand")]
    assert alloc["frames"][0]["line"] == made_here.__code__.co_firstlineno + 1
    assert not any("virtualgpu/" in frame["filename"].replace("tests/virtualgpu", "") for frame in alloc["frames"])
    assert actions(torch.cuda.memory._snapshot()["device_traces"][0])[-1] == "snapshot"


def test_segments_and_blocks_add_up(gpus):
    torch.cuda.memory._record_memory_history()
    memory = gpus[0].memory
    blocks = [made_here(gpus[0], size) for size in (100, 300 * KIB, 5 * MIB)]
    memory.record_stream(blocks[1], 7)
    memory.timeline.work[7] = 5.0
    memory.free(blocks[1])
    large, small = torch.cuda.memory_snapshot()  # by address: each new segment lies below the last
    assert [block["state"] for block in small["blocks"]] == ["active_allocated", "active_pending_free", "inactive"]
    sizes = [(block["size"], block["requested_size"]) for block in small["blocks"][:2]]
    assert sizes == [(512, 100), (300 * KIB, 300 * KIB)]
    sums = small["allocated_size"], small["active_size"], small["requested_size"]
    assert sums == (512, 512 + 300 * KIB, 100 + 300 * KIB)
    assert (large["segment_type"], large["total_size"], large["is_expandable"]) == ("large", 20 * MIB, False)
    for segment in (small, large):
        assert segment["total_size"] == sum(block["size"] for block in segment["blocks"])
        assert segment["frames"][0]["name"] == "made_here", "who made the segment grow"
    assert small["blocks"][0]["frames"][0]["name"] == "made_here" and small["blocks"][2]["frames"] == []


def test_expandable_segments_in_a_snapshot(gpus):
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    torch.cuda.memory._record_memory_history()
    blocks = [made_here(gpus[0], 20 * MIB) for _ in range(3)]
    gpus[0].memory.free(blocks[1])
    torch.cuda.empty_cache()
    snapshot = torch.cuda.memory._snapshot()
    pieces = [(segment["total_size"], segment["is_expandable"]) for segment in snapshot["segments"]]
    assert pieces == [(20 * MIB, True)] * 2, "each mapped piece is one"
    trace = snapshot["device_traces"][0]
    assert actions(trace) == ["segment_map", "alloc"] * 3 + ["free_requested", "free_completed", "segment_unmap"]
    assert trace[-1]["frames"][0]["filename"] == torch.cuda.memory.__file__, "who emptied the cache"
    assert snapshot["allocator_settings"]["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"


def test_what_is_recorded_can_be_chosen(gpus):
    record, snapshot = torch.cuda.memory._record_memory_history, torch.cuda.memory._snapshot
    record("state", context="state")
    made_here(gpus[0], 100)
    result = snapshot()
    assert len(result["device_traces"][0]) == 1, "as in PyTorch, the last event alone"
    assert result["segments"][0]["blocks"][0]["frames"][0]["name"] == "made_here"
    record("all", context=None, clear_history=True, skip_actions=["free_requested"])
    gpus[0].memory.free(made_here(gpus[0], 100))
    trace = snapshot()["device_traces"][0]
    assert actions(trace) == ["alloc", "free_completed"] and trace[0]["frames"] == []
    record("all", max_entries=2, clear_history=True)
    gpus[0].memory.free(made_here(gpus[0], 100))
    assert actions(snapshot()["device_traces"][0]) == ["free_requested", "free_completed"], "the last two"
    record(None)
    made_here(gpus[0], 100)
    assert snapshot()["device_traces"] == [[], []] and not torch._C._cuda_isHistoryEnabled()
    with pytest.raises(RuntimeError, match="expected state to be 'state', 'all', or None"):
        record("everything")
    record(True, trace_alloc_max_entries=10, trace_alloc_record_context=True)  # the older way to ask
    made_here(gpus[0], 3 * MIB)
    trace = snapshot()["device_traces"][0]
    assert actions(trace) == ["segment_alloc", "alloc"] and trace[1]["frames"][0]["name"] == "made_here"
    record(False)
    assert gpus[0].memory.history is None


def test_metadata_of_the_thread(gpus):
    if not hasattr(torch.cuda.memory, "_set_memory_metadata"):
        pytest.skip("this PyTorch has no _set_memory_metadata")
    torch.cuda.memory._record_memory_history()
    torch.cuda.memory._set_memory_metadata("epoch 1")
    made_here(gpus[0], 100)
    torch.cuda.memory._set_memory_metadata("")
    made_here(gpus[0], 100)
    trace = torch.cuda.memory._snapshot()["device_traces"][0]
    assert [entry["user_metadata"] for entry in trace] == ["epoch 1", "epoch 1", ""]


def test_observers_may_take_a_snapshot(gpus):
    seen = []

    def observer(device, asked, allowed, free):
        seen.append((device, asked, allowed, free, len(torch.cuda.memory._snapshot()["segments"])))

    torch._C._cuda_attach_out_of_memory_observer(observer)
    made_here(gpus[1], 60 * MIB)
    with gpus[1].lock, pytest.raises(torch.OutOfMemoryError):
        made_here(gpus[1], 50 * MIB + 1)
    assert seen == [(1, 52 * MIB, 100 * MIB, 40 * MIB, 1)]


@pytest.mark.parametrize("stacks", ["all", "python"])
def test_a_recorded_allocation_names_its_operation_first(gpus, stacks):
    """A product's backward pass; with Python's frames alone it does not."""
    x = torch.rand(64, 32, device="cuda", requires_grad=True)
    w = torch.rand(32, 16, device="cuda")
    torch.cuda.memory._record_memory_history(stacks=stacks)
    (x @ w).sum().backward()
    events = torch.cuda.memory._snapshot()["device_traces"][0]
    (frames,) = [event["frames"] for event in events if event["action"] == "alloc" and event["size"] == 64 * 32 * 4]
    first = {"name": "at::_ops::mm::call", "filename": "??", "line": 0}
    assert (frames[0] == first) is (stacks == "all") is any("::" in frame["name"] for frame in frames)
    assert {"backward", "test_a_recorded_allocation_names_its_operation_first"} <= {frame["name"] for frame in frames}
    assert frames[-1]["line"] > 0


def test_pytorchs_viewer_reads_what_is_dumped(gpus, tmp_path):
    """As `python -m torch.cuda._memory_viz` does; a history with all kinds of events."""
    torch.cuda.memory._record_memory_history()
    memory = gpus[0].memory
    kept = made_here(gpus[0], 100 * KIB)
    blocks = [made_here(gpus[0], size * MIB) for size in (3, 30)]
    memory.record_stream(blocks[0], 7)
    for block in blocks:
        memory.free(block)
    with pytest.raises(torch.OutOfMemoryError):
        made_here(gpus[0], 99 * MIB)
    made_here(gpus[1], 5 * MIB)
    file = tmp_path / "snapshot.pickle"
    torch.cuda.memory._dump_snapshot(str(file))
    snapshot = pickle.loads(file.read_bytes())

    segments = _memory_viz.segsum(snapshot)
    assert "segments: 2" in segments and "total_reserved: 22.0MiB" in segments and "total_allocated: 5.1MiB" in segments
    device0, device1 = _memory_viz.trace(snapshot).split("Device 1 ----------------\n")
    assert "cudaMalloc(" in device0 and "[0:100.0KiB]" in device0 and "cudaFree(" in device0
    assert "raise OutOfMemoryError # 99.0MiB requested, 98.0MiB free in CUDA" in device0
    assert device0.count("free completed") == 2 and "[0:5.0MiB]" in device1
    data = _memory_viz.trace_plot(snapshot).split('"base64": "')[1].split('"')[0]
    assert pickle.load(io.BytesIO(base64.b64decode(data))) == snapshot
    out = io.StringIO()
    _memory_viz._write_blocks(out, "gpu", snapshot["segments"][0]["blocks"])
    assert "active_allocated" in out.getvalue() and "made_here" in out.getvalue() and kept.used


# -- what a step held of which kind, told from its trace and phases


STEP = """
model:     1=8
forward:   2=4 3=2 -2
backward:  2=8 -3
optimizer: 4=16 -2 -99
"""  # an address, MiB; what is freed, of which 99 was made before it was recorded


def test_what_a_step_held_is_told_by_phase_and_by_what_outlives_it():
    events: list[dict] = []
    phases = []
    for line in STEP.strip().splitlines():
        phase, *steps = line.split()
        phases.append((len(events), phase.rstrip(":")))
        for step in steps:
            address, _, size = step.partition("=")
            actions = ("alloc",) if size else ("free_requested", "free_completed")
            events += [
                {"action": action, "addr": abs(int(address)), "size": int(size or 0) * MIB} for action in actions
            ]
    found = kinds(events, phases)
    assert found == {
        "parameters": [8.0] * 13,
        "activations": [0, 0, 2, 2, 2, 2, 2, 0, 0, 0, 0, 0, 0],
        "gradients": [0, 0, 0, 0, 0, 8, 8, 8, 8, 8, 0, 0, 0],
        "optimizer state": [0, 0, 0, 0, 0, 0, 0, 0, 16, 16, 16, 16, 16],
        "temporary": [0, 4, 4, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    }


def test_what_was_held_sums_up_to_what_the_allocator_says(gpu):
    torch.cuda.memory._record_memory_history(max_entries=10_000, stacks="python")
    layer = torch.nn.Linear(512, 512, device=gpu)
    phases = [(0, "model"), (len(torch.cuda.memory._snapshot()["device_traces"][0]), "forward")]
    loss = layer(torch.ones(256, 512, device=gpu)).square().sum()
    trace = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(None)
    last = sum(row[-1] for row in kinds(trace, phases).values())
    assert last == pytest.approx(torch.cuda.memory_allocated() / MIB, abs=0.01) and loss.item() > 0
