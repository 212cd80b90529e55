"""Programs with pictures, clips and points of `unseen`: a function each, which returns a step."""

import copy
import itertools

import torch
import torchvision
from torch import nn
from torch.nn import functional as F

from tests.accuracy.one_card import Step, training
from tests.accuracy.published import Published
from tests.accuracy.vision import autocast


def segmentation(row: Published) -> Step:
    """DeepLabv3 over a ResNet-50: dilated convolutions, and an upsampling to each pixel's class."""
    model = torchvision.models.segmentation.deeplabv3_resnet50(weights=None, weights_backbone=None, num_classes=21)
    model, x = model.cuda(), torch.randn(row.batch, 3, row.size, row.size, device="cuda")
    y = torch.zeros(row.batch, row.size, row.size, dtype=torch.int64, device="cuda")
    return training(model.parameters(), lambda: F.cross_entropy(model(x)["out"], y), row, torch.optim.SGD, momentum=0.9)


def video(row: Published) -> Step:
    """Clips of 16 pictures: three-dimensional convolutions."""
    model, x = (
        torchvision.models.video.r3d_18().cuda(),
        torch.randn(row.batch, 3, 16, row.size, row.size, device="cuda"),
    )
    y = torch.zeros(row.batch, dtype=torch.int64, device="cuda")
    return training(model.parameters(), lambda: F.cross_entropy(model(x), y), row, torch.optim.SGD, momentum=0.9)


class Residual(nn.Module):
    """Of a diffusion model: group norm, SiLU, convolution, twice; the time between."""

    def __init__(self, before: int, after: int):
        super().__init__()
        self.first = nn.Sequential(nn.GroupNorm(32, before), nn.SiLU(), nn.Conv2d(before, after, 3, padding=1))
        self.time = nn.Linear(512, after)
        self.second = nn.Sequential(nn.GroupNorm(32, after), nn.SiLU(), nn.Conv2d(after, after, 3, padding=1))
        self.skip = nn.Conv2d(before, after, 1) if before != after else nn.Identity()

    def forward(self, x, time):
        return self.skip(x) + self.second(self.first(x) + self.time(time)[:, :, None, None])


class Mixed(nn.Module):
    """Attention among the pixels."""

    def __init__(self, width: int):
        super().__init__()
        self.norm, self.qkv, self.out = (
            nn.GroupNorm(32, width),
            nn.Conv2d(width, 3 * width, 1),
            nn.Conv2d(width, width, 1),
        )

    def forward(self, x):
        batch, width, tall, wide = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, 3, 4, width // 4, tall * wide).transpose(-1, -2).unbind(1)
        y = F.scaled_dot_product_attention(q, k, v).transpose(-1, -2).reshape(x.shape)
        return x + self.out(y)


