"""virtualgpu/timing/data/memory_bound.csv: how often each operation that is bound by memory moves its tensors, by what single kernels took.

    python -m tests.gpu.memory_table     writes it anew

Over the kernels of h100_profiled.csv and h100_kernels.csv that are one operation and last longer than their launches: the time beyond the
launches over that of the operation's bytes is its traffic; of those where that is more than SLOW, if they are many, the multiprocessors' cycles for
each number of the largest tensor. Each is the lower quartile by bytes, of kernels that fill the card: small ones wait for other things. What nobody
timed, or not with its tensors alike, has what its code says. A step is what a thread took for one of many images where it is all that is waited for.
"""

import csv
from collections import defaultdict
from pathlib import Path
from unittest import mock

import virtualgpu
from tests.gpu import kernels_of_a_card
from virtualgpu.timing import kernels, memory_bound, reductions

TABLE = Path(memory_bound.__file__).parent / "data" / "memory_bound.csv"
COLUMNS = (
    "operation",
    "traffic",
    "wide_traffic",
    "cycles",
    "step",
    "limit",
    "launches",
    "training",
    "copied",
    "elementwise",
    "model",
    "source",
)
NORMALIZATION, SOFTMAX = "Normalization.cuh", "SoftMax.cu"
SLOW = 1.15
# What the code of each operation says (aten/src/ATen/native and native/cuda): kernels and the like; and where it was not timed, its traffic
GIVEN: dict[str, dict] = {
    "native_batch_norm": {"model": "batch_norm", "traffic": 1.5, "training": 5, "source": NORMALIZATION},
    "_native_batch_norm_legit": {"model": "batch_norm", "traffic": 1.5, "training": 5, "source": NORMALIZATION},
    "_batch_norm_with_update": {"model": "batch_norm", "traffic": 1.5, "source": NORMALIZATION},
    "cudnn_batch_norm": {"model": "batch_norm", "traffic": 1.5, "training": 5, "source": NORMALIZATION},
    "native_batch_norm_backward": {
        "model": "batch_norm_backward",
        "traffic": 5 / 3,
        "launches": 2,
        "source": NORMALIZATION,
    },
    "batch_norm_backward": {"model": "batch_norm_backward", "traffic": 5 / 3, "launches": 2, "source": NORMALIZATION},
    "native_group_norm": {"launches": 3, "source": "group_norm_kernel.cu"},
    "native_group_norm_backward": {"launches": 5, "source": "group_norm_kernel.cu"},
    "native_layer_norm": {"model": "layer_norm", "copied": "0", "source": "layer_norm_kernel.cu"},
    "native_layer_norm_backward": {
        "model": "row_norm_backward",
        "launches": 2,
        "copied": "0 1",
        "source": "layer_norm_kernel.cu",
    },
    "_fused_rms_norm_backward": {"model": "row_norm_backward", "launches": 2, "source": "layer_norm_kernel.cu"},
    "_fused_rms_norm": {"model": "rms_norm", "source": "layer_norm_kernel.cu"},
    "_softmax": {"wide_traffic": 1.8, "limit": "softmax", "copied": "0", "source": SOFTMAX},
    "_log_softmax": {"like": "_softmax", "wide_traffic": 1.8, "limit": "softmax", "copied": "0", "source": SOFTMAX},
    "_softmax_backward_data": {
        "traffic": 2.0,
        "launches": 2,
        "source": f"{SOFTMAX}: gradient times result is a kernel of its own",
    },
    "_log_softmax_backward_data": {"wide_traffic": 1.2, "limit": "softmax", "copied": "0 1", "source": SOFTMAX},
    "max_pool2d_with_indices": {"source": "DilatedMaxPool2d.cu"},
    "max_pool2d_with_indices_backward": {"launches": 2, "source": "DilatedMaxPool2d.cu"},
    "avg_pool2d": {"source": "AveragePool2d.cu"},
    "avg_pool2d_backward": {"source": "AveragePool2d.cu"},
    "max_pool3d_with_indices": {"source": "DilatedMaxPool3d.cu"},
    "max_pool3d_with_indices_backward": {"launches": 2, "source": "DilatedMaxPool3d.cu"},
    "avg_pool3d": {"source": "AveragePool3d.cu"},
    "avg_pool3d_backward": {"launches": 2, "source": "AveragePool3d.cu"},
    "_adaptive_avg_pool2d": {"source": "AdaptiveAveragePooling.cu"},
    "_adaptive_avg_pool2d_backward": {"launches": 2, "source": "AdaptiveAveragePooling.cu"},
    "upsample_linear1d": {"step": 360, "cycles": 0.62, "launches": 2, "source": "UpSampleLinear1d.cu"},
    "upsample_linear1d_backward": {"step": 360, "cycles": 0.62, "launches": 2, "source": "UpSampleLinear1d.cu"},
    "upsample_bilinear2d": {"step": 400, "source": "UpSampleBilinear2d.cu"},
    "upsample_bilinear2d_backward": {"model": "bilinear_backward", "launches": 2, "source": "UpSampleBilinear2d.cu"},
    "upsample_bicubic2d": {"step": 950, "launches": 2, "source": "UpSampleBicubic2d.cu"},
    "upsample_bicubic2d_backward": {"launches": 2, "source": "UpSampleBicubic2d.cu"},
    "upsample_trilinear3d": {"step": 560, "source": "UpSampleTrilinear3d.cu"},
    "upsample_trilinear3d_backward": {"step": 890, "launches": 2, "source": "UpSampleTrilinear3d.cu"},
    **{
        f"{name}{dims}{way}": {"source": f"UpSampleNearest{dims}.cu", "like": f"upsample_nearest{dims}{way}"}
        for name in ("upsample_nearest", "_upsample_nearest_exact")
        for dims in ("1d", "2d", "3d")
        for way in ("", "_backward")
    },
    **{name: {"model": "reduction", "source": "Reduce.cuh"} for name in sorted(reductions.NAMES - reductions.NORMS)},
    **{name: {"model": "norm", "source": "Reduce.cuh"} for name in sorted(reductions.NORMS)},
    **{
        name: {"model": "looked_up", "source": "IndexKernelUtils.cu"} for name in ("embedding", "index_select", "index")
    },
    "nll_loss_forward": {"model": "written", "source": "NLLLoss2d.cu"},
    "nll_loss_backward": {"model": "written", "launches": 2, "source": "NLLLoss2d.cu"},
    "masked_fill": {"traffic": 2.0, "launches": 2, "elementwise": "yes", "source": "a copy, filled in place"},
    "masked_fill_": {"elementwise": "yes", "source": "IndexKernel.cu"},
    "where": {"elementwise": "yes", "source": "TensorCompare.cu"},
    "gelu": {"elementwise": "yes", "source": "ActivationGeluKernel.cu"},
    "silu": {"elementwise": "yes", "source": "ActivationSiluKernel.cu"},
    "native_dropout": {"elementwise": "yes", "source": "Dropout.cu"},
    "_to_copy": {"traffic": 1.0, "elementwise": "yes", "source": "Copy.cu"},
    "copy_": {"elementwise": "yes", "source": "Copy.cu"},
    "clone": {"elementwise": "yes", "source": "Copy.cu"},
    "index_add": {"cycles": 1.6, "launches": 2, "source": "Indexing.cu"},
    "index_add_": {"cycles": 1.6, "source": "Indexing.cu; 1.5 to 1.7, by atomic operations"},
    "scatter_add_": {"cycles": 2.8, "source": "ScatterGatherKernel.cu; 2.2 to 3.4, by atomic operations"},
    "scatter_add": {"cycles": 2.8, "launches": 2, "source": "ScatterGatherKernel.cu"},
    "cumsum": {"source": "ScanKernels.cpp"},
    "roll": {"source": "TensorTransformations.cu"},
    "cat": {"model": "joined", "source": "Shape.cu"},
    "stack": {"model": "joined", "source": "Shape.cu"},
    "constant_pad_nd": {"traffic": 1.6, "launches": 2, "source": "filled, then copied into"},
    "embedding_dense_backward": {
        "model": "embedding_backward",
        "launches": memory_bound.SORTING,
        "source": "EmbeddingBackwardKernel.cu",
    },
    "_embedding_bag_backward": {
        "model": "embedding_bag_backward",
        "launches": memory_bound.SORTING_BAGS,
        "source": "EmbeddingBag.cu",
    },
    "index_put": {"launches": 9, "source": "Indexing.cu"},
    "index_put_": {"launches": 8, "source": "Indexing.cu"},
    "_index_put_impl_": {"launches": 8, "source": "Indexing.cu"},
    "topk": {"launches": 4, "source": "TensorTopK.cu"},
    "sort": {"launches": 6, "source": "Sort.cu"},
    "nonzero": {"launches": 4, "source": "Nonzero.cu"},
    "select_backward": {"launches": 2, "source": "zeros, and a copy into them"},
    "slice_backward": {"launches": 2, "source": "zeros, and a copy into them"},
    "logsumexp": {"launches": 9, "source": "ReduceOps.cpp"},
    "multinomial": {"launches": 14, "source": "Distributions.cpp, with its checks"},
    "binary_cross_entropy_with_logits": {"traffic": 2.0, "launches": 5, "source": "Loss.cpp"},
    "randperm": {"launches": 12, "source": "Randperm.cu"},
    **{
        name: {"launches": 2, "source": "Loss.cpp: numbers, and their mean"}
        for name in ("mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy")
    },
}


