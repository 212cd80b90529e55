"""flex_attention's gradient: PyTorch traces what the reader does to a score, with fake tensors, to differentiate it."""

import functools

from virtualgpu import _compat
from virtualgpu.engine.machine import Machine
from virtualgpu.patches.registry import Patches


def install(machine: Machine, patches: Patches) -> None:
    trace = _compat.flex.create_fw_bw_graph

    @functools.wraps(trace)
    def create_fw_bw_graph(*args, **kwargs):
        """Traced where the tensors really are: autograd's C++ would ask the driver about a fake tensor of a GPU."""
        with machine.untracked():
            forward, backward = trace(*args, **kwargs)
        for node in backward.graph.nodes:
            if node.op == "get_attr" and getattr(getattr(backward, node.target), "requires_grad", False):
                raise NotImplementedError(
                    "flex_attention on virtual GPUs has no gradient for a tensor that score_mod takes from around it: "
                    "detach it before, or add it to the scores of F.scaled_dot_product_attention(attn_mask=...)"
                )
        return forward, backward

    patches.replace(_compat.flex, "create_fw_bw_graph", create_fw_bw_graph)
