"""What an operation costs the host beside others: some look for an algorithm, ask for workspaces or start several kernels.

A weight is a share of `hardware.hosts.Host.forward` or `.backward`, that of the average operation. All were measured beside an H100 (a
virtual machine with 16 processors of a Xeon of Sapphire Rapids, PyTorch 2.11, 2026-11): chains of 40 alike, tiny, launched on an empty
queue, in microseconds over the 20 and 16 that the average cost there (hosts.toml's "2026" is of operations in mixed order). What autograd
does with the gradient of a parameter is in the weight of the operation that makes it.
"""

from typing import NamedTuple


class Weight(NamedTuple):
    """Of an operation in a forward pass, and in a backward pass."""

    forward: float
    backward: float


def derivative(backward: float) -> Weight:
    """Of an operation of backward passes. One of which autograd takes notes (create_graph) is timed as forward, of 20 us for 16."""
    return Weight(0.8 * backward, backward)


AVERAGE = Weight(1.0, 1.0)
# A node of the backward pass costs C++ some 8 us, and each operation that it calls 8: of two to six of them, 0.45 to 0.55 of as many nodes
FURTHER = 0.5
ELEMENTWISE = Weight(0.8, 1.0)  # 15 to 18 us, and 14 to 17
PRODUCT = Weight(1.2, 2.0)  # linear without bias: 21 to 25, and 63 to 69 for two products and a transpose
CONVOLUTION = Weight(1.6, 4.1)  # 30 to 35, and 62 to 78
WEIGHTS = {
    "mm": PRODUCT,
    "bmm": PRODUCT,
    "addmm": PRODUCT,
    "baddbmm": PRODUCT,
    "convolution": CONVOLUTION,
    "_convolution": CONVOLUTION,
    "convolution_backward": derivative(CONVOLUTION.backward),
    "native_batch_norm": Weight(2.2, 1.0),  # 54 to 60 with the counter of batches
    "_native_batch_norm_legit": Weight(2.2, 1.0),
    "_batch_norm_with_update": Weight(2.2, 1.0),
    "native_batch_norm_backward": derivative(2.5),  # 36 to 42
    "native_layer_norm": Weight(1.1, 1.0),  # 18 to 27
    "native_layer_norm_backward": derivative(2.2),  # 34
    "_fused_rms_norm": Weight(0.9, 1.0),  # 16 to 22
    "_fused_rms_norm_backward": derivative(1.8),  # 28
    "native_group_norm": Weight(2.5, 1.0),  # 47 to 53
    "native_group_norm_backward": derivative(4.0),  # 63
    "_scaled_dot_product_flash_attention": Weight(1.35, 1.0),  # 24 to 30, without the two views around it
    "_scaled_dot_product_efficient_attention": Weight(1.35, 1.0),
    "_scaled_dot_product_cudnn_attention": Weight(1.35, 1.0),
    "_scaled_dot_product_flash_attention_backward": derivative(3.8),  # 59 to 98, with three sums of gradients
    "_scaled_dot_product_efficient_attention_backward": derivative(3.8),
    "_scaled_dot_product_cudnn_attention_backward": derivative(3.8),
    "_softmax": Weight(0.7, 1.0),  # 11 to 16
    "_softmax_backward_data": derivative(1.3),  # 20
    "max_pool2d_with_indices_backward": derivative(1.4),  # 22
    "_to_copy": Weight(0.6, 0.7),  # of autocast: 8 to 14, and 4 to 11
    "threshold_backward": derivative(1.2),  # 16 to 20
    "_cudnn_rnn": Weight(7.5, 1.0),  # a layer of eight steps: 127 to 190, and 406 to 531
    "_cudnn_rnn_backward": derivative(29.0),
    # a cell: 98 and 109 with two products of 24; 241 and 269 with their derivatives, and the sums that are gradients of biases
    "_thnn_fused_gru_cell": Weight(2.6, 1.0),
    "_thnn_fused_gru_cell_backward": derivative(5.0),
    "_thnn_fused_lstm_cell": Weight(3.0, 1.0),
    "_thnn_fused_lstm_cell_backward_impl": derivative(6.3),
    # C++ calls them one after the other
    "logsumexp": Weight(1 + 8 * FURTHER, 1 + 8 * FURTHER),
    "multinomial": Weight(1 + 13 * FURTHER, 1.0),
    "binary_cross_entropy_with_logits": Weight(1 + 4 * FURTHER, 1.0),
}


# What a program says of its tensors, and no kernel runs for: 4.6 to 5.7 us, and 5.7. Not among them: `view`, `t`, `expand`, `slice` and
# `detach`, which linear, matmul, autograd and DDP call by the thousand in C++ (`slice` for each input of a `cat` in its backward pass): these
# are in the weight of what calls them.
VIEW = Weight(0.25, 0.35)
VIEWS = {"transpose", "permute", "unsqueeze", "squeeze", "select", "split", "split_with_sizes", "unbind"}

# Of a list of tensors beside one (10 us), and what an optimizer's step costs in Python that works on lists, in operations of an optimizer:
# once, for each parameter, and for each count of steps that it keeps on the CPU. SGD and AdamW, foreach and fused, of 10 to 400 tensors:
# 45 to 130 us, 2 to 3 us for each, and 5 more for each of AdamW's counts.
OF_LIST = Weight(0.5, 0.5)
STEP = 5.0, 0.25, 0.4

# nn.DataParallel, and the share of an operation for which Python's lock is held: of 15 networks of torchvision without gradients, float16,
# 12 images a GPU, one GPU against two to four of an A100-SXM4, a TITAN RTX and an RTX 2080 Ti (ryujaehun/pytorch-gpu-benchmark, 2020-21).
# In operations of that host, by least squares over all 135, times are 0.52 x GPUs x operations + 0.87 x tensors that are broadcast
# + 0.80 x GPUs x modules that are replicated; half of them within 5 %, 98 % within 15. tests/accuracy/data_parallel.py judges training.
LOCKED, BROADCAST, REPLICATED = 0.52, 0.87, 0.80
UNRECORDED = 0.8  # without autograd's notes: the median of 146 chains beside H100s, 0.73 to 0.89 for half of them
EVALUATED = Weight(1.4, 1.0)  # batch norm that evaluates: 17 to 30, without autograd's notes


def of_view(name: str) -> Weight | None:
    """Of the view of that name; None for one that costs nothing beside what calls it."""
    return VIEW if name in VIEWS else None


def of(name: str, pointwise: bool, launches: int = 1) -> Weight:
    """Of the operation of that name. launches: its kernels; of what was not measured, each beyond the first costs a bare launch (4 us)."""
    if name in WEIGHTS:
        return WEIGHTS[name]
    first, more = ELEMENTWISE if pointwise else AVERAGE, launches - 1
    return first if not more else Weight(first.forward + 0.2 * more, first.backward + 0.25 * more)
