# ruff: noqa: F403, F405
"""scaled_dot_product_attention: the kernel that a card takes, its numbers, its bytes, the layout of its result, and what its mask leaves."""

import itertools

import pytest
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from tests.virtualgpu.engine.tools import *
from tests.virtualgpu.rounded import RoundedProducts
from virtualgpu.engine.attention import efficient_takes_groups
from virtualgpu.timing.attention import causal_share

FLASH, EFFICIENT, CUDNN = "Flash", "Efficient", "Cudnn"


def inputs(device, dtype=SINGLE, heads=(4, 4), lengths=(48, 48), size=16):
    """Query and key, value [2, heads, length, size], as a model's Linear layers lay them out; the same numbers on every device."""
    torch.manual_seed(1)
    made = [torch.randn(2, length, n, size).to(dtype).transpose(1, 2) for n, length in zip(heads, lengths, strict=True)]
    made.append(torch.randn(2, lengths[1], heads[1], size).to(dtype).transpose(1, 2))
    return [tensor.to(device).requires_grad_() for tensor in made]


def kernel_of(out) -> str | None:
    """ "Flash", "Efficient", "Cudnn"; None for plain operations."""
    nodes = [out.grad_fn, *(node for node, _ in out.grad_fn.next_functions)]  # a result that was cut has one more
    names = [node.name() for node in nodes if node is not None and "ScaledDotProduct" in node.name()]
    return names[0].removeprefix("ScaledDotProduct").partition("Attention")[0] if names else None


def attend(device, *args, dtype=SINGLE, mask=None, **options):
    """(kernel, [output, gradients of query, key and value], all on the CPU)."""
    shape = {name: options.pop(name) for name in ("heads", "lengths", "size") if name in options}
    leaves = inputs(device, dtype, **shape)
    torch.manual_seed(5)
    out = F.scaled_dot_product_attention(*leaves, None if mask is None else mask.to(device), *args, **options)
    weights = torch.arange(out.shape[-1], device=out.device).to(dtype).expand(out.shape)
    grads = torch.autograd.grad(out, leaves, weights)
    return kernel_of(out), [tensor.detach().cpu() for tensor in (out, *grads)]


@pytest.mark.parametrize("like", ["T4", "A100", "H100"])
def test_numbers_and_gradients_are_the_cpus_with_dropout_too(like):
    """Where a card takes plain operations and the CPU a kernel of its own, they differ in the last bit: see the next test."""
    with virtualgpu.gpus(1, like=like):
        for dtype, dropout, causal, (size, heads) in itertools.product(
            (SINGLE, HALF, BRAIN), (0.0, 0.25), (False, True), ((16, (4, 4)), (16, (4, 2)), (12, (4, 4)))
        ):
            case = {"dropout_p": dropout, "is_causal": causal, "dtype": dtype, "size": size, "heads": heads}
            with RoundedProducts():
                _, expected = attend("cpu", **case, enable_gqa=True)
            kernel, results = attend("cuda", **case, enable_gqa=True)
            if kernel is None:  # a Turing card in half precision, or PyTorch 2.11 with shared heads in single
                turing = like == "T4" and (dtype is BRAIN or (dtype is HALF and size == 12))
                assert turing or (heads == (4, 2) and not efficient_takes_groups())
            else:
                assert all(map(torch.equal, results, expected)), case


def test_nan_is_learned_from_with_dropout_too():
    """A pipeline's stage learns its shapes from memory that nobody has written: what is computed a second time is compared, nan with nan."""
    with virtualgpu.gpus(1, like="A100"):
        leaves = inputs("cuda")
        with torch.no_grad():
            leaves[0][0, 0, 0, 0] = torch.nan
        out = F.scaled_dot_product_attention(*leaves, dropout_p=0.5)
        grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
    assert kernel_of(out) is not None and grads[0][0, 0, 0].isnan().all() and not grads[0][1].isnan().any()


PLAIN_CASES = {
    "nothing": {},
    "dropout": {"dropout_p": 0.25},
    "causal": {"is_causal": True},
    "shared heads": {"heads": (4, 2), "enable_gqa": True},
    "negative scale": {"scale": -2.0},
    "mask": {"mask": torch.arange(48) < 40, "dropout_p": 0.5},
    "bias": {"mask": torch.arange(48.0).expand(4, 48, 48)},
}


