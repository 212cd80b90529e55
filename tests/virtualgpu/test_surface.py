"""The guard over PyTorch's surface: each name of C++ that has to do with GPUs is in a row of `torch_api/surface.py`, and the row is true.

It fails with a new PyTorch that brings a name, renames one or drops one: give the name a row, or a version in SINCE or UNTIL.
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

C10D = "_distributed_c10d."
ROOT = Path(__file__).resolve().parents[2]


def rows(table) -> list[str]:
    """The names of a table's rows: of {key: names}, of [(what, cure, names)] or of names."""
    texts = (
        [table] if isinstance(table, str) else table.values() if isinstance(table, dict) else [row[2] for row in table]
    )
    return " ".join(texts).split()


ANSWERED, REFUSED, HARMLESS = map(rows, (surface.ANSWERED, surface.REFUSED, surface.HARMLESS))
KEPT = rows(surface.OF_CUDA_WHEELS)
EVERY = [*ANSWERED, *REFUSED, *HARMLESS, *KEPT]


def names_of_pytorch() -> set[str]:
    """What this PyTorch has, without virtual GPUs, that needs a row."""
    virtualgpu.reset()
    c10d = {C10D + name for name in dir(torch._C._distributed_c10d) if surface.PATTERN.search(name)}
    return {name for name in dir(torch._C) if surface.PATTERN.search(name)} | c10d


def is_there(name: str) -> bool:
    return hasattr(*surface.locate(name))


def stand_ins() -> dict[str, object]:
    """{a row's name: what is put in its place} of virtual GPUs."""
    owners = {id(torch._C): "", id(torch._C._distributed_c10d): C10D}
    return {
        owners[id(owner)] + name: value
        for owner, name, _, value in session._session.patches.replaced
        if id(owner) in owners
    }


def complaints(names: set[str], there: set[str], version: tuple[int, int], with_cuda: bool) -> list[str]:
    """What is wrong with the table: `names` of PyTorch that need a row, and the rows' names that are `there`."""
    wrong = [f"{name}: PyTorch has it, and no row of torch_api/surface.py does" for name in names - set(EVERY)]
    if with_cuda:
        lacking = surface.lacking(version)
        private = {name for name in EVERY if not name.startswith("torch.")}
        wrong += [
            f"{name}: renamed or gone? Say so in UNTIL, or take the row out" for name in private - there - lacking
        ]
        wrong += [f"{name}: SINCE or UNTIL says that {version} lacks it, and it is there" for name in there & lacking]
    return sorted(wrong)


def test_each_name_has_a_row_and_each_row_a_name():
    names = names_of_pytorch()
    there = {name for name in EVERY if is_there(name)}
    assert complaints(names, there, _compat.VERSION, _compat.built_with_cuda) == []
    assert len(names) > 100


def test_no_name_has_two_rows():
    assert sorted(set(EVERY)) == sorted(EVERY)


def test_the_guard_sees_what_is_new_renamed_or_back():
    names = there = {name for name in EVERY if not name.startswith("torch.")} - surface.lacking((2, 15))
    assert complaints(names, there, (2, 15), True) == []
    assert complaints(names | {"_cuda_new"}, there, (2, 15), True) == [
        "_cuda_new: PyTorch has it, and no row of torch_api/surface.py does"
    ]
    renamed = there - {"_cuda_sleep"}
    assert complaints(renamed, renamed, (2, 15), True) == [
        "_cuda_sleep: renamed or gone? Say so in UNTIL, or take the row out"
    ]
    assert [
        text.split(":")[0]
        for text in complaints(names | {"_CUDAGreenContext"}, there | {"_CUDAGreenContext"}, (2, 15), True)
    ] == ["_CUDAGreenContext"]
    assert complaints({"_has_cuda"}, {"_has_cuda"}, (2, 15), False) == []


def test_versions_of_rows_are_versions_that_are_supported():
    """A SINCE or UNTIL that no supported version needs is stale, and so is a row that it ends."""
    oldest = re.search(r"^torch>=(\d+)\.(\d+)", (ROOT / "requirements.txt").read_text(), re.MULTILINE)
    oldest = tuple(map(int, oldest.groups()))
    assert all(version > oldest for version in (*surface.SINCE, *surface.UNTIL))
    versioned = [name for names in (*surface.SINCE.values(), *surface.UNTIL.values()) for name in names.split()]
    assert not set(versioned) - set(EVERY) and len(versioned) == len(set(versioned))


def test_what_is_answered_is_put_in_place_by_the_face_of_its_row(gpus):
    ours = stand_ins()
    of_face = {name: f"virtualgpu.{face}" for face, names in surface.ANSWERED.items() for name in names.split()}
    missing = of_face.keys() - ours.keys()
    # memory answers torch.accelerator's functions only where PyTorch has them, and blas the sizes of workspaces
    may_be_missing = surface.lacking(_compat.VERSION)
    assert {name for name in missing if is_there(name) or not name.startswith("_accelerator_")} <= may_be_missing
    for name, face in of_face.items() - {(name, of_face[name]) for name in missing}:
        value = ours[name]
        if not isinstance(value, type):  # classes say that they are PyTorch's
            where = value if hasattr(value, "__module__") and inspect.isroutine(value) else type(value)
            assert where.__module__ == face, name


