"""autocast("cuda"), operation by operation: CUDA's lists against PyTorch's own, the dtype and the numbers of each."""

import contextlib
import re
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import virtualgpu
from tests.virtualgpu.rounded import RoundedProducts
from tests.virtualgpu.torch_api.autocast_samples import CUDA_ALONE, SAMPLES
from tests.virtualgpu.torch_api.autocast_tools import (
    BF16,
    F16,
    F32,
    F64,
    arguments,
    as_pytorch_does,
    autocast_gpus,
    cases,
    cast,
    casts_in,
    equal,
    fake,
    kinds,
    on,
)
from virtualgpu.torch_api import autocast as lists
from virtualgpu.torch_api.autocast import operation, registered, rules


@pytest.fixture(autouse=True)
def gpus(monkeypatch, pytorchs):
    with autocast_gpus(monkeypatch) as off:
        yield off


@pytest.fixture(scope="module")
def pytorchs():
    """What PyTorch's own kernels for AutocastCUDA give, on fake tensors that say they are CUDA's: the dtypes of results, and of casts."""
    found, casts = {}, {}
    for name, dtype in cases():
        made = arguments(name, dtype)
        found[name, dtype] = as_pytorch_does(lambda name=name, made=made: kinds(operation(name)(*fake(made))))
        casts[name, dtype] = as_pytorch_does(
            lambda name=name, made=made: casts_in(lambda: operation(name)(*fake(made)))
        )
    return found, casts


# -- the lists


def test_lists_name_what_pytorch_casts():
    ours = [*lists.LOWER_PRECISION_FP, *lists.FP32, *lists.FP32_SET_OPT_DTYPE, *lists.FP32_APPEND_DTYPE, *lists.PROMOTE]
    ours += [*lists.BANNED, *lists.CUDNN_RNN]
    assert len(ours) == len(set(ours))
    theirs = registered("AutocastCUDA")
    assert theirs - set(ours) == set() and len(theirs) > 110
    later = {"linalg_matrix_sqrth", "rms_norm", "_cudnn_rnn"}  # of some versions, or of CUDA wheels alone
    assert {name for name in set(ours) - theirs if "imname" not in name and "names" not in name} <= later


def test_each_list_is_that_of_pytorchs_header():
    header = Path(torch.__file__).parent / "include/ATen/autocast_mode.h"
    if not header.exists():
        pytest.skip("this PyTorch comes without its headers")
    text = header.read_text()
    for name in ("LOWER_PRECISION_FP", "FP32", "FP32_SET_OPT_DTYPE", "PROMOTE"):
        body = re.search(rf"#define AT_FORALL_{name}\(_\)((?:.*\\\n)*.*)", text)[1]
        theirs = {".".join(re.findall(r"\w+", entry)) for entry in re.findall(r" _\(([^)]*)\)", body)}
        assert len(theirs) > 10 and theirs <= set(getattr(lists, name)), name
    appended = set(re.findall(r'"(norm\.\w+)"', text))
    assert appended <= set(lists.FP32_APPEND_DTYPE)


def test_samples_cover_every_list():
    listed = {
        *lists.LOWER_PRECISION_FP,
        *lists.FP32,
        *lists.FP32_SET_OPT_DTYPE,
        *lists.FP32_APPEND_DTYPE,
        *lists.PROMOTE,
    }
    named_dimensions = {name for name in listed if "imname" in name or "names" in name}
    assert set(SAMPLES) == listed - named_dimensions - CUDA_ALONE


# -- each operation


def expected(name, dtype):
    """The rule, written again: the dtype in which an operation runs."""
    if name in lists.LOWER_PRECISION_FP:
        return F16
    return dtype if name in lists.PROMOTE else F32


@pytest.mark.parametrize("dry", [False, True])
def test_results_have_the_dtypes_of_the_rule(dry, pytorchs):
    wrong, compared, (theirs, _) = {}, 0, pytorchs
    for name, dtype in cases():
        if dry and name.startswith(
            "_convolution"
        ):  # scripts alone call these, and PyTorch 2.11 has no meta kernel for them
            continue
        made = arguments(name, dtype)
        with virtualgpu.dry_run() if dry else contextlib.nullcontext():
            made = fake(made) if dry else on(made)
            with torch.autocast("cuda"):
                out = kinds(operation(name)(*made))
        compared += theirs[name, dtype] is not None
        if {*out} != {expected(name, dtype)} or theirs[name, dtype] not in (None, out):
            wrong[name, dtype] = out, theirs[name, dtype]
    assert wrong == {} and compared > 200