@pytest.mark.parametrize("dtype", [SINGLE, BRAIN])
@pytest.mark.parametrize("name", PLAIN_CASES)
def test_plain_operations_one_by_one(name, dtype):
    """Those of _scaled_dot_product_attention_math, whose function itself the CPU calls."""
    with sdpa_kernel(SDPBackend.MATH):
        expected = attend("cpu", dtype=dtype, **PLAIN_CASES[name])[1]
        with virtualgpu.gpus(1):
            kernel, results = attend("cuda", dtype=dtype, **PLAIN_CASES[name])
    assert kernel is None and all(map(torch.equal, results, expected))


@pytest.mark.parametrize(("kind", "learns"), [("bool", False), ("float", False), ("float", True)])
@pytest.mark.parametrize("keys", [48, 41])
def test_masks(kind, keys, learns):
    """As bool, and as what is added to the scores; the memory-efficient kernel has rows of a multiple of 8."""
    torch.manual_seed(3)
    mask = torch.rand(2, 1, 48, keys) < 0.7 if kind == "bool" else torch.randn(2, 1, 48, keys)
    found = []
    for device in ("cpu", "cuda"):
        with virtualgpu.gpus(1, like="A100") if device == "cuda" else torch.enable_grad():
            leaves = [*inputs(device, lengths=(48, keys)), mask.to(device).detach().requires_grad_(learns)]
            out = F.scaled_dot_product_attention(*leaves)
            grads = torch.autograd.grad(out.square().sum(), leaves if learns else leaves[:3])
            assert device == "cpu" or kernel_of(out) == EFFICIENT
            found.append([tensor.detach().cpu() for tensor in (out, *grads)])
    assert all(map(torch.equal, *found))


# MiB at its peak: of a mask that is copied into rows of 48 numbers, or made of bool, before it is expanded to all heads and images
COPIES = table("""
    A100 | BRAIN | 1, 1, 1024, 48 | BRAIN | 0.0
    A100 | BRAIN | 1, 1, 1024, 41 | BRAIN | 0.09375
    A100 | BRAIN | 1024, 41 | BRAIN | 0.09375
    A100 | SINGLE | 1, 1, 1024, 41 | SINGLE | 0.1875
    A100 | SINGLE | 1, 1, 1024, 48 | BOOL | 0.1875
    H100 | BRAIN | 1, 1, 1024, 48 | BOOL | 0.09375
    # cuDNN takes rows as they are
    H100 | BRAIN | 1, 1, 1024, 41 | BRAIN | 0.0
""")


@pytest.mark.parametrize("like, dtype, over, kind, copied", COPIES)
def test_a_mask_is_copied_before_it_is_expanded(like, dtype, over, kind, copied):
    """preprocess_mask and convert_boolean_attn_mask in attention.cpp; the kernels of an H100, PyTorch 2.11, show the same order."""
    dtype, over, kind = map(eval, (dtype, over, kind))
    with virtualgpu.dry_run(1, like=like):
        query, key = whole(16, 8, 1024, 32, dtype=dtype), whole(16, 8, over[-1], 32, dtype=dtype)
        fitting = whole(*over[:-1], 48, dtype=dtype)[..., : over[-1]]  # its rows begin where they should
        mask = whole(*over, dtype=kind)
        peaks = [
            used(lambda m=m: F.scaled_dot_product_attention(query, key, key, m))[1][1] for m in (fitting, fitting, mask)
        ]
    assert 0 <= peaks[2] - peaks[1] - float(copied) * MIB <= 1024  # two numbers beside, of 512 bytes each


def test_the_gradient_of_a_mask_is_added_up_before_it_is_cut():
    """Over the images that share it: what is cut and filled up is no larger than the mask."""
    with virtualgpu.dry_run(1, like="H100"):
        leaves = [torch.zeros(64, 4, 49, 32, device="cuda", dtype=BRAIN, requires_grad=True) for _ in range(3)]
        mask = torch.zeros(1, 4, 49, 49, device="cuda", dtype=BRAIN, requires_grad=True)
        out = F.scaled_dot_product_attention(*leaves, mask)
        with virtualgpu.recording() as spans:
            out.backward(torch.zeros_like(out))
        names = [span.name for span in spans]
    assert kernel_of(out) == EFFICIENT
    assert names.index("sum") < names.index("slice_backward") < names.index("constant_pad_nd")


