# ruff: noqa: F403, F405
"""Sparse and nested tensors on virtual GPUs: places, bytes, numbers, and what a dry run says of them."""

import pytest

from tests.virtualgpu.engine.tools import *

pytestmark = pytest.mark.filterwarnings("ignore:Sparse")


def coo(device):
    return torch.sparse_coo_tensor([[0, 1, 1], [2, 0, 2]], [3.0, 4.0, 5.0], (2, 3), device=device)


def csr(device):
    return torch.sparse_csr_tensor([0, 1, 3], [2, 0, 2], [3.0, 4.0, 5.0], (2, 3), device=device)


MADE = table("""
    coo(device)
    coo("cpu").to(device)
    coo("cpu").to_dense().to(device).to_sparse()
    csr(device)
    coo(device).to_sparse_csr()
    torch.sparse_coo_tensor(coo("cpu").coalesce().indices().to(device), torch.tensor([3.0, 4.0, 5.0], device=device), (2, 3))
    (coo(device) + coo(device)) / 2
""")


@pytest.mark.parametrize("call", MADE)
def test_sparse_tensors_have_a_place(gpus, call):
    before = torch.cuda.memory_allocated(1)
    x = eval(call, globals(), {"device": "cuda:1"})
    is_coo = x.layout is torch.sparse_coo
    assert x.device == ONE and x.is_cuda and torch.cuda.memory_allocated(1) > before
    assert x.to_dense().device == ONE and x.to_dense().tolist() == [[0, 0, 3], [4, 0, 5]]
    assert (x.coalesce() if is_coo else x).values().device == ONE
    assert x.cpu().device == CPU and x.cpu().to_dense().tolist() == [[0, 0, 3], [4, 0, 5]]
    assert x.to("cuda:0").device == ZERO and "device='cuda:1'" in repr(x)
    assert x.type().startswith("torch.cuda.sparse") or not is_coo
    del x
    assert torch.cuda.memory_allocated(1) == before


OPERATIONS = table("""
    torch.sparse.mm(x, d)
    torch.sparse.addmm(torch.ones(2, 2, device=d.device), x, d)
    (x * 2).to_dense()
    torch.sparse.sum(x)
    torch.sparse.sum(x, 0).to_dense()
    x.t().coalesce().values()
    torch.sparse.softmax(x, 1).to_dense()
    d.t() + x.coalesce()
    x.transpose(0, 1).to_dense() + d
    # compressed rows
    c @ d
    (d.t() @ c.to_dense().t().to_sparse_csr()).to_dense()
    torch.addmm(torch.ones(2, 2, device=d.device), c, d)
    torch.sparse.sampled_addmm(c, torch.ones(2, 2, device=d.device), d.t()).to_dense()
""")


@pytest.mark.parametrize("call", OPERATIONS)
def test_sparse_operations(gpus, call):
    results = []
    for device in ("cpu", "cuda:1"):
        names = {"x": coo(device), "c": csr(device), "d": torch.arange(6.0).view(3, 2).to(device)}
        results.append(eval(call, globals(), names))
    assert results[1].device == ONE and torch.equal(results[1].cpu(), results[0])


def test_gradients_of_compressed_rows(gpus):
    def gradients(device):
        x = csr(device).requires_grad_()
        left, right = (torch.ones(*shape, device=device, requires_grad=True) for shape in ((2, 4), (4, 3)))
        torch.sparse.sampled_addmm(x, left, right).backward(csr(device))
        return left.grad.cpu(), right.grad.cpu()

    assert all(map(torch.equal, gradients("cuda:1"), gradients("cpu")))


def test_a_product_costs_by_what_a_sparse_matrix_holds(gpus):
    def seconds(matrix):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        matrix @ dense
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    dense, eye = torch.ones(2048, 2048, device=ONE), torch.eye(2048, device=ONE)
    torch.cuda.set_device(ONE)
    tenth = (torch.arange(2048 * 2048, device=ONE) % 10 == 0).view(2048, 2048).float()
    few, many, all_of_them = (seconds(matrix) for matrix in (eye.to_sparse_csr(), tenth.to_sparse_csr(), tenth))
    assert few < all_of_them / 10 and many > all_of_them  # at a tenth, cuSPARSE is slower than dense products, too


