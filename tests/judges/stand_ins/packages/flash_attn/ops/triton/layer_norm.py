"""RMSNorm and LayerNorm, with a residual."""

import torch


def layer_norm_fn(x, weight, bias=None, residual=None, eps=1e-6, prenorm=False, is_rms_norm=False, **options):
    x = x if residual is None else x + residual
    shape = (x.size(-1),)
    norm = torch.nn.functional
    out = norm.rms_norm(x, shape, weight, eps) if is_rms_norm else norm.layer_norm(x, shape, weight, bias, eps)
    return (out, x) if prenorm else out