# Read off sdp_utils.cpp; of an H100 dropout and sizes of 160 and 192 were measured (PyTorch 2.11)
CHOICES = table("""
    T4 | SINGLE | {} | EFFICIENT
    T4 | HALF | {} | EFFICIENT
    # no kernel of a Turing card takes bfloat16, and 12 is no multiple of 8
    T4 | BRAIN | {} | None
    T4 | HALF | {"size": 12} | None
    A100 | HALF | {} | FLASH
    A100 | BRAIN | {"dropout_p": 0.1, "is_causal": True} | FLASH
    # filled up to 16
    A100 | BRAIN | {"size": 12} | FLASH
    A100 | SINGLE | {} | EFFICIENT
    A100 | SINGLE | {"size": 10} | None
    A100 | DOUBLE | {} | None
    A100 | BRAIN | {"mask": torch.ones(48, 48, dtype=BOOL)} | EFFICIENT
    A100 | BRAIN | {"is_causal": True, "lengths": (48, 64)} | EFFICIENT
    A100 | BRAIN | {"size": 264} | EFFICIENT
    H100 | BRAIN | {} | CUDNN
    H100 | BRAIN | {"dropout_p": 0.1} | CUDNN
    H100 | BRAIN | {"size": 160} | CUDNN
    H100 | HALF | {"size": 192} | CUDNN
    H100 | HALF | {"size": 264} | EFFICIENT
    B200 | HALF | {"size": 160} | FLASH
    # too little shared memory to learn
    RTX 4090 | BRAIN | {"size": 256, "dropout_p": 0.5} | EFFICIENT
""")


@pytest.mark.parametrize("like, dtype, options, expected", CHOICES)
def test_which_kernel_a_card_takes(like, dtype, options, expected):
    for run in MODES:
        with run(1, like=like):
            assert attend("cuda", dtype=eval(dtype), **eval(options))[0] == eval(expected)


def test_what_the_program_chooses(gpus):
    leaves = inputs("cuda", HALF)
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION], set_priority=True):
        assert kernel_of(F.scaled_dot_product_attention(*leaves)) is None
    refused = pytest.warns(UserWarning, match=r"Flash attention only supports capabilities 8.0 to 12.1, not 7.5")
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), refused, pytest.raises(RuntimeError, match="No available kernel"):
        F.scaled_dot_product_attention(*leaves)
    params = torch.backends.cuda.SDPAParams(*leaves, None, 0.0, False, False)
    assert torch.backends.cuda.can_use_efficient_attention(params)
    assert not torch.backends.cuda.can_use_flash_attention(params)
    assert torch._fused_sdp_choice(*leaves) == SDPBackend.EFFICIENT_ATTENTION.value


REFUSED = table("""
    by_plain(*inputs("cuda", heads=(4, 3)), enable_gqa=True) | Number of heads in key and value must divide
    by_plain(q, k, v, ones(48, 48, dtype=BOOL), is_causal=True) | Explicit attn_mask should not be set when is_causal=True
    F.scaled_dot_product_attention(q, k.cpu(), v) | same device type, but got query.device: cuda:0 key.device: cpu
    F.scaled_dot_product_attention(q, k.half(), v) | same dtype
    torch.ops.aten._scaled_dot_product_flash_attention(q, k, v) | only support fp16 and bf16
    torch.ops.aten._scaled_dot_product_flash_attention(*inputs("cpu", HALF)) | _scaled_dot_product_flash_attention
""")


def by_plain(*args, **options):
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*args, **options)


@pytest.mark.parametrize("call, message", REFUSED)
def test_what_is_refused(call, message):
    with virtualgpu.gpus(1, like="A100"), pytest.raises((RuntimeError, NotImplementedError), match=message):
        eval(call, globals(), dict(zip("qkv", inputs("cuda"), strict=True)))


def test_inputs_without_a_batch(gpus):
    """As on the CPU; PyTorch 2.15 gives them a batch of one, and so a fused kernel, where 2.11 takes plain operations."""

    def attend(*leaves):
        return F.scaled_dot_product_attention(*leaves, ones(4, 48, 48, dtype=BOOL, device=leaves[0].device).tril())

    leaves = [tensor.detach()[0] for tensor in inputs("cpu")]
    assert all(map(torch.equal, gradients(attend, *leaves), gradients(attend, *leaves, device="cuda")))


