"""Arguments for each operation of autocast's lists: {name: function of r}, where r(2, 3) gives a tensor of that shape.

Values are between 0 and 1, which suits logarithms, arc cosines and losses alike.
"""

import torch

CONVOLUTION = [1, 1], [0, 0], [1, 1], False, [0, 0], 1
CLASSES = torch.tensor([1, 0])

ONE = (
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan softplus frobenius_norm.dim nuclear_norm "
    "nuclear_norm.dim pdist renorm logsumexp prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm "
    "linalg_matrix_norm linalg_matrix_norm.str_ord sum sum.dim_IntList norm.Scalar norm.ScalarOpt_dim"
)
AFTER = {  # what follows the one tensor
    "frobenius_norm.dim": [[0]],
    "nuclear_norm.dim": [[0, 1]],
    "renorm": [2, 0, 1.0],
    "logsumexp": [[0]],
    "prod.dim_int": [0],
    "softmax.int": [0],
    "log_softmax.int": [0],
    "cumprod": [0],
    "cumsum": [0],
    "linalg_matrix_norm": [1],
    "linalg_matrix_norm.str_ord": ["fro"],
    "sum.dim_IntList": [[0]],
    "norm.ScalarOpt_dim": [2, [0]],
}
TWO = (
    "pow.Tensor_Tensor cosine_similarity poisson_nll_loss hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss "
    "mse_loss soft_margin_loss binary_cross_entropy_with_logits dist cdist atan2 mm matmul"
)
UPSAMPLED = {1: "linear1d nearest1d", 2: "nearest2d bilinear2d bicubic2d", 3: "nearest3d trilinear3d"}

