"""For what the host waits: its simulated time says so, and torch.cuda.set_sync_debug_mode where PyTorch knows of it (engine/host_waits.py)."""

import warnings

import pytest
import torch
from torch import linalg
from torch.nn import functional

import virtualgpu
from virtualgpu import _compat

MESSAGE = "called a synchronizing CUDA operation"


@pytest.fixture(autouse=True)
def gpus():
    return virtualgpu.gpus(1)


@pytest.fixture
def x():
    return torch.arange(4.0, device="cuda")


def matrix(*batch: int) -> torch.Tensor:
    return torch.eye(4, device="cuda").mul_(2).expand(*batch, 4, 4)


def whole(*numbers: int) -> torch.Tensor:
    """On the GPU without a copy, which the host would wait for."""
    return torch.stack([torch.full((), number, device="cuda") for number in numbers])


def gradient(function, x: torch.Tensor):
    """Of a function whose forward pass lets the host go on."""
    (out := function(leaf := x.clone().requires_grad_())).backward(torch.ones_like(out))
    return leaf.grad


def clip(x: torch.Tensor, **options):
    x.grad = x.clone()
    torch.nn.utils.clip_grad_norm_([x], 1.0, **options)


def sparse(x: torch.Tensor, *size: tuple) -> torch.Tensor:
    return torch.sparse_coo_tensor(torch.stack([x, x]).long(), x, *size, check_invariants=False)


def runs_ahead(call, x: torch.Tensor) -> bool:
    """Does the host go on before the GPU has come to what was queued before?"""
    clock = virtualgpu.machine().clock
    torch.cuda.synchronize()
    torch.cuda._sleep(10**9)
    end = clock.ready(0)
    call(x)
    return clock.host < end