def test_autocast_casts_before_the_kernel_is_chosen():
    with virtualgpu.gpus(1, like="A100"), torch.autocast("cuda", dtype=BRAIN):
        leaves = inputs("cuda")
        out = F.scaled_dot_product_attention(*leaves)
        assert out.dtype is BRAIN and kernel_of(out) == FLASH
        assert torch.autograd.grad(out.sum(), leaves)[0].dtype is SINGLE


def bytes_and_seconds(like, dtype, **options):
    """What one attention leaves on the GPU, its peak with the backward pass, and the simulated seconds of both."""
    leaves = inputs("cuda", dtype, lengths=(512, 512), size=64)
    start = figures()[2]
    torch.cuda.reset_peak_memory_stats()
    begin = torch.cuda.memory_allocated()
    out = F.scaled_dot_product_attention(*leaves, **options)
    kept = torch.cuda.memory_allocated() - begin
    out.sum().backward()
    _, peak, end = figures()
    return kept, peak - begin, end - start


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize(("like", "dtype"), [("A100", BRAIN), ("A100", SINGLE), ("T4", HALF), ("H100", BRAIN)])
def test_no_scores_on_the_gpu(like, dtype, dropout):
    """[2, 4, 512, 512] scores would be 4 MiB or more; the output is 512 KiB, or twice that. In a dry run the same."""
    with virtualgpu.gpus(1, like=like):
        kept, peak, seconds = bytes_and_seconds(like, dtype, dropout_p=dropout)
    out = 2 * 512 * 4 * 64 * dtype.itemsize
    sums = 2 * 4 * 512 * 4
    seeds = 0 if dtype is SINGLE or like == "T4" else 2 * 512  # the memory-efficient kernel's stay with the host
    assert kept == out + sums + seeds
    assert peak < kept + 9 * out
    with virtualgpu.dry_run(1, like=like):
        assert bytes_and_seconds(like, dtype, dropout_p=dropout) == (kept, peak, pytest.approx(seconds, rel=1e-9))


@pytest.mark.parametrize("dtype", [SINGLE, DOUBLE])
def test_dropout_of_plain_operations_keeps_one_byte_for_each_score(dtype):
    """Beside what it leaves of them. T5 of transformers on an H100 (its bias learns, so no fused kernel takes it) showed it."""
    with virtualgpu.dry_run(1, like="H100"), sdpa_kernel(SDPBackend.MATH):
        # the first leaves cuBLAS its workspace, up to PyTorch 2.14
        _, without, kept = (bytes_and_seconds("H100", dtype, dropout_p=dropout)[0] for dropout in (0.0, 0.0, 0.1))
    scores = 2 * 4 * 512 * 512
    assert kept - without == scores * dtype.itemsize + scores


def test_an_unaligned_bias_is_padded_once_for_all_sequences():
    """As it is, before it is expanded, to rows of a multiple of 8 numbers; a row of such a width whose strides are none, by 8 more. The
    windows of Swin, MaxViT and CoAtNet have biases of 49 x 49 and 196 x 196, which an H100 (PyTorch 2.11) keeps once for each layer."""
    with virtualgpu.dry_run(1, like="H100"):
        for keys, bias, padded in (
            (49, torch.zeros(4, 48, 49, device="cuda"), 56),
            (52, torch.zeros(1, 4, 48, 52, device="cuda"), 56),
            (48, torch.zeros(4, 48, 49, device="cuda")[..., :48], 56),
            (56, torch.zeros(4, 48, 56, device="cuda"), 0),
            (56, torch.zeros(48, 56, device="cuda"), 0),
        ):
            leaves = inputs("cuda", lengths=(48, keys))
            before = torch.cuda.memory_allocated()
            out = F.scaled_dot_product_attention(*leaves, bias.requires_grad_())
            assert kernel_of(out) == EFFICIENT
            kept = torch.cuda.memory_allocated() - before - out.nbytes - 2 * 4 * 64 * 4  # and the sums of 64 rows
            assert kept == 4 * 48 * padded * 4, keys
            del out  # what it keeps is given back


def test_a_mask_of_bool_becomes_a_bias_in_one_operation():
    """convert_boolean_attn_mask takes where, and two numbers: no second mask, and nothing filled again."""
    with virtualgpu.dry_run(1, like="H100"):
        leaves, mask = inputs("cuda", HALF), torch.ones(2, 1, 1, 48, dtype=torch.bool, device="cuda")
        with virtualgpu.recording() as spans:
            out = F.scaled_dot_product_attention(*leaves, mask.expand(2, 1, 48, 48))
    assert kernel_of(out) == CUDNN
    assert [span.name for span in spans][:3] == ["scalar_tensor", "scalar_tensor", "where"]