def test_nothing_is_put_in_place_without_a_row(gpus):
    unknown = [name for name in stand_ins() if surface.PATTERN.search(name.removeprefix(C10D)) and name not in EVERY]
    assert unknown == []


@pytest.mark.skipif(not _compat.built_with_cuda, reason="of a wheel with CUDA")
def test_nothing_is_added_that_pytorch_does_not_have(gpus):
    """A name that went with a version, or was never one, is in nobody's way: nothing else would notice."""
    added = [(owner, name) for owner, name, original, _ in session._session.patches.replaced if original is MISSING]
    virtualgpu.reset()
    nowhere = {name for owner, name in added if not hasattr(owner, name)}
    assert nowhere - surface.lacking(_compat.VERSION) <= {
        "_get_device_properties"
    }  # C++ adds it at the first use of a GPU


def test_what_is_refused_says_so_in_a_sentence(gpus):
    for subject, cure, names in surface.REFUSED:
        for name in filter(is_there, names.split()):
            owner, attribute = surface.locate(name)
            with pytest.raises(NotImplementedError) as caught:
                getattr(owner, attribute)()
            assert str(caught.value) == f"{subject} not modelled on virtual GPUs: {cure}", name


@pytest.mark.skipif(_compat.built_with_cuda, reason="of a wheel without CUDA")
def test_a_wheel_without_cuda_has_the_functions_of_one_with_it(gpus):
    missing = {name for name in EVERY if not is_there(name)} - surface.lacking(_compat.VERSION) - set(HARMLESS)
    assert not [name for name in missing if not name.startswith((C10D, "torch."))]


def test_a_class_that_is_refused_stays_one_and_lets_nobody_in_by_its_methods(gpus):
    assert not isinstance(1, torch.cuda.CUDAGraph)
    contexts = torch.cuda.green_contexts
    partition = contexts.SMPartition.from_device if hasattr(contexts, "SMPartition") else contexts.GreenContext.create
    for make in (partition, contexts.GreenContext):
        with pytest.raises(NotImplementedError, match="green contexts"):
            make(0)


def test_modules_of_c_have_the_functions_of_pytorchs(gpus):
    ours = torch._C._cudart
    assert ours is torch.cuda._cudart and torch.cuda.cudart() is ours
    virtualgpu.reset()
    theirs = getattr(torch._C, "_cudart", None)
    assert theirs is None or not {name for name in dir(theirs) if not name.startswith("_")} - set(dir(ours))


def test_all_is_as_before_afterwards(gpus):
    virtualgpu.reset()
    before = {name: inspect.getattr_static(*surface.locate(name), None) for name in EVERY}
    virtualgpu.gpus(1)
    during = {name: inspect.getattr_static(*surface.locate(name), None) for name in EVERY}
    virtualgpu.reset()
    after = {name: inspect.getattr_static(*surface.locate(name), None) for name in EVERY}
    changed = [name for name in EVERY if before[name] is not during[name]]
    assert set(changed) > {"_cuda_getDevice", "torch.cuda.CUDAGraph"}
    assert [name for name in EVERY if before[name] is not after[name]] == []


def test_objects_are_of_the_classes_of_c(gpus):
    assert isinstance(torch.cuda.Stream(), torch._C._CudaStreamBase)
    assert isinstance(torch.cuda.Event(), torch._C._CudaEventBase)
    assert isinstance(torch.cuda.get_device_properties(0), torch.cuda._CudaDeviceProperties)


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


def test_hooks_of_accelerators_are_about_the_gpus(gpus):
    C = torch._C
    assert C._accelerator_hooks_device_count() == 2 and C._accelerator_hooks_get_current_device() == 0
    assert C._accelerator_hooks_exchange_device(1) == 0 == C._accelerator_hooks_maybe_exchange_device(-1) + 1
    C._accelerator_hooks_set_current_device(0)
    assert torch.cuda.current_device() == 0


def test_domains_of_a_gpu_and_the_decoding_that_cudnn_leaves_out(gpus, monkeypatch):
    contexts = torch.cuda.green_contexts
    if hasattr(contexts, "get_num_locality_domains"):
        assert contexts.get_num_locality_domains(1) == 1 and not contexts.is_localization_supported()
    for card, version, disabled in (
        ("T4", 92000, False),
        ("B200", 92000, True),
        ("B200", 92401, False),
        ("B200", 92600, False),
    ):
        virtualgpu.gpus(1, like=card)
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda version=version: version)
        assert torch._C._is_cudnn_attention_decode_disabled() is disabled
        monkeypatch.undo()
        virtualgpu.reset()
        monkeypatch.setenv("HELPERS_GPUS", "virtual")
