"""Pictures and clips, beyond the plain step that vision.py has; nets that draw: a diffusion model (a U-Net of residual blocks that is told the
time, with attention in its middle) and two kinds of GAN."""

import copy
import itertools

import torch
import torchvision
from torch import nn
from torch.nn import functional as F

from tests.accuracy.published import Published
from tests.accuracy.runner import Step, autocast, training


def loaded(row: Published) -> Step:
    """Pictures that come from the host: pinned, on a stream of their own, the next ones during a step; or from ordinary memory."""
    model = getattr(torchvision.models, row.model)().cuda()
    pinned = row.options["loader"] == "pinned prefetch"
    batches = [torch.randn(row.batch, 3, row.size, row.size) for _ in range(2)]
    batches = itertools.cycle([batch.pin_memory() for batch in batches] if pinned else batches)
    y, side = classes(row), torch.cuda.Stream()

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


def pictures(row: Published, *shape: int) -> torch.Tensor:
    """Of the row's batch and size; of so many frames, if a shape is given."""
    return torch.randn(row.batch, 3, *shape, row.size, row.size, device="cuda")


def classes(row: Published, *shape: int) -> torch.Tensor:
    return torch.zeros(row.batch, *shape, dtype=torch.int64, device="cuda")


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
    model, x, y = UNet().cuda(), pictures(row), classes(row, row.size, row.size)
    return training(model.parameters(), lambda: F.cross_entropy(model(x), y), row)


def segmentation(row: Published) -> Step:
    """DeepLabv3 over a ResNet-50: dilated convolutions, and an upsampling to each pixel's class."""
    model = torchvision.models.segmentation.deeplabv3_resnet50(weights=None, weights_backbone=None, num_classes=21)
    model, x, y = model.cuda(), pictures(row), classes(row, row.size, row.size)
    return training(model.parameters(), lambda: F.cross_entropy(model(x)["out"], y), row, torch.optim.SGD, momentum=0.9)


def video(row: Published) -> Step:
    """Clips of 16 pictures: three-dimensional convolutions."""
    model, x, y = torchvision.models.video.r3d_18().cuda(), pictures(row, 16), classes(row)
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
    x, y = pictures(row).to(memory_format=torch.channels_last), classes(row)
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
    x, y = pictures(row), classes(row)

    def step():
        with torch.inference_mode(), autocast(row):
            return (model(x).argmax(1) == y).sum().item()

    return step


class Residual(nn.Module):
    """Of a diffusion model: group norm, SiLU, convolution, twice; the time between."""

    def __init__(self, before: int, after: int):
        super().__init__()
        self.first, self.time = self.half(before, after), nn.Linear(512, after)
        self.second = self.half(after, after)
        self.skip = nn.Conv2d(before, after, 1) if before != after else nn.Identity()

    @staticmethod
    def half(before: int, after: int) -> nn.Sequential:
        return nn.Sequential(nn.GroupNorm(32, before), nn.SiLU(), nn.Conv2d(before, after, 3, padding=1))

    def forward(self, x, time):
        return self.skip(x) + self.second(self.first(x) + self.time(time)[:, :, None, None])


class Mixed(nn.Module):
    """Attention among the pixels."""

    def __init__(self, width: int):
        super().__init__()
        self.norm, self.qkv = nn.GroupNorm(32, width), nn.Conv2d(width, 3 * width, 1)
        self.out = nn.Conv2d(width, width, 1)

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
    model, x = Denoiser().cuda(), pictures(row)
    kept = torch.linspace(0.999, 0.01, 1000, device="cuda")

    def loss():
        time = torch.randint(0, 1000, (row.batch,), device="cuda")
        noise, share = torch.randn_like(x), kept[time][:, None, None, None]
        return F.mse_loss(model(share.sqrt() * x + (1 - share).sqrt() * noise, time.float()), noise)

    return training(model.parameters(), loss, row, torch.optim.AdamW)


def dcgan(row: Published) -> Step:
    def up(before, after, stride, padding):
        grow = nn.ConvTranspose2d(before, after, 4, stride, padding, bias=False)
        return nn.Sequential(grow, nn.BatchNorm2d(after), nn.ReLU(True))

    def down(before, after):
        return nn.Sequential(
            nn.Conv2d(before, after, 4, 2, 1, bias=False), nn.BatchNorm2d(after), nn.LeakyReLU(0.2, True)
        )

    with torch.device("cuda"):
        ups = [up(100, 512, 1, 0), up(512, 256, 2, 1), up(256, 128, 2, 1), up(128, 64, 2, 1)]
        make = nn.Sequential(*ups, nn.ConvTranspose2d(64, 3, 4, 2, 1), nn.Tanh())
        downs = [nn.Conv2d(3, 64, 4, 2, 1), nn.LeakyReLU(0.2), down(64, 128), down(128, 256), down(256, 512)]
        judge = nn.Sequential(*downs, nn.Conv2d(512, 1, 4), nn.Flatten())
        real, one, zero = torch.randn(row.batch, 3, 64, 64), torch.ones(row.batch, 1), torch.zeros(row.batch, 1)
    ours, theirs = (torch.optim.Adam(net.parameters(), lr=2e-4, betas=(0.5, 0.999)) for net in (make, judge))
    loss = nn.BCEWithLogitsLoss()

    def step():
        theirs.zero_grad()
        fake = make(torch.randn(row.batch, 100, 1, 1, device="cuda"))
        (loss(judge(real), one) + loss(judge(fake.detach()), zero)).backward()
        theirs.step()
        ours.zero_grad()
        loss(judge(fake), one).backward()
        ours.step()

    return step


def critic(row: Published) -> Step:
    """WGAN-GP's critic: a gradient of gradients."""

    def block(before: int, after: int) -> list[nn.Module]:
        return [nn.Conv2d(before, after, 4, 2, 1), nn.InstanceNorm2d(after, affine=True), nn.LeakyReLU(0.2)]

    layers = [nn.Conv2d(3, 64, 4, 2, 1), nn.LeakyReLU(0.2), *block(64, 128), *block(128, 256), *block(256, 512)]
    model = nn.Sequential(*layers, nn.Conv2d(512, 1, 4), nn.Flatten()).cuda()
    true, false = pictures(row), pictures(row)

    def loss():
        share = torch.rand(row.batch, 1, 1, 1, device="cuda")
        between = (share * true + (1 - share) * false).requires_grad_()
        (slope,) = torch.autograd.grad(model(between).sum(), between, create_graph=True)
        return model(false).mean() - model(true).mean() + 10 * (slope.flatten(1).norm(dim=1) - 1).square().mean()

    return training(model.parameters(), loss, row)


PROGRAMS = {
    "unet": unet,
    "deeplabv3_resnet50": segmentation,
    "r3d_18": video,
    "SimCLR": contrast,
    "resnet50 recipe": recipe,
    "resnet34 correct": correct,
    "diffusion": diffusion,
    "dcgan": dcgan,
    "WGAN-GP": critic,
}