def test_the_memory_efficient_kernels_result_lies_by_tokens():
    """So MultiheadAttention, whose query lies otherwise, copies it once more."""
    kept = {}
    for like, dtype in (("T4", SINGLE), ("A100", HALF)):
        with virtualgpu.dry_run(1, like=like):
            query = torch.randn(3, 2, 4, 16, device="cuda", dtype=dtype).permute(1, 2, 0, 3).requires_grad_()
            out = F.scaled_dot_product_attention(query, query, query)
            kept[kernel_of(out)] = out.stride(), F.scaled_dot_product_attention(*[query.contiguous()] * 3).stride()
    assert kept[EFFICIENT] == ((192, 16, 64, 1),) * 2
    assert kept[FLASH] == ((64, 16, 128, 1), (192, 48, 16, 1))
    with virtualgpu.dry_run(1, like="T4"):
        layer, x = nn.MultiheadAttention(64, 4, device="cuda"), torch.randn(128, 4, 64, device="cuda")
        with virtualgpu.recording() as spans:
            layer(x, x, x, need_weights=False)
        names = [span.name for span in spans]
    at = names.index("_scaled_dot_product_efficient_attention")
    assert "clone" in names[at:]


def test_a_causal_mask_saves_what_it_hides():
    assert causal_share(128, 128) == 1.0  # one tile
    assert causal_share(1024, 1024) == pytest.approx(0.5625)
    assert causal_share(8192, 8192) == pytest.approx(0.5, abs=0.01)
    with virtualgpu.dry_run(1, like="A100"):
        full, half = (time_of(4096, causal) for causal in (False, True))
    assert half / full == pytest.approx(causal_share(4096, 4096), rel=0.02)


def time_of(length, causal):
    leaves = [torch.randn(1, 16, length, 128, device="cuda", dtype=HALF, requires_grad=True) for _ in range(3)]
    with virtualgpu.recording() as spans:
        F.scaled_dot_product_attention(*leaves, is_causal=causal).sum().backward()
    return sum(span.end - span.start for span in spans if "attention" in span.name)


def test_dropout_is_the_same_again_where_saved_tensors_went_to_the_host_and_back(gpus):
    def gradient(around, attention=F.scaled_dot_product_attention):
        leaves = inputs("cuda")
        torch.manual_seed(7)
        with around:
            out = attention(*leaves, None, 0.3)
        torch.rand(5, device="cuda")  # others draw before the backward pass
        return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]

    expected = gradient(torch.enable_grad())
    moved = gradient(torch.autograd.graph.save_on_cpu())
    again = gradient(
        torch.enable_grad(), lambda *args: checkpoint(F.scaled_dot_product_attention, *args, use_reentrant=False)
    )
    assert all(map(torch.equal, moved, expected)) and all(map(torch.equal, again, expected))


@pytest.mark.parametrize("dry", [False, True])
def test_a_layer_that_only_infers_takes_the_time_of_its_products(dry):
    """In evaluation PyTorch makes one operation of a whole TransformerEncoderLayer, and of MultiheadAttention."""
    x = torch.ones(4, 256, 512)
    options = {"clock": "datasheet"}  # where a product's time is its FLOPs'
    with virtualgpu.dry_run(1, **options) if dry else virtualgpu.gpus(1, **options):
        modules = [
            nn.TransformerEncoderLayer(512, 4, 2048, batch_first=True),
            nn.MultiheadAttention(512, 4, batch_first=True),
        ]
        for module, name in zip(
            modules, ["_transformer_encoder_layer_fwd", "_native_multi_head_attention"], strict=True
        ):
            module, inputs = module.to("cuda").eval(), [x.to("cuda")] * (1 if name.endswith("fwd") else 3)
            with torch.no_grad(), virtualgpu.recording() as spans:
                module(*inputs)
                quick = {span.name: span.end - span.start for span in spans}
                spans.clear()
                torch.backends.mha.set_fastpath_enabled(False)
                try:
                    module(*inputs)
                finally:
                    torch.backends.mha.set_fastpath_enabled(True)
            products = sum(span.end - span.start for span in spans if "mm" in span.name or "attention" in span.name)
            assert quick[name] == pytest.approx(products, rel=0.2)  # these read and write more in between
