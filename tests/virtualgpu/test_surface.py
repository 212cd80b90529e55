"""The guard over PyTorch's surface: each name of C++ that has to do with GPUs is in a row of `torch_api/surface.toml`, and the row is true.

It fails with a new PyTorch that brings a name, renames one or drops one: give the name a row, or a version under [since] or [until].
"""

import inspect
import re
from pathlib import Path

import pytest
import torch
import torch.distributed

import virtualgpu
from virtualgpu import _compat, session
from virtualgpu.torch_api import surface
from virtualgpu.torch_api.patches import MISSING

# Which names need a row. Those of other makers' GPUs do not.
PATTERN = re.compile(
    r"^(?!.*(xpu|mtia))(.*(cuda|cudnn|nccl|accelerator|cublas|cusparse|magma|gpu|rocm|hip|miopen|nvtx|nvshmem|mempool|graph_pool)"
    r"|_gds_|_host_|_(broadcast|scatter|gather)|_can_use_|_is_ck_|_has_gds|.*(sdp|_blas_|linalg_pref|sm_carveout|symmetricmem|_dma|_fr_trace|intra_node))",
    re.IGNORECASE,
)

C10D = "_distributed_c10d."
ROOT = Path(__file__).resolve().parents[2]
EVERY = {*surface.ANSWERED, *surface.REFUSED, *surface.HARMLESS, *surface.OF_CUDA_WHEELS}
PRIVATE = {name for name in EVERY if not name.startswith("torch.")}


def is_there(name: str) -> bool:
    return hasattr(*surface.locate(name))


def stand_ins() -> dict[str, object]:
    """{a row's name: what is put in its place} of virtual GPUs."""
    owners = {id(torch._C): "", id(torch._C._distributed_c10d): C10D}
    replaced = session._session.patches.replaced
    return {owners[id(owner)] + name: value for owner, name, _, value in replaced if id(owner) in owners}


def test_each_name_has_a_row_and_each_row_a_name():
    virtualgpu.reset()
    names = {C10D + name for name in dir(torch._C._distributed_c10d) if PATTERN.search(name)}
    names |= {name for name in dir(torch._C) if PATTERN.search(name)}
    assert names - EVERY == set(), "PyTorch has them, and no row of torch_api/surface.toml does"
    assert len(names) > 100
    if _compat.built_with_cuda:
        there, lacking = set(filter(is_there, EVERY)), surface.lacking(_compat.VERSION)
        assert PRIVATE - there - lacking == set(), "renamed or gone? Say so in [until], or take them out"
        assert there & lacking == set(), f"[since] or [until] says that {_compat.VERSION} lacks them"


def test_no_name_has_two_rows():
    table = surface.TABLE
    texts = [*table["answered"].values(), *table["harmless"].values(), table["of_cuda_wheels"]["names"]]
    names = " ".join([*texts, *(row["names"] for row in table["refused"])]).split()
    assert sorted(names) == sorted(EVERY)


def test_versions_of_rows_are_versions_that_are_supported():
    """A version that no supported one needs is stale, and so is a row that it ends."""
    oldest = re.search(r'"torch>=(\d+)\.(\d+)"', (ROOT / "virtualgpu" / "pyproject.toml").read_text("utf-8"))
    versions = [*surface.SINCE.values(), *surface.UNTIL.values()]
    assert min(versions) > tuple(map(int, oldest.groups()))
    assert not {*surface.SINCE, *surface.UNTIL} - EVERY and not surface.SINCE.keys() & surface.UNTIL.keys()


def test_what_is_answered_is_put_in_place_by_the_module_of_its_row(gpus):
    ours, missing = stand_ins(), surface.ANSWERED.keys() - stand_ins().keys()
    # memory answers torch.accelerator's functions only where PyTorch has them, and blas the sizes of workspaces
    wanted = {name for name in missing if is_there(name) or not name.startswith("_accelerator_")}
    assert wanted <= surface.lacking(_compat.VERSION)
    for name in surface.ANSWERED.keys() - missing:
        value = ours[name]
        if not isinstance(value, type):  # classes say that they are PyTorch's
            where = value if hasattr(value, "__module__") and inspect.isroutine(value) else type(value)
            assert where.__module__ == f"virtualgpu.{surface.ANSWERED[name]}", name


def test_nothing_is_put_in_place_without_a_row(gpus):
    unknown = [name for name in stand_ins() if PATTERN.search(name.removeprefix(C10D)) and name not in EVERY]
    assert unknown == []


