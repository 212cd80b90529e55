"""Sparse tensors on virtual GPUs: places, bytes and numbers."""

import pytest
import torch
from torch import nn

import virtualgpu

ZERO, ONE, CPU = torch.device("cuda:0"), torch.device("cuda:1"), torch.device("cpu")


def coo(device):
    return torch.sparse_coo_tensor([[0, 1, 1], [2, 0, 2]], [3.0, 4.0, 5.0], (2, 3), device=device)


MADE = {
    "coo": coo,
    "to": lambda device: coo("cpu").to(device),
    "to_sparse": lambda device: coo("cpu").to_dense().to(device).to_sparse(),
    "csr": lambda device: torch.sparse_csr_tensor([0, 1, 3], [2, 0, 2], [3.0, 4.0, 5.0], (2, 3), device=device),
    "to_sparse_csr": lambda device: coo(device).to_sparse_csr(),
    "of parts": lambda device: torch.sparse_coo_tensor(
        coo("cpu").coalesce().indices().to(device), torch.tensor([3.0, 4.0, 5.0], device=device), (2, 3)
    ),
    "clone": lambda device: coo(device).clone(),
    "twice": lambda device: (coo(device) + coo(device)) / 2,
}


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_tensors_have_a_place(gpus, make):
    before = torch.cuda.memory_allocated(1)
    x = make("cuda:1")
    assert x.device == ONE and x.is_cuda and torch.cuda.memory_allocated(1) > before
    assert x.to_dense().device == ONE and x.to_dense().tolist() == [[0, 0, 3], [4, 0, 5]]
    assert x.values().device == ONE if x.layout is not torch.sparse_coo else x.coalesce().values().device == ONE
    assert x.cpu().device == CPU and x.cpu().to_dense().tolist() == [[0, 0, 3], [4, 0, 5]]
    assert x.to("cuda:0").device == ZERO and "device='cuda:1'" in repr(x)
    assert x.type().startswith("torch.cuda.sparse") if x.layout is torch.sparse_coo else True
    del x
    assert torch.cuda.memory_allocated(1) == before


@pytest.mark.parametrize(
    "line",
    [
        lambda x, d: torch.sparse.mm(x, d),
        lambda x, d: x @ d,
        lambda x, d: torch.sparse.addmm(torch.ones(2, 2, device=d.device), x, d),
        lambda x, d: (x * 2).to_dense(),
        lambda x, d: torch.sparse.sum(x),
        lambda x, d: x.sum(),
        lambda x, d: x.norm(),
        lambda x, d: x.sum(0).to_dense(),
        lambda x, d: torch.sparse.sum(x, 0).to_dense(),
        lambda x, d: x.t().coalesce().values(),
        lambda x, d: x.coalesce().indices(),
        lambda x, d: torch.sparse.softmax(x, 1).to_dense(),
        lambda x, d: d.t() + x.coalesce(),
        lambda x, d: x.transpose(0, 1).to_dense() + d,
    ],
)
def test_sparse_operations(gpus, line):
    dense = torch.arange(6.0).view(3, 2)
    expected = line(coo("cpu"), dense)
    found = line(coo("cuda:1"), dense.to(ONE))
    assert found.device == ONE and torch.equal(found.cpu(), expected)


@pytest.mark.parametrize(
    "line",
    [
        lambda x, d: x @ d,
        lambda x, d: d.t() @ x.to_dense().t().to_sparse_csr(),
        lambda x, d: torch.addmm(torch.ones(2, 2, device=d.device), x, d),
        lambda x, d: torch.sparse.sampled_addmm(x, torch.ones(2, 2, device=d.device), d.t()),
    ],
)
def test_compressed_rows_are_multiplied(gpus, line):
    expected = line(coo("cpu").to_sparse_csr(), torch.arange(6.0).view(3, 2))
    found = line(coo("cuda:1").to_sparse_csr(), torch.arange(6.0, device=ONE).view(3, 2))
    assert found.device == ONE and torch.equal(found.to_dense().cpu(), expected.to_dense())


