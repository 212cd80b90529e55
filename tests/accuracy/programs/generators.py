"""Nets that draw: two kinds of GAN."""

import torch
from torch import nn

from tests.accuracy.programs.step import Step, training
from tests.accuracy.published import Published


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
    true, false = (torch.randn(row.batch, 3, row.size, row.size, device="cuda") for _ in range(2))

    def loss():
        share = torch.rand(row.batch, 1, 1, 1, device="cuda")
        between = (share * true + (1 - share) * false).requires_grad_()
        (slope,) = torch.autograd.grad(model(between).sum(), between, create_graph=True)
        return model(false).mean() - model(true).mean() + 10 * (slope.flatten(1).norm(dim=1) - 1).square().mean()

    return training(model.parameters(), loss, row)
