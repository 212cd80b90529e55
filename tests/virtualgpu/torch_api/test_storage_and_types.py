"""Pinned memory, storages, saved files, the old types, and what a GPU says of itself."""

import copy
import io
import pickle
import uuid

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import virtualgpu

ZERO, ONE, CPU = torch.device("cuda:0"), torch.device("cuda:1"), torch.device("cpu")


# -- pinned memory


PINNED = {
    "empty": lambda: torch.empty(2, pin_memory=True),
    "zeros": lambda: torch.zeros(2, pin_memory=True),
    "rand": lambda: torch.rand(2, pin_memory=True),
    "tensor": lambda: torch.tensor([1.0, 2.0], pin_memory=True),
    "full": lambda: torch.full((2,), 3.0, pin_memory=True),
    "arange": lambda: torch.arange(2.0, pin_memory=True),
    "empty_strided": lambda: torch.empty_strided((2,), (1,), pin_memory=True),
    "empty_like": lambda: torch.empty_like(torch.ones(2), pin_memory=True),
    "new_empty": lambda: torch.ones(2).new_empty(2, pin_memory=True),
    "pin_memory": lambda: torch.ones(2).pin_memory(),
    "storage": lambda: torch.empty(0).set_(torch.ones(2).untyped_storage().pin_memory(), 0, (2,)),
}


@pytest.mark.parametrize("make", PINNED.values(), ids=PINNED)
def test_pinned_tensors(gpus, make):
    made = make()
    assert made.is_pinned() and made.device == CPU and made.shape == (2,)
    assert made.view(1, 2).is_pinned() and not made.clone().is_pinned()
    copied = made.to("cuda:1", non_blocking=True)
    torch.cuda.synchronize()
    assert copied.device == ONE and torch.equal(copied.cpu(), made) and not copied.is_pinned()


def test_a_gpu_tensor_cannot_be_pinned(gpus):
    for attempt in (
        lambda: torch.ones(2, device="cuda").pin_memory(),
        lambda: torch.empty(2, device="cuda", pin_memory=True),
    ):
        with pytest.raises(RuntimeError, match=r"(?i)only dense CPU tensors can be pinned"):
            attempt()


@pytest.mark.parametrize("pin", [True, False])
def test_saving_activations_on_the_cpu(gpus, without_workspaces, pin):
    """save_on_cpu: the same gradients, and the activations are not on the GPU meanwhile."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(6)]).cuda()
    x = torch.randn(512, 256, device="cuda")

    def run(context):
        model.zero_grad(set_to_none=True)
        before = torch.cuda.memory_allocated()
        with context:
            loss = model(x).square().sum()
        held = torch.cuda.memory_allocated() - before
        loss.backward()
        return held, [parameter.grad.clone() for parameter in model.parameters()]

    held, grads = run(torch.autograd.graph.save_on_cpu(pin_memory=pin))
    plain, expected = run(torch.enable_grad())
    assert plain > 5 * x.nbytes and held < 2 * x.nbytes
    assert all(torch.equal(one, other) and one.device == ZERO for one, other in zip(grads, expected, strict=True))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_pins_its_batches(gpus, workers):
    loader = DataLoader(torch.arange(6.0), batch_size=3, pin_memory=True, num_workers=workers)
    batches = list(loader)
    assert [batch.tolist() for batch in batches] == [[0, 1, 2], [3, 4, 5]] and all(
        batch.is_pinned() for batch in batches
    )
    assert batches[0].to("cuda", non_blocking=True).device == ZERO


class OnGpu(torch.utils.data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return torch.ones(2, device="cuda")


@pytest.mark.parametrize("used", [True, False])
def test_a_gpu_in_a_workers_process(gpus, used):
    """As on a GPU: refused once the parent has used CUDA; otherwise the worker's own."""
    if used:
        torch.ones(1, device="cuda")
    loader = DataLoader(OnGpu(), num_workers=1, multiprocessing_context="fork", collate_fn=lambda items: items[0].cpu())
    if used:
        with pytest.raises(RuntimeError, match="Cannot re-initialize CUDA in forked subprocess"):
            list(loader)
    else:
        assert [item.tolist() for item in loader] == [[1, 1], [1, 1]]