def test_casts_are_those_of_pytorch(pytorchs):
    _, theirs = pytorchs
    others = {
        "softmax.int",
        "log_softmax.int",
        "scaled_dot_product_attention",
    }  # of other kernels: CUDA's softmax casts in itself
    different, compared = {}, 0
    for name, dtype in cases():
        made = on(arguments(name, dtype))
        with torch.autocast("cuda"):
            ours = casts_in(lambda name=name, made=made: operation(name)(*made))
        compared += bool(theirs[name, dtype])
        if name not in others and theirs[name, dtype] not in (None, ours):
            different[name, dtype] = ours, theirs[name, dtype]
    assert different == {} and compared > 80


def test_numbers_equal_casts_by_hand():
    different = []
    for name, dtype in cases():
        made = arguments(name, dtype)
        with torch.autocast("cuda"):
            ours = operation(name)(*on(made))
        by_hand = (
            cast(made, F16) if name in lists.LOWER_PRECISION_FP else cast(made, F32) if name in lists.FP32 else made
        )
        by_hand += {"norm.Scalar": [2], "norm.ScalarOpt_dim": [False]}.get(name, [])
        options = {"dtype": F32} if name in {*lists.FP32_SET_OPT_DTYPE, *lists.FP32_APPEND_DTYPE} else {}
        target = operation(lists.FP32_APPEND_DTYPE.get(name, name))
        with RoundedProducts():
            theirs = target(*by_hand, **options)
        if name == "scaled_dot_product_attention":  # which rounds in other places; bit for bit in engine/test_attention
            assert torch.allclose(ours.cpu().float(), theirs.float(), atol=1e-3)
        elif not equal(ours, theirs):
            different.append((name, dtype))
    assert different == []


def test_a_given_dtype_is_kept():
    x = torch.rand(4, device="cuda", dtype=F16)
    with torch.autocast("cuda"):
        assert kinds([x.softmax(0, dtype=F16), x.sum(dtype=F64), x.cumsum(0, dtype=F16)]) == [F16, F64, F16]


def test_float64_and_integers_stay():
    x, n = torch.rand(3, 3, device="cuda", dtype=F64), torch.arange(3, device="cuda")
    with torch.autocast("cuda"):
        assert kinds([x @ x, x.exp(), x.softmax(0), x.norm(), n.sum()]) == [F64] * 4 + [torch.int64]


def test_promotion_takes_the_widest():
    half, single = (torch.rand(3, device="cuda", dtype=dtype) for dtype in (F16, F32))
    with torch.autocast("cuda"):
        mixed = [torch.dot(half, single), torch.addcmul(single, half, half), torch.cat([half, single])]
        assert kinds([*mixed, torch.dot(half, half)]) == [F32, F32, F32, F16]
        with pytest.raises(RuntimeError, match="Unexpected floating ScalarType in at::autocast::prioritize"):
            torch.dot(half, half.to(BF16))


def test_binary_cross_entropy_is_refused_in_pytorchs_words():
    x = torch.rand(3)
    with pytest.raises(RuntimeError) as theirs:
        key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)
        torch.ops.aten.binary_cross_entropy.default.redispatch(key, x, x)
    with torch.autocast("cuda"):
        with pytest.raises(RuntimeError, match="unsafe to autocast") as ours:
            F.binary_cross_entropy(x.cuda(), x.cuda())
        assert F.binary_cross_entropy(x, x).dtype is F32  # the CPU's own is not
    assert str(ours.value) == str(theirs.value)


def test_an_operation_without_a_known_rule_is_refused(monkeypatch):
    monkeypatch.setattr(lists, "FP32", tuple(name for name in lists.FP32 if name != "exp"))
    op, _, rule = rules.__wrapped__()["exp"]  # they are made once
    with pytest.raises(NotImplementedError, match=r"what autocast does to aten::exp in this version"):
        rule(op)((torch.rand(3, device="cuda"),), {})
    assert rule(op)((1,), {}) == ((1,), {})
