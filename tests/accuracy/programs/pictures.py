"""Pictures and clips, beyond the plain step that vision.py has."""

import copy
import itertools

import torch
import torchvision
from torch import nn
from torch.nn import functional as F

from tests.accuracy.programs.step import Step, training
from tests.accuracy.published import Published
from tests.accuracy.vision import autocast


def loaded(row: Published) -> Step:
    """Pictures that come from the host: pinned, on a stream of their own, the next ones during a step; or from ordinary memory."""
    model = getattr(torchvision.models, row.model)().cuda()
    pinned = row.options["loader"] == "pinned prefetch"
    batches = [torch.randn(row.batch, 3, row.size, row.size) for _ in range(2)]
    batches = itertools.cycle([batch.pin_memory() for batch in batches] if pinned else batches)
    y = torch.zeros(row.batch, dtype=torch.int64, device="cuda")
    side = torch.cuda.Stream()

    def copied():
        with torch.cuda.stream(side):
            return next(batches).to("cuda", non_blocking=True)

    ready = [copied()] if pinned else []

    def loss():
        if not pinned:
            return F.cross_entropy(model(next(batches).cuda()), y)
        torch.cuda.current_stream().wait_stream(side)
        x = ready.pop()
        x.record_stream(torch.cuda.current_stream())
        ready.append(copied())
        return F.cross_entropy(model(x), y)

    return training(model.parameters(), loss, row, torch.optim.SGD, momentum=0.9)


def double(before: int, after: int) -> nn.Sequential:
    """Two convolutions of a U-Net."""
    layers = []
    for width in (before, after):
        layers += [nn.Conv2d(width, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU(True)]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    def __init__(self, sizes=(64, 128, 256, 512, 1024)):
        super().__init__()
        self.down = nn.ModuleList(itertools.starmap(double, itertools.pairwise((3, *sizes))))
        steps = list(itertools.pairwise(reversed(sizes)))
        self.grow = nn.ModuleList(nn.ConvTranspose2d(wide, thin, 2, stride=2) for wide, thin in steps)
        self.up = nn.ModuleList(double(2 * thin, thin) for _, thin in steps)
        self.last = nn.Conv2d(64, 2, 1)

    def forward(self, x):
        kept = []
        for i, layer in enumerate(self.down):
            x = layer(F.max_pool2d(x, 2) if i else x)
            kept.append(x)
        for grow, layer, old in zip(self.grow, self.up, kept[-2::-1], strict=True):
            x = layer(torch.cat([old, grow(x)], dim=1))
        return self.last(x)


def unet(row: Published) -> Step:
    model, x = UNet().cuda(), torch.randn(row.batch, 3, row.size, row.size, device="cuda")
    y = torch.zeros(row.batch, row.size, row.size, dtype=torch.int64, device="cuda")
    return training(model.parameters(), lambda: F.cross_entropy(model(x), y), row)


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