def test_gradients_of_compressed_rows(gpus):
    def gradients(device):
        x = coo(device).to_sparse_csr().requires_grad_()
        left, right = (torch.ones(*shape, device=device, requires_grad=True) for shape in ((2, 4), (4, 3)))
        torch.sparse.sampled_addmm(x, left, right).backward(coo(device).to_sparse_csr())
        return left.grad.cpu(), right.grad.cpu()

    for found, expected in zip(gradients("cuda:1"), gradients("cpu"), strict=True):
        assert torch.equal(found, expected)


def test_a_product_costs_by_what_a_sparse_matrix_holds(gpus):
    def seconds(matrix):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        matrix @ dense
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    dense = torch.ones(2048, 2048, device=ONE)
    torch.cuda.set_device(ONE)
    eye, tenth = torch.eye(2048, device=ONE), (torch.arange(2048 * 2048, device=ONE) % 10 == 0).view(2048, 2048)
    times = [seconds(matrix) for matrix in (eye.to_sparse_csr(), tenth.float().to_sparse_csr(), tenth.float())]
    assert times[0] < times[2] / 10  # one number a row
    assert times[1] > times[2]  # at a tenth, cuSPARSE is slower than dense products, too


@pytest.mark.parametrize("optimizer", [torch.optim.SparseAdam, torch.optim.SGD, torch.optim.Adagrad])
def test_an_embedding_with_sparse_gradients_trains(gpus, optimizer):
    def trained(device):
        torch.manual_seed(0)
        table = nn.Embedding(10, 3, sparse=True).to(device)
        steps = optimizer(table.parameters(), lr=0.1)
        for _ in range(3):
            steps.zero_grad()
            table(torch.tensor([1, 4, 1], device=device)).square().sum().backward()
            steps.step()
        return table.weight.detach(), table.weight.grad

    weight, gradient = trained(ONE)
    expected, _ = trained(CPU)
    assert gradient.is_sparse and gradient.device == weight.device == ONE and torch.equal(weight.cpu(), expected)
    assert gradient.coalesce().indices().tolist() == [[1, 4]]


def test_embedding_bag_with_sparse_gradients(gpus):
    def gradient(device):
        torch.manual_seed(0)
        bag = nn.EmbeddingBag(10, 3, sparse=True, mode="sum").to(device)
        bag(torch.tensor([[1, 2], [2, 4]], device=device)).sum().backward()
        return bag.weight.grad

    assert gradient(ONE).device == ONE and torch.equal(gradient(ONE).to_dense().cpu(), gradient(CPU).to_dense())


def test_sparse_tensors_of_two_places_do_not_mix(gpus):
    for attempt in (
        lambda: coo("cuda:0") + coo("cuda:1"),
        lambda: coo("cuda:0") + coo("cpu"),
        lambda: torch.sparse.mm(coo("cuda:0"), torch.ones(3, 2)),
        lambda: torch.sparse_coo_tensor(torch.tensor([[0]], device="cuda:1"), torch.ones(1, device="cuda:0")),
    ):
        with pytest.raises(RuntimeError, match=r"same device|device of indices"):
            attempt()


def test_sparse_tensors_are_saved_with_their_place(gpus, tmp_path):
    torch.save(coo("cuda:1"), tmp_path / "x.pt")
    assert torch.load(tmp_path / "x.pt").device == ONE
    assert torch.load(tmp_path / "x.pt", map_location="cpu").to_dense().tolist() == [[0, 0, 3], [4, 0, 5]]


def test_sparse_in_a_dry_run_says_what_it_is(gpus):
    with virtualgpu.dry_run():
        try:
            x = coo("cuda:1")
            out = torch.sparse.mm(x, torch.ones(3, 2, device="cuda:1"))
        except NotImplementedError as error:
            assert "sparse" in str(error) and "outside dry_run()" in str(error)
        else:
            assert x.device == out.device == ONE and out.shape == (2, 2)