@pytest.mark.parametrize("optimizer", [torch.optim.SparseAdam, torch.optim.SGD, torch.optim.Adagrad])
def test_an_embedding_with_sparse_gradients_trains(gpus, optimizer):
    def trained(device):
        torch.manual_seed(0)
        table = nn.Embedding(10, 3, sparse=True).to(device)
        bag = nn.EmbeddingBag(10, 3, sparse=True, mode="sum").to(device)
        steps = optimizer(table.parameters(), lr=0.1)
        for _ in range(3):
            steps.zero_grad()
            table(torch.tensor([1, 4, 1], device=device)).square().sum().backward()
            steps.step()
        bag(torch.tensor([[1, 2], [2, 4]], device=device)).sum().backward()
        return table.weight.detach(), bag.weight.grad, table.weight.grad

    (weight, of_bag, gradient), (expected, expected_of_bag, _) = trained(ONE), trained(CPU)
    assert gradient.is_sparse and gradient.device == weight.device == of_bag.device == ONE
    assert torch.equal(weight.cpu(), expected) and gradient.coalesce().indices().tolist() == [[1, 4]]
    assert torch.equal(of_bag.to_dense().cpu(), expected_of_bag.to_dense())


ELSEWHERE = table("""
    coo("cuda:0") + coo("cuda:1")
    coo("cuda:0") + coo("cpu")
    torch.sparse.mm(coo("cuda:0"), torch.ones(3, 2))
    torch.sparse_coo_tensor(torch.tensor([[0]], device="cuda:1"), torch.ones(1, device="cuda:0"))
    nested(2, 3) + nested(2, 3).cpu()
    F.linear(nested(2, 3), torch.ones(2, 4, device="cuda:0"))
""")


@pytest.mark.parametrize("call", ELSEWHERE)
def test_tensors_of_two_places_do_not_mix(gpus, call):
    with pytest.raises(RuntimeError, match=r"same device|device of indices"):
        eval(call)


def test_sparse_tensors_are_saved_with_their_place(gpus, tmp_path):
    torch.save(coo("cuda:1"), tmp_path / "x.pt")
    assert torch.load(tmp_path / "x.pt").device == ONE
    assert torch.load(tmp_path / "x.pt", map_location="cpu").to_dense().tolist() == [[0, 0, 3], [4, 0, 5]]


IN_A_DRY_RUN = table("""
    torch.sparse_coo_tensor([[0, 1]], [1.0, 2.0], (3,), device="cuda") | sparse tensors are not modelled in a dry run
    torch.sparse_coo_tensor(torch.tensor([[0, 1]]).cuda(), torch.ones(2).cuda()) | sparse tensors are not modelled in a dry run
    torch.sparse_coo_tensor([[0, 1]], [1.0, 2.0]) | sparse tensors are not modelled in a dry run .*outside dry_run
    torch.sparse_csr_tensor([0, 1, 1], [0], [1.0], (2, 2), device="cuda") | sparse tensors are not modelled in a dry run
    torch.zeros(3, layout=torch.sparse_coo, device="cuda") | sparse tensors are not modelled in a dry run
    nn.Embedding(3, 4, sparse=True, device="cuda")(whole(2)).sum().backward() | sparse tensors are not modelled in a dry run
    torch.nested.nested_tensor(rows(2, 1), device="cuda") | layout=torch\\.jagged
    attend_to_jagged() | attention of nested tensors .* padded ones \\(to_padded_tensor\\)
""")


@pytest.mark.parametrize("call, message", IN_A_DRY_RUN)
def test_in_a_dry_run_they_name_the_cure(gpus, call, message):
    with virtualgpu.dry_run(), pytest.raises(NotImplementedError, match=message):
        eval(call)


# -- nested tensors


def rows(*lengths):
    return [torch.arange(length * 4.0).reshape(length, 4).cos() for length in lengths]


def nested(*lengths, device="cuda:1"):
    return torch.nested.nested_tensor(rows(*lengths), device=device)


