"""Which operation autocast("cuda") casts to what: the names of CUDA's lists, as ATen has them ("pow.Tensor_Scalar").

Source: torch/include/ATen/autocast_mode.h and what PyTorch registers for the dispatch key AutocastCUDA, versions 2.11 to 2.15;
each list is the union over these versions (named dimensions went after 2.11, rms_norm and linalg_matrix_sqrth came later).
What the installed PyTorch does not register for AutocastCUDA is left out where the lists are used; a test compares them with it.
"""


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# Each floating-point tensor (not float64) becomes the dtype of autocast
LOWER_PRECISION_FP = _names(
    """
    _convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
    conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm bmm
    chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
    _scaled_dot_product_flash_attention scaled_dot_product_attention cudnn_convolution cudnn_convolution_transpose
    """
)

# Each floating-point tensor (not float64) becomes float32
FP32 = _names(
    """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar pow.Tensor_Tensor
    pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim nuclear_norm nuclear_norm.dim
    cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss
    smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss
    multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp upsample_nearest1d
    _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d
    upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d
    _upsample_bicubic2d_aa linalg_matrix_sqrth
    """
)

# Tensors stay; the result becomes float32 by the argument dtype, unless the caller gave one
FP32_SET_OPT_DTYPE = _names(
    """
    prod prod.dim_int prod.dim_Dimname softmax.int softmax.Dimname log_softmax.int log_softmax.Dimname cumprod
    cumprod.dimname cumsum cumsum.dimname linalg_vector_norm linalg_matrix_norm linalg_matrix_norm.str_ord sum
    sum.dim_IntList sum.dim_DimnameList
    """
)

# Likewise, by the overload that has a dtype
FP32_APPEND_DTYPE = {
    "norm.Scalar": "norm.ScalarOpt_dtype",
    "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype",
    "norm.names_ScalarOpt_dim": "norm.names_ScalarOpt_dim_dtype",
}

# All tensors become float32 if one of them is
PROMOTE = _names("addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add")

# Refused: what sigmoid gives in float16 is too coarse for the logarithm of this loss
BANNED = ("binary_cross_entropy",)

# cuDNN's recurrent layers have a rule of their own (aten/src/ATen/cudnn/AutocastRNN.cpp): float16, whatever the dtype of
# autocast. TorchScript calls these operations, which would have called _cudnn_rnn.
CUDNN_RNN = ("_cudnn_rnn",)
RNN = tuple(f"{name}.{kind}" for name in ("lstm", "gru", "rnn_tanh", "rnn_relu") for kind in ("input", "data"))

# The CPU's kernel that runs in place of CUDA's flash attention, where something calls it without the public function
FLASH_ON_CPU = ("_scaled_dot_product_flash_attention_for_cpu",)
