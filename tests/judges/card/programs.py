"""Models of transformers, timm and torchvision as people train them, by programs.toml: weights made up, random words, pictures and clips. Two kinds are written
out here: a conformer, of speech, and a mixer, of patches."""

import functools
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

Step = Callable[[], object]
TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
NARROW = {"fp16": torch.float16, "bf16": torch.bfloat16}


def autocast(precision: str) -> torch.autocast:
    """To "fp16" or "bf16"; off for "fp32", and for "bfloat16", which the weights have themselves."""
    return torch.autocast("cuda", NARROW.get(precision, torch.float16), enabled=precision in NARROW)


def adamw(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-5)


def sgd(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def training(model, loss: Callable[[], torch.Tensor], precision: str, optimize=adamw) -> Step:
    """Gradients away, autocast, a scaler where it is float16, an optimizer."""
    model.train()
    optimizer = optimize([parameter for parameter in model.parameters() if parameter.requires_grad])
    scaler = torch.amp.GradScaler("cuda", enabled=precision == "fp16")

    def step():
        optimizer.zero_grad()
        with autocast(precision):
            value = loss()
        scaler.scale(value).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


def inference(model, precision: str, *args, **inputs) -> Step:
    model.eval()

    def step():
        with torch.no_grad(), autocast(precision):
            model(*args, **inputs)

    return step


def of_transformers(name: str, config: dict, dtype=torch.float32, attention: str = ""):
    """name: of the class; its configuration has the same, up to "For"."""
    import transformers

    kind = name.removesuffix("LMHeadModel").removesuffix("Model").split("For")[0]
    made = getattr(transformers, f"{kind}Config")(**config)
    if attention:
        made._attn_implementation = attention
    with torch.device("cuda"):
        return getattr(transformers, name)(made).to(dtype).cuda()


def tokens(batch: int, length: int, vocabulary: int = 30000) -> torch.Tensor:
    return torch.randint(0, vocabulary, (batch, length), device="cuda")


def language(
    model, precision, batch, length, config, *,
    infer=False, checkpointing=False, adapters=False, attention="sdpa", mask=False,
) -> Step:  # fmt: skip
    """precision: "bfloat16" is of the weights, too."""
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    model = of_transformers(model, config, dtype, attention)
    x = tokens(batch, length, model.config.vocab_size)
    inputs = {"input_ids": x}
    if mask:
        inputs["attention_mask"] = torch.ones_like(x)
        inputs["attention_mask"][:, -length // 8 :] = 0
    if infer:
        return inference(model, precision, **inputs)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.config.use_cache = False
    if adapters:
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(r=16, target_modules=["q_proj", "v_proj"]))
    return training(model, lambda: model(**inputs, labels=x).loss, precision)


def translation(model, precision, batch, length, config) -> Step:
    model, x, y = of_transformers(model, config), tokens(batch, length), tokens(batch, length // 2)
    return training(model, lambda: model(input_ids=x, labels=y).loss, precision)


def images(model, precision, batch, config, size=224) -> Step:
    model, x = of_transformers(model, config), torch.randn(batch, 3, size, size, device="cuda")
    return training(model, lambda: model(x)[0].float().square().mean(), precision)


def whisper(precision, batch, config) -> Step:
    model = of_transformers("WhisperForConditionalGeneration", config)
    x, y = torch.randn(batch, 80, 3000, device="cuda"), tokens(batch, 128, 50000)
    return training(model, lambda: model(input_features=x, labels=y).loss, precision)


def clip(precision, batch, config) -> Step:
    model = of_transformers("CLIPModel", config)
    x, y = torch.randn(batch, 3, 224, 224, device="cuda"), tokens(batch, 77, 49000)
    return training(model, lambda: model(input_ids=y, pixel_values=x, return_loss=True).loss, precision)


def generation(batch, new, config) -> Step:
    model, x = of_transformers("GPT2LMHeadModel", config, torch.bfloat16).eval(), tokens(batch, 64, 50000)

    def step():
        with torch.no_grad():
            model.generate(x, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0)

    return step


def timm(model, precision, batch, config, size=224, **options) -> Step:
    import timm

    with torch.device("cuda"):
        model = timm.create_model(model, **config)
    return pictures(model.cuda(), precision, (batch, 3, size, size), adamw, **options)


def vision(model, precision, batch, config, size=224, folder="", frames=0, **options) -> Step:
    """Of torchvision. folder: of its models. frames: of a clip; 0 for pictures."""
    import torchvision

    models = getattr(torchvision.models, folder) if folder else torchvision.models
    backbone = {"weights_backbone": None} if folder == "segmentation" else {}
    model = getattr(models, model)(weights=None, **backbone, **config).cuda()
    shape = (batch, 3, frames, size, size) if frames else (batch, 3, size, size)
    return pictures(model, precision, shape, sgd, **options)


def pictures(model: nn.Module, precision: str, shape: tuple, optimize, last=False, infer=False) -> Step:
    """Ten of the classes; of each pixel, or with what a second head says, where the model has that."""
    x = torch.randn(shape, device="cuda")
    y = torch.randint(0, 10, (shape[0],), device="cuda")
    if last:
        model = model.to(memory_format=torch.channels_last)
        x = x.contiguous(memory_format=torch.channels_last)
    if infer:
        return inference(model, precision, x)

    def loss():
        out = model(x)
        if isinstance(out, dict):
            out = out["out"].mean(dim=(2, 3))
        if hasattr(out, "aux_logits"):
            return F.cross_entropy(out.logits, y) + 0.4 * F.cross_entropy(out.aux_logits, y)
        return F.cross_entropy(out, y)

    return training(model, loss, precision, optimize)


def flow(precision, batch, config) -> Step:
    """Of one picture to the next."""
    import torchvision

    model = torchvision.models.optical_flow.raft_small(weights=None, **config).cuda()
    one, other = (torch.randn(batch, 3, 256, 320, device="cuda") for _ in range(2))
    return training(model, lambda: model(one, other, num_flow_updates=6)[-1].square().mean(), precision)


def half(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Dropout(0.1), nn.Linear(4 * width, width))


class Conformer(nn.Module):
    """Attention, and a depthwise convolution in time between two halves of a feed-forward part. x [batch, time, width]."""

    def __init__(self, width: int = 256):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(4))
        self.first, self.last = half(width), half(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True, dropout=0.1)
        self.into, self.out = nn.Conv1d(width, 2 * width, 1), nn.Conv1d(width, width, 1)
        self.along, self.batch = nn.Conv1d(width, width, 31, padding=15, groups=width), nn.BatchNorm1d(width)

    def forward(self, x):
        x = x + self.first(self.norms[0](x)) / 2
        hidden = self.norms[1](x)
        x = x + self.attention(hidden, hidden, hidden, need_weights=False)[0]
        hidden = F.glu(self.into(self.norms[2](x).transpose(1, 2)), dim=1)
        x = x + self.out(F.silu(self.batch(self.along(hidden)))).transpose(1, 2)
        return x + self.last(self.norms[3](x)) / 2


def speech(precision, batch, config, time=400, letters=40) -> Step:
    with torch.device("cuda"):
        model = nn.Sequential(*[Conformer(**config) for _ in range(12)], nn.Linear(256, 1000))
        x, y = torch.randn(batch, time, 256), torch.randint(1, 1000, (batch, letters))
        times, lengths = torch.full((batch,), time), torch.full((batch,), letters)

    def loss():
        scores = model(x).float().log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(scores, y, times, lengths)

    return training(model.cuda(), loss, precision)


class Mixer(nn.Module):
    """Through the patches, then through the width. x [batch, patches, width]."""

    def __init__(self, patches: int = 196, width: int = 512):
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.patches = nn.Sequential(nn.Linear(patches, 2 * patches), nn.GELU(), nn.Linear(2 * patches, patches))
        self.width = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        x = x + self.patches(self.before(x).mT).mT
        return x + self.width(self.between(x))


def mixer(precision, batch, config) -> Step:
    with torch.device("cuda"):
        patches = nn.Sequential(nn.Conv2d(3, 512, 16, 16), nn.Flatten(2))
        body, head = nn.Sequential(*[Mixer(**config) for _ in range(8)]), nn.Linear(512, 100)
        x, y = torch.randn(batch, 3, 224, 224), torch.randint(0, 100, (batch,))
    model = nn.ModuleList([patches, body, head])
    return training(model, lambda: F.cross_entropy(head(body(patches(x).mT).mean(1)), y), precision)


def _made(make: str, config: str | dict | None = None, **row) -> Callable[[], Step]:
    config = TABLE["config"][config] if isinstance(config, str) else config or {}
    return functools.partial(globals()[make], config=config, **row)


PROGRAMS: dict[str, Callable[[], Step]] = {name: _made(**row) for name, row in TABLE["programs"].items()}