def attend_to_jagged():
    parts = [torch.ones(length, 2, 8) for length in (3, 5)]
    x = torch.nested.nested_tensor(parts, layout=torch.jagged, device="cuda").transpose(1, 2)
    F.scaled_dot_product_attention(x, x, x)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_an_encoder_with_a_padding_mask_in_evaluation(gpus, mode):
    """It makes a nested tensor of its input, and pads with zeros again."""
    torch.manual_seed(0)

    def encoder():
        return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2).eval()

    model, x, padding = encoder(), torch.randn(3, 5, 16), torch.arange(5) >= torch.tensor([[3], [5], [1]])
    with mode():
        here = model(x, src_key_padding_mask=padding)
        before = virtualgpu.machine().clock.ready(1)
        there = model.cuda(1)(x.to(ONE), src_key_padding_mask=padding.to(ONE))
        assert virtualgpu.machine().clock.ready(1) > before
        with virtualgpu.dry_run(), pytest.warns(UserWarning, match="works on the padding"):
            assert encoder().to(ONE)(x.to(ONE), src_key_padding_mask=padding.to(ONE)).shape == x.shape
    assert there.device == ONE and torch.equal(there.cpu(), here) and (there[0, 3:] == 0).all()


def test_places_and_bytes_of_nested_tensors(gpus):
    before = torch.cuda.memory_allocated(1)
    x = nested(32, 96)  # 128 x 4 numbers
    assert x.device == ONE and torch.cuda.memory_allocated(1) - before == 2048
    doubled = x * 2
    assert torch.cuda.memory_allocated(1) - before == 4096
    elsewhere = [doubled.to("cuda:0"), doubled.half(), doubled.cpu(), doubled.transpose(1, 2), *doubled.unbind()]
    assert [part.device for part in elsewhere] == [ZERO, ONE, CPU, ONE, ONE, ONE]
    assert all(torch.equal(part, row * 2) for part, row in zip(elsewhere[2].unbind(), rows(32, 96), strict=True))
    assert (
        torch.nested.nested_tensor(rows(2)).device == CPU and torch.nested.nested_tensor([], device=ONE).device == ONE
    )
    assert torch.nested.as_nested_tensor([row.cuda() for row in rows(2, 3)]).device == ZERO


def gradient(device):
    weight = torch.linspace(-1, 1, 12).reshape(3, 4).to(device).requires_grad_()
    F.linear(nested(2, 3, device=device), weight).softmax(-1).to_padded_tensor(0.5).square().sum().backward()
    return [weight.grad]


def attend(device):
    heads = [row.reshape(-1, 2, 2) for row in rows(2, 5)]
    x = torch.nested.nested_tensor(heads, device=device).transpose(1, 2)
    x = x.contiguous() if device == "cpu" else x  # which the CPU asks for, and no fused kernel of a GPU
    return [F.scaled_dot_product_attention(x, x, x).to_padded_tensor(0.0)]


def jagged(device):
    """What two sequences in one tensor come to, forward and backward. C++ took the wrapper to be on a real GPU."""
    torch.manual_seed(0)
    layer, norm = nn.Linear(4, 4).to(device), nn.LayerNorm(4).to(device)
    x = torch.arange(32.0).view(8, 4).to(device).requires_grad_()
    two = torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 3, 8], device=device))
    heads = two.detach().unflatten(-1, (2, 2)).transpose(1, 2)
    attended = F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(-2)
    out = norm(torch.relu(layer(two)))
    padded = torch.nested.to_padded_tensor(out, 0.0)
    (out.values().sum() + padded.square().sum()).backward()
    assert str(out.device) == device and out.is_cuda is (device != "cpu") and out.cpu().values().device == CPU
    return [attended.values(), padded, x.grad, layer.weight.grad]


@pytest.mark.parametrize("function", [gradient, attend, jagged])
def test_numbers_of_nested_tensors_are_the_cpus(gpus, function):
    there, here = function("cuda:1"), function("cpu")
    assert {tensor.device for tensor in there} == {ONE} and {tensor.device for tensor in here} == {CPU}
    assert all(torch.equal(one.cpu(), other) for one, other in zip(there, here, strict=True))


def test_dropout_draws_from_the_gpu(gpus):
    x, state, drawn = nested(8, 8), torch.get_rng_state(), []
    for _ in range(2):
        torch.cuda.manual_seed_all(3)
        drawn.append(F.dropout(x, 0.5).to_padded_tensor(0.0))
    assert torch.equal(*drawn) and torch.equal(torch.get_rng_state(), state)
