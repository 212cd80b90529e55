"""What a run with numbers refuses, a dry run refuses: with the same error, and in PyTorch's words."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import virtualgpu

HALF, SINGLE, DOUBLE, LONG, INT = torch.float16, torch.float32, torch.float64, torch.int64, torch.int32


def ones(*shape, dtype=SINGLE):
    return torch.ones(shape, device="cuda", dtype=dtype)


def shifted(write):
    memory = ones(2000)
    return write(memory[1:], memory[:-1])


TYPES = {
    "a product": lambda n: ones(n, n) @ ones(n, n, dtype=HALF),
    "a product of three dimensions": lambda n: ones(2, n, n) @ ones(n, n, dtype=HALF),
    "a bias": lambda n: F.linear(ones(n, n), ones(n, n), ones(n, dtype=HALF)),
    "a vector": lambda n: torch.mv(ones(n, n), ones(n, dtype=DOUBLE)),
    "a convolution": lambda n: F.conv2d(ones(1, 3, n, n), ones(4, 3, 3, 3, dtype=HALF)),
    "classes": lambda n: F.cross_entropy(ones(n, n), ones(n, dtype=INT)),
    "weights of classes": lambda n: F.cross_entropy(ones(n, n, dtype=HALF), ones(n, dtype=LONG), ones(n)),
    "a loss": lambda n: F.binary_cross_entropy(ones(n, n), ones(n, n, dtype=HALF)),
    "a loss of whole numbers": lambda n: F.mse_loss(ones(n, n, dtype=LONG), ones(n, n, dtype=LONG)),
    "layer norm": lambda n: F.layer_norm(ones(n, n), (n,), ones(n, dtype=HALF), ones(n, dtype=HALF)),
    "batch norm": lambda n: F.batch_norm(
        ones(n, 4, n), ones(4), ones(4), ones(4, dtype=HALF), ones(4, dtype=HALF), True
    ),
    "rows that are added": lambda n: ones(n, n).index_add(0, ones(n, dtype=LONG), ones(n, n, dtype=HALF)),
    "rows that are put": lambda n: ones(n, n).index_put((ones(n, dtype=LONG),), ones(n, n, dtype=HALF)),
    "rows that are picked": lambda n: ones(n, n).index_select(0, ones(n)),
    "a grid": lambda n: F.grid_sample(ones(1, 1, n, n), ones(1, n, n, 2, dtype=HALF)),
    "bits": lambda n: ones(n, n) & ones(n, n),
    "order": lambda n: ones(n, n, dtype=torch.complex64).max(),
    "a decomposition": lambda n: torch.linalg.cholesky(ones(n, n, dtype=HALF)),
    "the mean of whole numbers": lambda n: ones(n, n, dtype=LONG).mean(),
    "attention": lambda n: nn.MultiheadAttention(8, 2, device="cuda")(*[ones(n, 2, 8, dtype=HALF)] * 3),
}
SHAPES = {
    "a product": lambda n: ones(n, n) @ ones(n + 1, n),
    "a sum": lambda n: ones(n, n) + ones(n, n + 1),
    "channels": lambda n: F.conv2d(ones(1, 3, n, n), ones(4, 2, 3, 3)),
    "channels of a transposed one": lambda n: F.conv_transpose2d(ones(1, 3, n, n), ones(4, 3, 3, 3)),
    "dimensions": lambda n: F.conv1d(ones(3, n), ones(4, 3, 3, 3)),
    "a bias": lambda n: F.conv2d(ones(1, 3, n, n), ones(4, 3, 3, 3), ones(5)),
    "a dimension": lambda n: F.softmax(ones(n, n), 3),
    "rows that are put": lambda n: ones(n, n).index_put((ones(n, dtype=LONG),), ones(3, n)),
    "parts": lambda n: torch.cat([ones(n, n), ones(n, n + 1)]),
    "what is expanded": lambda n: ones(1, n).expand(n, n).add_(1),
    "what is copied to": lambda n: ones(1, n).expand(n, n).copy_(ones(n, n)),
    "what is shifted": lambda n: shifted(torch.Tensor.add_),
    "a copy of what is shifted": lambda n: shifted(torch.Tensor.copy_),
}


def refusal(function, size) -> tuple[type, str]:
    with pytest.raises((RuntimeError, IndexError)) as caught:
        function(size)
    return caught.type, str(caught.value)


@pytest.mark.parametrize("size", [4, 150])
@pytest.mark.parametrize(
    "function", [*TYPES.values(), *SHAPES.values()], ids=[*(f"types of {key}" for key in TYPES), *SHAPES]
)
def test_a_dry_run_refuses_what_a_run_with_numbers_does(gpus, function, size):
    expected = refusal(function, size)
    with virtualgpu.dry_run():
        found = refusal(function, size)
    assert found[0] is expected[0]
    assert found[1] == expected[1] or function is TYPES["a convolution"]


def test_in_cudas_words():
    with (
        virtualgpu.dry_run(),
        pytest.raises(RuntimeError, match=r"Input type \(torch.cuda.FloatTensor\) and weight type \(torch.cuda.Half"),
    ):
        TYPES["a convolution"](100)


@pytest.mark.parametrize(
    "function",
    [
        lambda: ones(1, 300).expand(300, 300).fill_(1),
        lambda: F.cross_entropy(ones(300, 300, dtype=HALF), ones(300, dtype=LONG), ones(300, dtype=HALF)),
        lambda: F.embedding(ones(300, dtype=LONG), ones(300, 64)),
        lambda: torch.where(ones(90, 90) > 0, ones(90, 90), ones(90, 90, dtype=HALF)),
        lambda: torch.linalg.solve(ones(3, 3), ones(3, 1)),
        lambda: torch.lu_unpack(*torch.linalg.lu_factor(ones(3, 3)))[0],
        lambda: torch.linalg.det(ones(3, 3).requires_grad_()),
        lambda: ones(8, 8)[torch.tensor([7, 7])],
        lambda: torch.histc(ones(9, dtype=LONG)),
        lambda: torch.multinomial(ones(9), 3),
        lambda: ones(9, dtype=LONG) // ones(9, dtype=LONG),
    ],
)
def test_what_is_right_is_taken(function):
    with virtualgpu.dry_run():
        assert function().device.type == "cuda"


def test_asking_takes_no_more_than_the_operands_are():
    """A billion numbers at one place in memory are not small: the CPU would go through them all."""
    with virtualgpu.dry_run():
        far = torch.ones(1).expand(1 << 40)
        assert torch.empty_like(far, device="meta").shape == (far + far).shape == far.shape


def test_asking_draws_no_random_numbers(gpus):
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    with virtualgpu.dry_run():
        torch.multinomial(ones(7), 3)
        F.dropout(ones(7, 9))
        ones(5, 3).normal_()
    assert torch.equal(torch.rand(3), expected)
