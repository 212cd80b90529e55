"""A diffusion model: a U-Net of residual blocks that is told the time, with attention in its middle."""

import itertools

import torch
from torch import nn
from torch.nn import functional as F

from tests.accuracy.programs.step import Step, training
from tests.accuracy.published import Published


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