class Denoiser(nn.Module):
    def __init__(self, widths=(128, 256, 256, 512)):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(128, 512), nn.SiLU(), nn.Linear(512, 512))
        self.first, self.last = nn.Conv2d(3, widths[0], 3, padding=1), nn.Conv2d(widths[0], 3, 3, padding=1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        for before, after in itertools.pairwise((widths[0], *widths)):
            self.down.append(nn.ModuleList([Residual(before, after), Residual(after, after)]))
            self.up.insert(0, nn.ModuleList([Residual(2 * after, after), Residual(after, before)]))
        self.middle = Mixed(widths[-1])

    def forward(self, x, time):
        angles = time[:, None] * torch.exp(torch.arange(64, device=x.device) * -0.14)
        time = self.time(torch.cat([angles.sin(), angles.cos()], dim=1))
        x, kept = self.first(x), []
        for one, two in self.down:
            x = two(one(x, time), time)
            kept.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.middle(x)
        for one, two in self.up:
            x = F.interpolate(x, scale_factor=2, mode="nearest")
            x = two(one(torch.cat([x, kept.pop()], dim=1), time), time)
        return self.last(x)


def diffusion(row: Published) -> Step:
    model, pictures = Denoiser().cuda(), torch.randn(row.batch, 3, row.size, row.size, device="cuda")
    kept = torch.linspace(0.999, 0.01, 1000, device="cuda")

    def loss():
        time = torch.randint(0, 1000, (row.batch,), device="cuda")
        noise, share = torch.randn_like(pictures), kept[time][:, None, None, None]
        return F.mse_loss(model(share.sqrt() * pictures + (1 - share).sqrt() * noise, time.float()), noise)

    return training(model.parameters(), loss, row, torch.optim.AdamW)


def contrast(row: Published) -> Step:
    """SimCLR: two views of small pictures, each against every other."""
    model = torchvision.models.resnet18(num_classes=128)
    model.conv1, model.maxpool = nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.Identity()
    model, x = model.cuda(), torch.randn(2 * row.batch, 3, row.size, row.size, device="cuda")
    targets = torch.arange(2 * row.batch, device="cuda").roll(row.batch)
    own = torch.eye(2 * row.batch, dtype=torch.bool, device="cuda")

    def loss():
        z = F.normalize(model(x).float(), dim=1)
        return F.cross_entropy((z @ z.T / 0.1).masked_fill(own, -1e9), targets)

    return training(model.parameters(), loss, row, torch.optim.SGD, momentum=0.9)


def critic(row: Published) -> Step:
    """WGAN-GP's critic: a gradient of gradients."""

    def block(before: int, after: int) -> list[nn.Module]:
        return [nn.Conv2d(before, after, 4, 2, 1), nn.InstanceNorm2d(after, affine=True), nn.LeakyReLU(0.2)]

    layers = [nn.Conv2d(3, 64, 4, 2, 1), nn.LeakyReLU(0.2), *block(64, 128), *block(128, 256), *block(256, 512)]
    model = nn.Sequential(*layers, nn.Conv2d(512, 1, 4), nn.Flatten()).cuda()
    true, false = (torch.randn(row.batch, 3, row.size, row.size, device="cuda") for _ in range(2))

    def loss():
        share = torch.rand(row.batch, 1, 1, 1, device="cuda")
        between = (share * true + (1 - share) * false).requires_grad_()
        (slope,) = torch.autograd.grad(model(between).sum(), between, create_graph=True)
        return model(false).mean() - model(true).mean() + 10 * (slope.flatten(1).norm(dim=1) - 1).square().mean()

    return training(model.parameters(), loss, row)


def points(row: Published) -> Step:
    """PointNet: each point alone through convolutions of one, the largest of all."""
    widths = (3, 64, 128, 1024)
    layers = ([nn.Conv1d(a, b, 1), nn.BatchNorm1d(b), nn.ReLU(True)] for a, b in itertools.pairwise(widths))
    body = nn.Sequential(*itertools.chain(*layers)).cuda()
    head = nn.Sequential(nn.Linear(1024, 256), nn.ReLU(True), nn.Dropout(0.3), nn.Linear(256, 40)).cuda()
    x, y = torch.randn(row.batch, 3, row.size, device="cuda"), torch.zeros(row.batch, dtype=torch.int64, device="cuda")
    parameters = [*body.parameters(), *head.parameters()]
    return training(parameters, lambda: F.cross_entropy(head(body(x).amax(dim=2)), y), row)


def speech(row: Published) -> Step:
    """The first layers of wav2vec 2.0 over a second or more of sound, then a transformer's."""
    sizes = [(1, 10, 5), *[(512, 3, 2)] * 4, *[(512, 2, 2)] * 2]
    layers = ([nn.Conv1d(before, 512, kernel, stride, bias=False), nn.GELU()] for before, kernel, stride in sizes)
    body = nn.Sequential(*itertools.chain(*layers), nn.GroupNorm(1, 512)).cuda()
    layer = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True)
    encoder, head = nn.TransformerEncoder(layer, 6).cuda(), nn.Linear(512, 32).cuda()
    sound = torch.randn(row.batch, 1, row.size, device="cuda")
    parameters = [*body.parameters(), *encoder.parameters(), *head.parameters()]

    def loss():
        return F.log_softmax(head(encoder(body(sound).transpose(1, 2))), -1)[..., 0].mean().neg()

    return training(parameters, loss, row, torch.optim.AdamW)


def recipe(row: Published) -> Step:
    """A ResNet-50 with what recipes add: label smoothing, clipped gradients, a schedule, an average of the weights, a number to print."""
    model = torchvision.models.resnet50().cuda().to(memory_format=torch.channels_last)
    mean = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4, nesterov=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
    x = torch.randn(row.batch, 3, row.size, row.size, device="cuda").to(memory_format=torch.channels_last)
    y = torch.zeros(row.batch, dtype=torch.int64, device="cuda")
    weights, means = list(model.parameters()), list(mean.parameters())

    def step():
        with autocast(row):
            loss = F.cross_entropy(model(x), y, label_smoothing=0.1)
        loss.backward()
        nn.utils.clip_grad_norm_(weights, 5.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        with torch.no_grad():
            torch._foreach_lerp_(means, weights, 0.001)
        return loss.item()

    return step


def correct(row: Published) -> Step:
    """How many of a batch are right, asked of each."""
    model = torchvision.models.resnet34().cuda().eval()
    x, y = (
        torch.randn(row.batch, 3, row.size, row.size, device="cuda"),
        torch.zeros(row.batch, dtype=torch.int64, device="cuda"),
    )

    def step():
        with torch.inference_mode(), autocast(row):
            return (model(x).argmax(1) == y).sum().item()

    return step


PROGRAMS = {
    "deeplabv3_resnet50": segmentation,
    "r3d_18": video,
    "diffusion": diffusion,
    "SimCLR": contrast,
    "WGAN-GP": critic,
    "PointNet": points,
    "wav2vec": speech,
    "resnet50 recipe": recipe,
    "resnet34 correct": correct,
}