SAMPLES = {
    **{name: lambda r, name=name: [r(3, 3), *AFTER.get(name, [])] for name in ONE.split()},
    **{name: lambda r: [r(3, 3), r(3, 3)] for name in TWO.split()},
    "poisson_nll_loss": lambda r: [r(3), r(3), True, False, 1e-8, 1],
    "_convolution": lambda r: [r(2, 3, 8, 8), r(4, 3, 3, 3), r(4), *CONVOLUTION, False, False, True, True],
    "_convolution.deprecated": lambda r: [r(2, 3, 8, 8), r(4, 3, 3, 3), r(4), *CONVOLUTION, False, False, True],
    "convolution": lambda r: [r(2, 3, 8, 8), r(4, 3, 3, 3), r(4), *CONVOLUTION],
    "conv1d": lambda r: [r(2, 3, 8), r(4, 3, 3), r(4)],
    "conv2d": lambda r: [r(2, 3, 8, 8), r(4, 3, 3, 3), r(4)],
    "conv3d": lambda r: [r(2, 3, 4, 4, 4), r(4, 3, 3, 3, 3), r(4)],
    "conv_tbc": lambda r: [r(5, 2, 3), r(3, 3, 4), r(4)],
    "conv_transpose1d": lambda r: [r(2, 3, 8), r(3, 4, 3)],
    "conv_transpose2d.input": lambda r: [r(2, 3, 4, 4), r(3, 4, 3, 3)],
    "conv_transpose3d.input": lambda r: [r(2, 3, 4, 4, 4), r(3, 4, 3, 3, 3)],
    "prelu": lambda r: [r(2, 3), r(3)],
    "addmm": lambda r: [r(2, 4), r(2, 3), r(3, 4)],
    "addmv": lambda r: [r(2), r(2, 3), r(3)],
    "addr": lambda r: [r(2, 3), r(2), r(3)],
    "einsum": lambda r: ["ij,jk->ik", [r(2, 3), r(3, 4)]],
    "mv": lambda r: [r(2, 3), r(3)],
    "linalg_vecdot": lambda r: [r(2, 3), r(2, 3)],
    "linear": lambda r: [r(2, 3), r(4, 3), r(4)],
    "addbmm": lambda r: [r(3, 5), r(2, 3, 4), r(2, 4, 5)],
    "baddbmm": lambda r: [r(2, 3, 5), r(2, 3, 4), r(2, 4, 5)],
    "bmm": lambda r: [r(2, 3, 4), r(2, 4, 5)],
    "chain_matmul": lambda r: [[r(2, 3), r(3, 4), r(4, 2)]],
    "linalg_multi_dot": lambda r: [[r(2, 3), r(3, 4), r(4, 2)]],
    "lstm_cell": lambda r: [r(2, 3), [r(2, 4), r(2, 4)], r(16, 3), r(16, 4), r(16), r(16)],
    "gru_cell": lambda r: [r(2, 3), r(2, 4), r(12, 3), r(12, 4), r(12), r(12)],
    "rnn_tanh_cell": lambda r: [r(2, 3), r(2, 4), r(4, 3), r(4, 4)],
    "rnn_relu_cell": lambda r: [r(2, 3), r(2, 4), r(4, 3), r(4, 4)],
    "scaled_dot_product_attention": lambda r: [r(1, 2, 4, 8), r(1, 2, 4, 8), r(1, 2, 4, 8)],
    "pow.Tensor_Scalar": lambda r: [r(3), 2.5],
    "pow.Scalar": lambda r: [2.5, r(3)],
    "layer_norm": lambda r: [r(3, 4), [4], r(4), r(4)],
    "native_layer_norm": lambda r: [r(3, 4), [4], r(4), r(4), 1e-5],
    "rms_norm": lambda r: [r(3, 4), [4], r(4)],
    "group_norm": lambda r: [r(2, 4, 3), 2, r(4), r(4)],
    "cosine_embedding_loss": lambda r: [r(3, 4), r(3, 4), r(3)],
    "nll_loss": lambda r: [r(2, 3), CLASSES],
    "nll_loss2d": lambda r: [r(2, 3, 1, 1), CLASSES.view(2, 1, 1)],
    "margin_ranking_loss": lambda r: [r(3), r(3), r(3)],
    "multilabel_margin_loss": lambda r: [r(2), CLASSES],
    "triplet_margin_loss": lambda r: [r(3, 4), r(3, 4), r(3, 4)],
    "multi_margin_loss": lambda r: [r(2, 3), CLASSES],
    "linalg_matrix_sqrth": lambda r: [torch.ones((), dtype=r(1).dtype).expand(3, 3).clone()],
    **{
        f"upsample_{kind}": lambda r, n=n, kind=kind: [r(1, 2, *[4] * n), [8] * n] + [False] * ("nearest" not in kind)
        for n, kinds in UPSAMPLED.items()
        for kind in kinds.split()
    },
    **{f"_upsample_nearest_exact{n}d": lambda r, n=n: [r(1, 2, *[4] * n), [8] * n] for n in (1, 2, 3)},
    "_upsample_bilinear2d_aa": lambda r: [r(1, 2, 4, 4), [8, 8], False],
    "_upsample_bicubic2d_aa": lambda r: [r(1, 2, 4, 4), [8, 8], False],
    "addcdiv": lambda r: [r(3), r(3), r(3)],
    "addcmul": lambda r: [r(3), r(3), r(3)],
    "bilinear": lambda r: [r(2, 3), r(2, 4), r(5, 3, 4)],
    "cross": lambda r: [r(2, 3), r(2, 3), 1],
    "dot": lambda r: [r(3), r(3)],
    "vdot": lambda r: [r(3), r(3)],
    "grid_sampler": lambda r: [r(1, 2, 4, 4), r(1, 3, 3, 2), 0, 0, False],
    "index_put": lambda r: [r(3), [CLASSES], r(2)],
    "tensordot": lambda r: [r(2, 3), r(3, 4), [1], [0]],
    "scatter_add": lambda r: [r(3), 0, CLASSES, r(2)],
}

# Kernels that only CUDA has
CUDA_ALONE = {
    "_scaled_dot_product_flash_attention",
    "_thnn_fused_lstm_cell",
    "_thnn_fused_gru_cell",
    "cudnn_convolution",
    "cudnn_convolution_transpose",
}
