"""What a dry run remembers of one operation is right for the next that is like it."""

import contextlib
import gc
import weakref

import pytest
import torch
from torch import Tensor, func
from torch.autograd import forward_ad as fwAD
from torch.utils._pytree import tree_leaves

import virtualgpu
from virtualgpu.engine import dry_run
from virtualgpu.engine.dry_run import DryRun

NUMBERS = (True, 1, 1.0, 1 + 0j)  # equal to Python
OPERATIONS = {
    "mul": lambda x, number: x * number,
    "add": lambda x, number: x + number,
    "pow": lambda x, number: x**number,
    "where": lambda x, number: torch.where(x.bool(), number, 0),
    "clamp": lambda x, number: x.int().clamp(number),
}


@pytest.fixture
def one(monkeypatch):
    """One virtual GPU, and nothing remembered."""
    monkeypatch.setenv("HELPERS_GPUS", "virtual")
    monkeypatch.setattr(DryRun, "recipes", {})
    yield lambda: virtualgpu.gpus(1)
    virtualgpu.reset()


def types(operation, numbers, forget: bool) -> list:
    """What comes of it for each number and some dtypes, in a dry run; forget: nothing is remembered from one to the next."""
    found = []
    for number in numbers:
        for dtype in (torch.bool, torch.int64, torch.float32):
            if forget:
                DryRun.recipes.clear()
            with contextlib.suppress(RuntimeError):  # not of a bool
                result = operation(torch.ones(100, dtype=dtype, device="cuda"), number)
                found.append((number, dtype, result.dtype, result.nbytes))
    return found


def test_a_folded_tensor_keeps_the_memory_of_its_columns(one):
    """CUDA's kernel makes it as large as its input, and leaves it so (Col2Im.cu): twice, since the second is remembered."""
    one()

    def kept() -> list[int]:
        columns, found = torch.ones(2, 27, 196, device="cuda"), []
        for _ in range(2):
            before = torch.cuda.memory_allocated()
            image = torch.nn.functional.fold(columns, (16, 16), 3)
            found.append(torch.cuda.memory_allocated() - before)
            del image
        return found

    wanted = kept()
    with virtualgpu.dry_run():
        assert kept() == wanted == [42496, 42496]


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_numbers_that_are_equal_and_of_another_type(one, operation, order):
    one()
    with virtualgpu.dry_run():
        expected = types(operation, NUMBERS[::order], forget=True)
        DryRun.recipes.clear()
        assert types(operation, NUMBERS[::order], forget=False) == expected


def test_a_mask_times_true_and_times_one(one):
    one()
    with virtualgpu.dry_run():
        mask = torch.ones(1 << 20, dtype=torch.bool, device="cuda")
        results = mask * True, mask * 1, mask * 1.0, mask * (1 + 0j)
        assert [result.dtype for result in results] == [torch.bool, torch.int64, torch.float32, torch.complex64]
        assert torch.cuda.memory_allocated() == (1 + 1 + 8 + 4 + 8) << 20


def test_generators_are_not_kept(one):
    one()
    with virtualgpu.dry_run():
        kept = []
        for seed in range(20):
            generator = torch.Generator("cuda").manual_seed(seed)
            torch.empty(8, device="cuda").uniform_(generator=generator)
            kept.append(weakref.ref(generator))
            if not seed:
                remembered = len(DryRun.recipes)
        assert len(DryRun.recipes) == remembered
        del generator
        gc.collect()
        assert not any(reference() for reference in kept)


def test_the_crosscheck_finds_what_a_key_lacks(one, monkeypatch):
    """True, 1 and 1.0 in one key, as it once was."""

    def describe(values, key):
        for value in values:
            if isinstance(value, Tensor):
                key += (value.dtype, value.shape, value.stride())
            elif isinstance(value, (list, tuple)):
                describe(value, key)
            else:
                key.append(value)

    monkeypatch.setattr(dry_run, "_describe", describe)
    monkeypatch.setenv("VIRTUALGPU_CROSSCHECK", "1")
    one()
    with virtualgpu.dry_run():
        mask = torch.ones(1000, dtype=torch.bool, device="cuda")
        assert (mask * True).dtype is torch.bool
        with pytest.raises(RuntimeError, match=r"remembered .*torch.bool.* of aten.mul.Tensor and finds .*torch.int64"):
            mask * 1


@pytest.mark.parametrize(
    "wrong", [((8,), (2,), torch.float32), ((8,), (1,), torch.float64), ((4, 2), (2, 1), torch.float32)]
)
def test_the_crosscheck_compares_strides_and_types(one, monkeypatch, wrong):
    monkeypatch.setenv("VIRTUALGPU_CROSSCHECK", "1")
    one()
    with virtualgpu.dry_run():
        x = torch.ones(8, device="cuda")
        x.sin()
        x.sin()
        (key,) = [key for key in DryRun.recipes if key[0].name == "sin"]
        DryRun.recipes[key] = lambda args: dry_run._empty(*wrong)
        with pytest.raises(RuntimeError, match="a dry run remembered"):
            x.sin()


def dual(f, y):
    with fwAD.dual_level():
        return fwAD.unpack_dual(f(fwAD.make_dual(y, torch.ones_like(y)))).tangent


FORWARD = {
    "jvp": lambda f, y: func.jvp(f, (y,), (y,)),
    "jacfwd": lambda f, y: func.jacfwd(f)(y),
    "hessian": lambda f, y: func.hessian(lambda y: f(y).sum())(y),
    "dual": dual,
    "vmap": lambda f, y: func.vmap(func.jvp, in_dims=(None, 0, 0))(f, (y.expand(3, 8),), (y.expand(3, 8),)),
}


@pytest.mark.parametrize("f", [torch.sin, lambda x: (x * x).exp(), lambda x: x.view(2, 4) @ x.view(4, 2)])
@pytest.mark.parametrize("how", FORWARD.values(), ids=FORWARD)
def test_forward_mode(one, how, f):
    """Some of its operations answer yes or no (_has_same_storage_numel), which is no shape to remember."""
    shapes = lambda out: [(tuple(t.shape), t.dtype, t.device) for t in tree_leaves(out)]  # noqa: E731
    one()
    expected = shapes(how(f, torch.arange(8.0, device="cuda")))
    with virtualgpu.dry_run():
        assert shapes(how(f, torch.arange(8.0, device="cuda"))) == expected
        assert shapes(how(f, torch.arange(8.0, device="cuda"))) == expected


def test_linearize_is_refused(one):
    """It would fold all of it, tangents too, and give what was on the CPU."""
    one()
    y = torch.arange(8.0, device="cuda")
    assert func.linearize(torch.sin, y)[1](y).device.type == "cuda"
    with virtualgpu.dry_run(), pytest.raises(NotImplementedError, match=r"linearize .* Use torch.func.jvp"):
        func.linearize(torch.sin, y)