def measured():
    """(what runs it, seconds) of each row of both tables that is made of operations bound by memory."""
    for row in kernels_of_a_card.rows():
        if row.family not in ("attention", "masked_attention", "product", "convolution", "sum", "batch_norm"):
            yield lambda row=row: kernels_of_a_card.call(row.family, row.settings).run, 1e-6 * row.fresh
    for family in kernels_of_a_card.IN_A_GRAPH:
        for make, us in kernels_of_a_card.calls_in_a_graph(family, "H100"):
            yield make, 1e-6 * us


def samples() -> dict[str, list[tuple[float, float, float]]]:
    """By operation, of single kernels: (traffic, cycles for each number, bytes)."""
    found = defaultdict(list)
    with virtualgpu.dry_run(1, like="H100"):
        card = virtualgpu.machine().gpus[0].kernels
        names = {id(kind): name for name, kind in memory_bound.KINDS.items()}
        for make, seconds in measured():
            run, asked = make(), []

            def note(card, kind, args, tensors, nbytes, asked=asked):
                numbers = max(tensor.numel() for tensor in tensors)
                asked.append((kind, nbytes, numbers, kind.elementwise and memory_bound.one_by_one(tensors) > 0))
                return 0.0

            with mock.patch.object(memory_bound, "seconds", note):
                run()
            if len(asked) != 1 or id(asked[0][0]) not in names or asked[0][3]:
                continue
            kind, nbytes, numbers, _ = asked[0]
            launches = GIVEN.get(names[id(kind)], {}).get("launches", 1) * card.spec.kernel
            busy = seconds - launches * (1 - kernels.STARTING * kind.elementwise)
            if busy > launches:
                bytes_alone = card.moving(nbytes, kernels.Kind(limit=kind.limit, launches=0))
                found[names[id(kind)]].append((busy / bytes_alone, busy * card.cycles / numbers, nbytes))
    return found