@pytest.mark.skipif(not _compat.built_with_cuda, reason="of a wheel with CUDA")
def test_nothing_is_added_that_pytorch_does_not_have(gpus):
    """A name that went with a version, or was never one, is in nobody's way: nothing else would notice."""
    added = [(owner, name) for owner, name, original, _ in session._session.patches.replaced if original is MISSING]
    virtualgpu.reset()
    nowhere = {name for owner, name in added if not hasattr(owner, name)}
    # C++ adds this one at the first use of a GPU
    assert nowhere - surface.lacking(_compat.VERSION) <= {"_get_device_properties"}


@pytest.mark.skipif(_compat.built_with_cuda, reason="of a wheel without CUDA")
def test_a_wheel_without_cuda_has_the_functions_of_one_with_it(gpus):
    missing = {name for name in EVERY if not is_there(name)} - surface.lacking(_compat.VERSION) - {*surface.HARMLESS}
    assert not [name for name in missing if not name.startswith((C10D, "torch."))]


def test_what_is_refused_says_so_in_a_sentence(gpus):
    for name in filter(is_there, surface.REFUSED):
        owner, attribute = surface.locate(name)
        with pytest.raises(NotImplementedError) as caught:
            getattr(owner, attribute)()
        assert str(caught.value) == surface.REFUSED[name], name
    assert not isinstance(1, torch.cuda.CUDAGraph)  # a class stays one, and lets nobody in by its methods
    contexts = torch.cuda.green_contexts
    partition = contexts.SMPartition.from_device if hasattr(contexts, "SMPartition") else contexts.GreenContext.create
    for make in (partition, contexts.GreenContext):
        with pytest.raises(NotImplementedError, match="green contexts"):
            make(0)


def test_what_is_refused_in_part(gpus):
    """A pool has an id, the cache may be left on, and DLPack is there for the CPU's tensors."""
    assert torch.cuda.graph_pool_handle() != torch.cuda.MemPool().id != torch.cuda.MemPool().id
    torch.cuda.caching_allocator_enable(True)
    assert torch._C._cuda_cudaCachingAllocator_is_enabled()
    here, there = torch.zeros(3), torch.zeros(3, device="cuda")
    torch.from_dlpack(here).add_(1)
    assert here.tolist() == [1, 1, 1]
    for refused in (
        lambda: torch.cuda.caching_allocator_enable(False),
        lambda: torch.cuda.use_mem_pool(torch.cuda.MemPool()),
        lambda: torch.from_dlpack(there),
        lambda: torch.utils.dlpack.to_dlpack(there),
        lambda: torch.from_dlpack(here, device="cuda"),
    ):
        with pytest.raises(NotImplementedError, match="not modelled on virtual GPUs: "):
            refused()


def test_all_is_as_before_afterwards():
    def now():
        return {name: inspect.getattr_static(*surface.locate(name), None) for name in EVERY}

    before = now()
    virtualgpu.gpus(1)
    during = now()
    ours = torch._C._cudart
    assert ours is torch.cuda._cudart and torch.cuda.cudart() is ours
    virtualgpu.reset()
    after = now()
    assert {name for name in EVERY if before[name] is not during[name]} > {"_cuda_getDevice", "torch.cuda.CUDAGraph"}
    assert [name for name in EVERY if before[name] is not after[name]] == []
    theirs = getattr(torch._C, "_cudart", None)
    assert theirs is None or not {name for name in dir(theirs) if not name.startswith("_")} - set(dir(ours))


def test_objects_are_of_the_classes_of_c_and_hooks_of_accelerators_are_about_the_gpus(gpus):
    C = torch._C
    assert isinstance(torch.cuda.Stream(), C._CudaStreamBase) and isinstance(torch.cuda.Event(), C._CudaEventBase)
    assert isinstance(torch.cuda.get_device_properties(0), torch.cuda._CudaDeviceProperties)
    assert C._accelerator_hooks_device_count() == 2 and C._accelerator_hooks_get_current_device() == 0
    assert C._accelerator_hooks_exchange_device(1) == 0 == C._accelerator_hooks_maybe_exchange_device(-1) + 1
    C._accelerator_hooks_set_current_device(0)
    assert torch.cuda.current_device() == 0
    contexts = torch.cuda.green_contexts
    if hasattr(contexts, "get_num_locality_domains"):
        assert contexts.get_num_locality_domains(1) == 1 and not contexts.is_localization_supported()


@pytest.mark.parametrize(
    ("card", "version", "disabled"),
    [("T4", 92000, False), ("B200", 92000, True), ("B200", 92401, False), ("B200", 92600, False)],
)
def test_the_decoding_that_cudnn_leaves_out(monkeypatch, card, version, disabled):
    virtualgpu.gpus(1, like=card)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
    assert torch._C._is_cudnn_attention_decode_disabled() is disabled
    monkeypatch.undo()