# What linalg says in its documentation, and what is made of it. Each is tried in a dry run, too
DECOMPOSED = {
    "inv": lambda x: linalg.inv(matrix()),
    "Tensor.inverse": lambda x: matrix().inverse(),
    "inv_ex, checked": lambda x: linalg.inv_ex(matrix(), check_errors=True),
    "cholesky": lambda x: linalg.cholesky(matrix(2)),
    "cholesky_ex, checked": lambda x: linalg.cholesky_ex(matrix(), check_errors=True),
    "solve": lambda x: linalg.solve(matrix(), x),
    "solve_ex, checked": lambda x: linalg.solve_ex(matrix(), x, check_errors=True),
    "eigh": lambda x: linalg.eigh(matrix(2)),
    "eigvalsh": lambda x: linalg.eigvalsh(matrix()),
    "svd": lambda x: linalg.svd(matrix()),
    "svdvals": lambda x: linalg.svdvals(matrix()),
    "torch.svd": lambda x: torch.svd(matrix()),
    "pinv": lambda x: linalg.pinv(matrix()),
    "pinv, hermitian": lambda x: linalg.pinv(matrix(), hermitian=True),
    "matrix_rank": lambda x: linalg.matrix_rank(matrix()),
    "matrix_rank, hermitian": lambda x: linalg.matrix_rank(matrix(), hermitian=True),
    "eig": lambda x: linalg.eig(matrix()),
    "eigvals": lambda x: linalg.eigvals(matrix()),
    "lu_factor": lambda x: linalg.lu_factor(matrix()),
    "lu_factor_ex, checked": lambda x: linalg.lu_factor_ex(matrix(), check_errors=True),
    "ldl_factor": lambda x: linalg.ldl_factor(matrix()),
    "ldl_factor_ex, checked": lambda x: linalg.ldl_factor_ex(matrix(), check_errors=True),
    "cond": lambda x: linalg.cond(matrix()),
    "cond, nuc": lambda x: linalg.cond(matrix(), "nuc"),
    "matrix_norm, 2": lambda x: linalg.matrix_norm(matrix(), 2),
    "matrix_norm, nuc": lambda x: linalg.matrix_norm(matrix(), "nuc"),
    "matrix_power, negative": lambda x: linalg.matrix_power(matrix(), -2),
    "matrix_exp": lambda x: linalg.matrix_exp(matrix()),
    "tensorinv": lambda x: linalg.tensorinv(matrix().reshape(2, 2, 2, 2)),
    "tensorsolve": lambda x: linalg.tensorsolve(matrix().reshape(2, 2, 2, 2), x.view(2, 2)),
}
WAITING = DECOMPOSED | {
    "lstsq": lambda x: linalg.lstsq(matrix(), x.view(4, 1)),
    "item": lambda x: x[0].item(),
    "if": lambda x: bool(x[0] > 1),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "print": lambda x: repr(x),
    "to the GPU, not pinned": lambda x: torch.ones(3).cuda(),
    "copy_": lambda x: torch.empty(4).copy_(x),
    "nonzero": lambda x: x.nonzero(),
    "a mask": lambda x: x[x > 1],
    "x[mask] = a GPU's number": lambda x: x.__setitem__(x > 1, x.sum()),
    "unique": lambda x: x.unique(),
    "one_hot": lambda x: torch.nn.functional.one_hot(x.long()),
    "repeat_interleave": lambda x: x.repeat_interleave(torch.ones(4, dtype=torch.long, device="cuda")),
    "indices on the host": lambda x: x[torch.tensor([1, 0])],
    "a list for indices": lambda x: x[[0, 1]],
    "a GPU's number as an index": lambda x: x[whole(1)[0]],
    "masked_select": lambda x: torch.masked_select(x, x > 1),
    "where": lambda x: torch.where(x > 1),
    "argwhere": lambda x: x.argwhere(),
    "index_put, out of place": lambda x: x.index_put((x > 1,), x.sum()),
    "unique_consecutive": lambda x: x.unique_consecutive(),
    "bincount": lambda x: x.long().bincount(minlength=9),
    "histc of any range": lambda x: x.histc(4),
    "isin of many": lambda x: torch.isin(x, x.repeat(9)),
    "searchsorted by a sorter": lambda x: torch.searchsorted(x, x, sorter=x.long()),
    "segment_reduce": lambda x: torch.segment_reduce(x, "sum", lengths=whole(2, 2)),
    "equal": lambda x: torch.equal(x, x + 1),
    "allclose": lambda x: torch.allclose(x, x),
    "normal, std on the GPU": lambda x: torch.normal(0.0, x + 1),
    "normal of two": lambda x: torch.normal(x, x + 1),
    "masked_fill by a GPU's number": lambda x: x.masked_fill(x > 1, x.sum()),
    "index_fill by a GPU's number": lambda x: x.index_fill(0, whole(0, 1), x.sum()),
    "linspace of a GPU's numbers": lambda x: torch.linspace(x[0], x[1], 3, device="cuda"),
    "cov": lambda x: torch.cov(matrix()),
    "corrcoef": lambda x: matrix().corrcoef(),
    "to_sparse": lambda x: matrix().to_sparse(),
    "coalesce": lambda x: sparse(x, (4, 4)).coalesce(),
    "sparse, of no size": lambda x: sparse(x),
    "ctc_loss": lambda x: functional.ctc_loss(matrix(2).log_softmax(-1), whole(1, 1).expand(4, 2), (2,) * 4, (2,) * 4),
    "torch.tensor": lambda x: torch.tensor([1.0], device="cuda"),
    "clip_grad_norm_, refusing nan": lambda x: clip(x, error_if_nonfinite=True),
    "gradient of max": lambda x: gradient(torch.max, x),
    "gradient of median": lambda x: gradient(torch.median, x),
    "gradient of prod": lambda x: gradient(torch.prod, x),
    "gradient of cumprod": lambda x: gradient(lambda x: x.cumprod(0), x),
    "gradient of trace": lambda x: gradient(lambda x: x.view(2, 2).trace(), x),
    "gradient of masked_scatter": lambda x: gradient(lambda filling: x.masked_scatter(x > 1, filling), x),
    "nn.TransformerEncoder asks for its mask": lambda x: torch._nested_tensor_from_mask_left_aligned(
        matrix(1), x.view(1, 4) < 2
    ),
    "Stream.synchronize": lambda x: torch.cuda.current_stream().synchronize(),
}
GOING_ON = {
    "a kernel": lambda x: x.exp().sum(),
    "pinned": lambda x: torch.ones(3).pin_memory().to("cuda", non_blocking=True),
    "to pinned": lambda x: x.to("cpu", non_blocking=True),
    "masked_fill": lambda x: x.masked_fill(x > 1, 0.0),
    "x[mask] = 1": lambda x: x.__setitem__(x > 1, 1.0),
    "indices": lambda x: x[torch.zeros(2, dtype=torch.long, device="cuda")],
    "one_hot": lambda x: torch.nn.functional.one_hot(x.long(), num_classes=4),
    "randperm": lambda x: torch.randperm(20000, device="cuda"),
    "repeat_interleave, its size told": lambda x: x.repeat_interleave(
        torch.ones(4, dtype=torch.long, device="cuda"), output_size=4
    ),
    "a number of the host": lambda x: x * torch.tensor(2.0),
    "full": lambda x: torch.full((2,), 1.0, device="cuda"),
    "repeat_interleave by a number": lambda x: x.repeat_interleave(3),
    "x[indices] += x": lambda x: x.index_put_((whole(0, 0),), x[:2].clone(), accumulate=True),
    "masked_scatter": lambda x: x.masked_scatter(x > 1, x),
    "nonzero_static": lambda x: torch.nonzero_static(x, size=3),
    "count_nonzero": lambda x: x.count_nonzero(),
    "equal, of two sizes": lambda x: torch.equal(x, x[:2]),
    "isclose": lambda x: torch.isclose(x, x),
    "histc of a range": lambda x: x.histc(4, 0, 4),
    "isin of few": lambda x: torch.isin(x, x[:2]),
    "isin, unique": lambda x: torch.isin(x, x.repeat(9), assume_unique=True),
    "searchsorted, bucketize": lambda x: torch.bucketize(x, x) + torch.searchsorted(x, x),
    "mode": lambda x: x.mode(),
    "quantile": lambda x: x.quantile(0.5),
    "normal, std a number": lambda x: torch.normal(x, 1.0),
    "multinomial": lambda x: torch.multinomial(x + 1, 2),  # it asserts on the GPU
    "masked_fill by a host's number": lambda x: x.masked_fill(x > 1, torch.tensor(0.0)),
    "index_fill": lambda x: x.index_fill(0, whole(0, 1), 1.0),
    "segment_reduce, unsafe": lambda x: torch.segment_reduce(x, "sum", lengths=whole(2, 2), unsafe=True),
    "sparse": lambda x: sparse(x, (4, 4)),
    "linspace": lambda x: torch.linspace(0, 1, 3, device="cuda"),
    "clip_grad_norm_": lambda x: clip(x),
    "embedding, renormed": lambda x: functional.embedding(whole(0, 1), matrix().clone(), max_norm=1.0),
    "gradient of amax": lambda x: gradient(torch.amax, x),
    "gradient of empty indices": lambda x: gradient(lambda x: x[whole(0)[:0]], x),
    "inv_ex": lambda x: linalg.inv_ex(matrix()),
    "cholesky_ex": lambda x: linalg.cholesky_ex(matrix()),
    "solve_ex": lambda x: linalg.solve_ex(matrix(), x),
    "lu_factor_ex, lu_solve": lambda x: linalg.lu_solve(*linalg.lu_factor_ex(matrix())[:2], x.view(4, 1)),
    "ldl_factor_ex": lambda x: linalg.ldl_factor_ex(matrix()),
    "lu": lambda x: linalg.lu(matrix()),
    "qr": lambda x: linalg.qr(matrix()),
    "det": lambda x: linalg.det(matrix()),
    "slogdet": lambda x: linalg.slogdet(matrix()),
    "cond, fro": lambda x: linalg.cond(matrix(), "fro"),  # its documentation says more than it does
    "matrix_power": lambda x: linalg.matrix_power(matrix(), 3),
    "matrix_norm": lambda x: linalg.matrix_norm(matrix()),
    "solve_triangular": lambda x: linalg.solve_triangular(matrix(), x.view(4, 1), upper=True),
    "cholesky_solve": lambda x: torch.cholesky_solve(x.view(4, 1), matrix()),
    "cholesky_inverse": lambda x: torch.cholesky_inverse(matrix()),
    "householder_product": lambda x: linalg.householder_product(matrix(), x),
    "vander": lambda x: linalg.vander(x),
}
if _compat.VERSION >= (2, 15):  # before, it selects by a mask
    GOING_ON["combinations"] = lambda x: gradient(torch.combinations, x)