def lower_quartile(samples: list[tuple[float, float]]) -> float:
    """Of (value, weight)."""
    left = sum(weight for _, weight in samples) / 4
    for value, weight in sorted(samples):
        left -= weight
        if left <= 0:
            return value
    raise ValueError("no samples")


def rows() -> list[dict]:
    """Of the table, as text."""
    found, made = samples(), []
    for name, given in GIVEN.items():
        timed = found.get(given.get("like", name), [])
        row = dict.fromkeys(COLUMNS, "") | {"operation": name, "traffic": 1.0, "limit": "memory", "launches": 1} | given
        if timed and not given.get("model") and not given.keys() & {"traffic", "cycles"}:
            slow = [(cycles, nbytes) for traffic, cycles, nbytes in timed if traffic > SLOW]
            row["traffic"] = lower_quartile([(traffic, nbytes) for traffic, _, nbytes in timed])
            if 4 * len(slow) > len(timed):
                row["traffic"], row["cycles"] = min(1.0, row["traffic"]), lower_quartile(slow)
            row["source"] += f"; {len(timed)} kernels timed"
        made.append({key: f"{row[key]:.3g}" if isinstance(row[key], float) else str(row[key]) for key in COLUMNS})
    return made


def main() -> None:
    written = rows()
    with open(TABLE, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(written)


if __name__ == "__main__":
    main()