# -- files


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


@pytest.mark.parametrize(
    ("where", "found"),
    [
        (lambda storage, location: storage.cuda(1), ONE),
        (lambda storage, location: storage.cuda(), ZERO),
        (lambda storage, location: storage, CPU),
        (lambda storage, location: storage.cpu(), CPU),
        (lambda storage, location: None, ONE),
        (lambda storage, location: torch.serialization.default_restore_location(storage, "cuda:0"), ZERO),
        ("cuda:0", ZERO),
        (torch.device("cuda"), ZERO),
        ({"cuda:1": "cuda:0"}, ZERO),
        ({"cuda:1": "cpu"}, CPU),
        ({"cuda:0": "cpu"}, ONE),
        ("cpu", CPU),
    ],
)
def test_every_kind_of_map_location(gpus, where, found):
    file = saved({"x": torch.arange(4.0, device=ONE)})
    before = [torch.cuda.memory_allocated(i) for i in range(2)]
    x = torch.load(file, map_location=where)["x"]
    assert x.device == found and x.tolist() == [0, 1, 2, 3]
    grown = [torch.cuda.memory_allocated(i) - before[i] for i in range(2)]
    assert grown == [512 * (found == gpu) for gpu in (ZERO, ONE)]
    assert (x + torch.ones(4, device=found)).device == found


def test_shared_storages_stay_shared(gpus):
    x = torch.arange(4.0, device=ONE)
    loaded = torch.load(saved([x, x[1:]]))
    loaded[0][1] = 7
    assert loaded[1].tolist() == [7, 2, 3] and loaded[1].device == ONE


def test_pickles_and_copies_keep_the_place(gpus):
    x = torch.arange(3.0, device=ONE, requires_grad=True)
    for other in (pickle.loads(pickle.dumps(x)), copy.deepcopy(x), copy.copy(x)):
        assert other.device == ONE and other.tolist() == [0, 1, 2] and other.requires_grad
    module = copy.deepcopy(nn.Linear(2, 2).to(ONE))
    assert module.weight.device == ONE


# -- the old types


def test_constructors_of_the_old_types(gpus):
    made = torch.cuda.FloatTensor(2, 3)
    assert (made.device, made.shape, made.dtype) == (ZERO, (2, 3), torch.float32)
    assert torch.cuda.FloatTensor([1, 2]).tolist() == [1, 2] and torch.cuda.LongTensor([3]).dtype is torch.int64
    assert torch.cuda.HalfTensor(4).dtype is torch.float16 and torch.cuda.ByteTensor().shape == (0,)
    assert torch.cuda.FloatTensor(torch.Size([2, 2])).shape == (2, 2)
    with torch.cuda.device(1):
        assert torch.cuda.FloatTensor(3).device == ONE
    assert (made.zero_() + torch.ones(2, 3, device="cuda")).sum().item() == 6


def test_old_types_are_asked_for(gpus):
    x = torch.ones(2, device=ONE)
    assert isinstance(x, torch.cuda.FloatTensor) and not isinstance(x, torch.FloatTensor)
    assert not isinstance(x, torch.cuda.HalfTensor) and isinstance(x.half(), torch.cuda.HalfTensor)
    assert isinstance(x.cpu(), torch.FloatTensor) and not isinstance(x.cpu(), torch.cuda.FloatTensor)
    assert x.type() == "torch.cuda.FloatTensor" and x.type(torch.cuda.HalfTensor).type() == "torch.cuda.HalfTensor"
    assert x.type("torch.FloatTensor").device == CPU and x.cpu().type(torch.cuda.LongTensor).device == ZERO
    assert x.type(torch.cuda.DoubleTensor).device == ONE


def test_old_types_are_asked_for_in_a_dry_run(gpus):
    """torchvision's ToTensor asks whether it has a ByteTensor before it divides by 255."""
    with virtualgpu.dry_run():
        x, image = torch.ones(2, device=ONE), torch.zeros(2, dtype=torch.uint8)
        assert isinstance(x, torch.cuda.FloatTensor) and not isinstance(x, torch.FloatTensor)
        assert isinstance(image, torch.ByteTensor) and isinstance(x.cpu(), torch.FloatTensor)
        assert not isinstance(image, (torch.FloatTensor, torch.cuda.ByteTensor))


