"""Models of timm and torchvision: weights made up, random pictures and clips, ten of the classes."""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from tests.judges.card.training import Step, adamw, autocast, training


def _sgd(parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def timm(name: str, precision: str, batch: int, size: int = 224, **options) -> Step:
    import timm

    with torch.device("cuda"):
        model = timm.create_model(name)
    return _step(model.cuda(), precision, (batch, 3, size, size), optimize=adamw, **options)


def vision(
    name: str, precision: str, batch: int, size: int = 224, folder: str = "", frames: int = 0, last=False, **values
) -> Step:
    """folder: of torchvision.models. frames: of a clip; 0 for pictures."""
    import torchvision

    models = getattr(torchvision.models, folder) if folder else torchvision.models
    model = getattr(models, name)(weights=None, **values).cuda()
    shape = (batch, 3, frames, size, size) if frames else (batch, 3, size, size)
    return _step(model, precision, shape, last=last, optimize=_sgd)


def _step(model: nn.Module, precision: str, shape, *, optimize, last: bool = False, infer: bool = False) -> Step:
    x = torch.randn(shape, device="cuda")
    y = torch.randint(0, 10, (shape[0],), device="cuda")
    if last:
        model = model.to(memory_format=torch.channels_last)
        x = x.contiguous(memory_format=torch.channels_last)
    if infer:
        model.eval()

        def evaluate():
            with torch.no_grad(), autocast(precision):
                model(x)

        return evaluate
    return training(model, lambda: _loss(model(x), y), precision, optimize)


def _loss(out, y: torch.Tensor) -> torch.Tensor:
    if isinstance(out, dict):  # a class for each pixel
        out = out["out"].mean(dim=(2, 3))
    if hasattr(out, "aux_logits"):
        return F.cross_entropy(out.logits, y) + 0.4 * F.cross_entropy(out.aux_logits, y)
    return F.cross_entropy(out, y)


def flow(precision: str, batch: int) -> Step:
    """Of one picture to the next."""
    import torchvision

    model = torchvision.models.optical_flow.raft_small(weights=None).cuda()
    one, other = (torch.randn(batch, 3, 256, 320, device="cuda") for _ in range(2))
    return training(model, lambda: model(one, other, num_flow_updates=6)[-1].square().mean(), precision, adamw)


SEGMENTATION = {"folder": "segmentation", "weights_backbone": None}
CLIPS = {"folder": "video", "frames": 16}

PROGRAMS: dict[str, Callable[[], Step]] = {
    "timm resnet50d fp16 last b128": lambda: timm("resnet50d", "fp16", 128, last=True),
    "timm resnext50_32x4d fp16 b64": lambda: timm("resnext50_32x4d", "fp16", 64),
    "timm seresnet50 fp32 b64": lambda: timm("seresnet50", "fp32", 64),
    "timm regnety_032 fp16 last b64": lambda: timm("regnety_032", "fp16", 64, last=True),
    "timm efficientnetv2_rw_s bf16 last b64": lambda: timm("efficientnetv2_rw_s", "bf16", 64, 288, last=True),
    "timm tf_efficientnet_b4 fp32 b16": lambda: timm("tf_efficientnet_b4", "fp32", 16, 320),
    "timm mobilenetv4_conv_medium fp16 last b128": lambda: timm("mobilenetv4_conv_medium", "fp16", 128, last=True),
    "timm convnextv2_tiny bf16 b64": lambda: timm("convnextv2_tiny", "bf16", 64),
    "timm vit_small_patch16 fp16 b256": lambda: timm("vit_small_patch16_224", "fp16", 256),
    "timm vit_large infer fp16 b32": lambda: timm("vit_large_patch16_224", "fp16", 32, infer=True),
    "timm deit3_base bf16 b64": lambda: timm("deit3_base_patch16_224", "bf16", 64),
    "timm swin_tiny bf16 b64": lambda: timm("swin_tiny_patch4_window7_224", "bf16", 64),
    "timm mixer_b16 fp16 b64": lambda: timm("mixer_b16_224", "fp16", 64),
    "timm maxvit_tiny bf16 last b16": lambda: timm("maxvit_tiny_tf_224", "bf16", 16, last=True),
    "timm nfnet_f0 bf16 last b32": lambda: timm("nfnet_f0", "bf16", 32, last=True),
    "timm eva02_small bf16 b32": lambda: timm("eva02_small_patch14_224", "bf16", 32),
    "timm coatnet_0 fp16 b32": lambda: timm("coatnet_0_rw_224", "fp16", 32),
    "timm edgenext_small fp32 b64": lambda: timm("edgenext_small", "fp32", 64, 256),
    "timm beit_base infer bf16 b64": lambda: timm("beit_base_patch16_224", "bf16", 64, infer=True),
    "timm ghostnet_100 fp32 last b128": lambda: timm("ghostnet_100", "fp32", 128, last=True),
    "googlenet fp32 b64": lambda: vision("googlenet", "fp32", 64, aux_logits=False, init_weights=False),
    "inception_v3 fp16 b32": lambda: vision("inception_v3", "fp16", 32, 299, init_weights=False),
    "squeezenet1_1 fp32 b128": lambda: vision("squeezenet1_1", "fp32", 128),
    "shufflenet_v2 fp16 b128": lambda: vision("shufflenet_v2_x1_0", "fp16", 128),
    "mnasnet1_0 fp32 b64": lambda: vision("mnasnet1_0", "fp32", 64),
    "swin_v2_t fp16 b32": lambda: vision("swin_v2_t", "fp16", 32, 256),
    "maxvit_t bf16 b32": lambda: vision("maxvit_t", "bf16", 32),
    "vgg19_bn fp32 b32": lambda: vision("vgg19_bn", "fp32", 32),
    "wide_resnet50_2 bf16 last b64": lambda: vision("wide_resnet50_2", "bf16", 64, last=True),
    "lraspp fp32 b8": lambda: vision("lraspp_mobilenet_v3_large", "fp32", 8, 512, **SEGMENTATION),
    "fcn_resnet50 fp16 last b8": lambda: vision("fcn_resnet50", "fp16", 8, 384, last=True, **SEGMENTATION),
    "r2plus1d_18 fp16 b8": lambda: vision("r2plus1d_18", "fp16", 8, 112, **CLIPS),
    "mvit_v2_s bf16 b4": lambda: vision("mvit_v2_s", "bf16", 4, 224, **CLIPS),
    "s3d fp32 b4": lambda: vision("s3d", "fp32", 4, 224, **CLIPS),
    "raft_small fp32 b4": lambda: flow("fp32", 4),
}