# Waiting that is asked for by its name, and what waits below PyTorch
SILENT = {
    "synchronize": lambda x: torch.cuda.synchronize(),
    "Event.synchronize": lambda x: torch.cuda.current_stream().record_event().synchronize(),
    "pageable, non_blocking": lambda x: torch.ones(3).to("cuda", non_blocking=True),
    "into pageable, non_blocking": lambda x: torch.empty(4).copy_(x, non_blocking=True),
    "unique rows": lambda x: x.view(2, 2).unique(dim=0),
    "unique_consecutive rows": lambda x: x.view(2, 2).unique_consecutive(dim=0),
    "mode of many": lambda x: x.expand(1024, 4).flatten().mode(),
}


@pytest.mark.parametrize("what", WAITING)
def test_waiting(what, x):
    torch.cuda.set_sync_debug_mode("warn")
    with pytest.warns(UserWarning, match=MESSAGE) as said:
        WAITING[what](x)
    assert {warning.filename for warning in said} == {__file__}
    torch.cuda.set_sync_debug_mode("error")
    with pytest.raises(RuntimeError, match=MESSAGE):
        WAITING[what](x)
    torch.cuda.set_sync_debug_mode("default")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not runs_ahead(WAITING[what], x)


@pytest.mark.parametrize("what", GOING_ON)
def test_going_on(what, x):
    torch.cuda.set_sync_debug_mode("error")
    assert runs_ahead(GOING_ON[what], x)


@pytest.mark.parametrize("what", SILENT)
def test_waiting_of_which_pytorch_does_not_know(what, x):
    torch.cuda.set_sync_debug_mode("error")
    assert not runs_ahead(SILENT[what], x)


@pytest.mark.parametrize("what", DECOMPOSED)
def test_a_dry_run_waits_as_well(what):
    with virtualgpu.dry_run():
        assert not runs_ahead(DECOMPOSED[what], torch.arange(4.0, device="cuda"))


def test_the_mode_is_read_back_and_new_gpus_have_none(x):
    torch.cuda.set_sync_debug_mode(1)
    assert torch.cuda.get_sync_debug_mode() == 1
    virtualgpu.reset()
    virtualgpu.gpus(1)
    assert torch.cuda.get_sync_debug_mode() == 0
    torch.ones(1, device="cuda").item()