@pytest.mark.filterwarnings("ignore:torch.set_default_tensor_type")
@pytest.mark.parametrize("kind", ["torch.cuda.HalfTensor", None])
def test_the_old_default_type(gpus, kind):
    torch.set_default_tensor_type(kind or torch.cuda.DoubleTensor)
    try:
        made = [torch.zeros(2), torch.tensor([1.0]), nn.Linear(2, 2).weight, torch.rand(2)]
    finally:
        torch.set_default_tensor_type(torch.FloatTensor)
    dtype = torch.float16 if kind else torch.float64
    assert {(tensor.device, tensor.dtype) for tensor in made} == {(ZERO, dtype)}
    assert (torch.zeros(2).device, torch.zeros(2).dtype) == (CPU, torch.float32)


# -- what a GPU says of itself


def test_properties(gpus):
    properties = torch.cuda.get_device_properties(1)
    assert (properties.name, properties.major, properties.minor) == ("Tesla T4", 7, 5)
    assert (properties.multi_processor_count, properties.warp_size) == (40, 32)
    assert properties.total_memory == torch.cuda.mem_get_info(1)[1] and isinstance(properties.L2_cache_size, int)
    assert uuid.UUID(str(properties.uuid)) != uuid.UUID(str(torch.cuda.get_device_properties(0).uuid))
    assert properties.max_threads_per_multi_processor == 1024  # compute capability 7.5, CUDA C++ Programming Guide
    for text in ("Tesla T4", "major=7", "minor=5", "multi_processor_count=40"):
        assert text in repr(properties)
    with pytest.raises(AttributeError, match="no_such_thing"):
        properties.no_such_thing  # noqa: B018


@pytest.mark.parametrize(
    "name", ["memory_allocated", "max_memory_allocated", "memory_reserved", "memory_stats", "mem_get_info"]
)
@pytest.mark.parametrize("device", [lambda: 1, lambda: "cuda:1", lambda: ONE, lambda: torch.cuda.device(1)])
def test_every_way_to_name_a_gpu(gpus, name, device):
    kept = torch.ones(1 << 20, device=ONE)
    ask = getattr(torch.cuda, name)
    if name == "mem_get_info" and isinstance(device(), torch.cuda.device):
        pytest.skip("PyTorch's own code does not take it there")
    assert ask(device()) == ask(1) != ask(0)
    assert torch.cuda.get_device_name(device()) == "Tesla T4" and torch.cuda.get_device_capability(device()) == (7, 5)
    del kept


def test_names_of_modules_that_programs_import(gpus):
    """PyTorch's own Python code runs on the virtual driver."""
    assert torch.cuda.is_available() and torch.cuda.device_count() == 2 and torch.backends.cuda.is_built()
    assert torch.cuda.get_arch_list() == ["sm_75"] and not torch.cuda.is_bf16_supported(including_emulation=False)
    assert not torch.cuda.can_device_access_peer(0, 1)  # two T4s
    virtualgpu.gpus(2, like="A100")
    assert torch.cuda.can_device_access_peer(0, 1) and not torch.cuda.can_device_access_peer(1, 1)
    virtualgpu.gpus(2)
    assert torch.cuda.current_blas_handle() == 0
    with torch.cuda.device_of(torch.ones(1, device=ONE)):
        assert torch.cuda.current_device() == 1
    assert torch.accelerator.is_available() and torch.accelerator.device_count() == 2
    assert torch.accelerator.current_accelerator() == torch.device("cuda")
    assert torch.get_device_module("cuda") is torch.cuda and torch.cuda.is_initialized()


def test_the_types_of_a_card_are_dtypes(gpus):
    types = torch.accelerator.get_device_capability("cuda:0")["supported_dtypes"]
    assert {torch.float32, torch.bfloat16, torch.int64, torch.bool} <= types and not [
        t for t in types if isinstance(t, str)
    ]
