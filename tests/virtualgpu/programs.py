"""Training programs as tutorials write them. Each is a function of two device names and returns the numbers it arrived at.

Run on ("cpu", "cpu") and on ("cuda:0", "cuda:1"), they must give the same numbers on virtual GPUs; run on virtual and on real
GPUs, the same bytes.
"""

import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

torchvision = pytest.importorskip("torchvision")
Bottleneck, ResNet = torchvision.models.resnet.Bottleneck, torchvision.models.resnet.ResNet


class ToyModel(nn.Module):
    """Two layers on two devices, the first example of PyTorch's model-parallel tutorial in other words."""

    def __init__(self, first, second):
        super().__init__()
        self.second = second
        self.below = nn.Linear(10, 10).to(first)
        self.above = nn.Linear(10, 5).to(second)

    def forward(self, x):
        return self.above(F.relu(self.below(x)).to(self.second))


class SplitResNet(ResNet):
    """The notes' ResNet over two devices, with fewer blocks."""

    def __init__(self, first, second, blocks=(1, 1, 1, 1), classes=10):
        super().__init__(Bottleneck, list(blocks), num_classes=classes)
        self.second = second
        self.seq1 = nn.Sequential(self.conv1, self.bn1, self.relu, self.maxpool, self.layer1, self.layer2).to(first)
        self.seq2 = nn.Sequential(self.layer3, self.layer4, self.avgpool).to(second)
        self.fc.to(second)

    def head(self, h):
        h = self.seq2(h)
        return self.fc(h.view(h.size(0), -1))

    def forward(self, x):
        return self.head(self.seq1(x).to(self.second))


class PipelinedResNet(SplitResNet):
    """... and in micro-batches."""

    def __init__(self, *args, split_size=2, **kwargs):
        super().__init__(*args, **kwargs)
        self.split_size = split_size

    def forward(self, x):
        parts = iter(x.split(self.split_size))
        waiting = self.seq1(next(parts)).to(self.second)
        done = []
        for part in parts:
            done.append(self.head(waiting))
            waiting = self.seq1(part).to(self.second)
        return torch.cat([*done, self.head(waiting)])


def train(model, x, y, device, out, steps=2, optimizer=None, loss_fn=F.cross_entropy):
    """Plain training; losses and parameters at the end."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, foreach=True)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_fn(model(x.to(device)), y.to(out))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return [torch.tensor(losses), *(p.detach().cpu() for p in model.parameters())]


def pictures(n=4, size=32, classes=10):
    return torch.randn(n, 3, size, size), torch.arange(n) % classes


def toy(a, b):
    return train(ToyModel(a, b), torch.randn(20, 10), torch.randn(20, 5), a, b, loss_fn=F.mse_loss)


def split_resnet(a, b):
    return train(SplitResNet(a, b), *pictures(), a, b)


def pipelined_resnet(a, b):
    return train(PipelinedResNet(a, b), *pictures(), a, b)


def vit(a, b):
    model = torchvision.models.VisionTransformer(32, 8, 2, 2, 32, 64, num_classes=10)
    return train(model.to(a), *pictures(), a, a)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.lstm = nn.LSTM(16, 16, num_layers=2, batch_first=True, bidirectional=True)
        self.out = nn.Linear(32, 5)

    def forward(self, tokens):
        return self.out(self.lstm(self.embed(tokens))[0]).transpose(1, 2)


def lstm(a, b):
    return train(Tagger().to(b), torch.arange(24).view(4, 6) % 20, torch.arange(24).view(4, 6) % 5, b, b)


def packed_lstm(a, b):
    """Sequences of unequal length; their lengths stay on the CPU."""
    model = nn.LSTM(4, 8, batch_first=True).to(a)
    x = nn.utils.rnn.pack_padded_sequence(torch.randn(3, 5, 4).to(a), torch.tensor([5, 3, 2]), batch_first=True)
    out, _ = nn.utils.rnn.pad_packed_sequence(model(x)[0], batch_first=True)
    out.sum().backward()
    return [out.detach().cpu(), *(p.grad.cpu() for p in model.parameters())]


class Translator(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(30, 16)
        self.core = nn.Transformer(16, 2, 1, 1, 32, dropout=0.1, batch_first=True)
        self.out = nn.Linear(16, 30)

    def forward(self, tokens):
        device = tokens.device
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.size(1), device=device)
        position = torch.arange(tokens.size(1), device=device)
        h = self.embed(tokens) + self.embed(position)
        return self.out(self.core(h, h, tgt_mask=mask, tgt_is_causal=True)).transpose(1, 2)


def transformer(a, b):
    tokens = torch.arange(24).view(4, 6) % 30
    return train(Translator().to(a), tokens, tokens, a, a)


def _net(device):
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 4)).to(device)


def _optimizer(make):
    def program(a, b):
        below, above = _net(a), nn.Linear(4, 3).to(b)
        model = nn.ModuleList([below, above])
        optimizer = make(model.parameters())
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=6)
        for _ in range(4):
            optimizer.zero_grad()
            loss = F.cross_entropy(above(below(torch.randn(6, 8).to(a)).to(b)), torch.arange(6, device=b) % 3)
            loss.backward()
            norm = clip_grad_norm_(model.parameters(), 0.5, foreach=True)
            clip_grad_value_(model.parameters(), 0.3, foreach=True)
            optimizer.step()
            schedule.step()
        return [loss.detach().cpu(), norm.cpu(), *(p.detach().cpu() for p in model.parameters())]

    return program


adam = _optimizer(lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, foreach=True))
adamw = _optimizer(lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True))
rmsprop = _optimizer(lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, foreach=True))


def mixed_precision(a, b):
    kind = torch.device(a).type
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10)).to(a)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
    scaler = torch.amp.GradScaler(kind, init_scale=1024.0, growth_interval=2)
    losses = []
    for _ in range(4):
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(kind, dtype=torch.float16):
            loss = F.cross_entropy(model(torch.randn(4, 3, 8, 8).to(a)).float(), torch.arange(4, device=a))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return [torch.tensor(losses), torch.tensor(scaler.get_scale()), *(p.detach().cpu() for p in model.parameters())]


def loader(a, b):
    data = TensorDataset(torch.randn(24, 8), torch.arange(24) % 4)
    batches = DataLoader(data, 6, shuffle=True, num_workers=2, pin_memory=torch.device(a).type == "cuda")
    model = _net(a)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x.to(a, non_blocking=True)), y.to(a, non_blocking=True)).backward()
        optimizer.step()
    return [p.detach().cpu() for p in model.parameters()]


def saved_and_loaded(a, b):
    model = _net(a)
    optimizer = torch.optim.Adam(model.parameters(), foreach=True)
    model(torch.randn(4, 8, device=a)).sum().backward()
    optimizer.step()
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, map_location=b)
    again = _net(b)
    again.load_state_dict(saved["model"])
    optimizer = torch.optim.Adam(again.parameters(), foreach=True)
    optimizer.load_state_dict(saved["optimizer"])
    again(torch.randn(4, 8, device=b)).sum().backward()
    optimizer.step()
    assert all(p.device == torch.device(b) for p in again.parameters())
    return [p.detach().cpu() for p in again.parameters()]


def checkpointed(a, b):
    below, above = _net(a), _net(b)
    x = torch.randn(6, 8, device=a, requires_grad=True)

    def whole(x):
        h = torch.cat([below(x), x[:, :4]], 1)
        return above(h.to(b))

    for reentrant in (False, True):
        checkpoint(whole, x, use_reentrant=reentrant).square().sum().backward()
    return [x.grad.cpu(), *(p.grad.cpu() for net in (below, above) for p in net.parameters())]


def in_place_and_views(a, b):
    x = torch.arange(24.0, device=a).view(4, 6).requires_grad_()
    y = x * 2
    y[1:3, ::2] += 1
    y.t()[0].mul_(3)
    z = y.unsqueeze(0).expand(3, 4, 6).contiguous()
    z = z.mul_(2).clamp(max=30).relu_()
    part = z.narrow(1, 0, 2).transpose(1, 2).reshape(-1, 2).to(b)
    part[part > 20] = 0
    total = torch.where(part > 5, part, part.square()).sum() + z[0].to(b).masked_fill(z[0].to(b) > 9, 1).sum()
    total.backward()
    index = torch.tensor([2, 0])  # indices may stay on the CPU
    return [total.detach().cpu(), x.grad.cpu(), x[index].detach().cpu(), torch.stack([x, x]).std(0).detach().cpu()]


def functional(a, b):
    model = _net(a).eval()
    weights = {name: p.detach() for name, p in model.named_parameters()}
    x, y = torch.randn(5, 8, device=a), torch.arange(5, device=a) % 4

    def loss(weights, x, y):
        out = torch.func.functional_call(model, weights, (x.unsqueeze(0),))
        return F.cross_entropy(out.to(b), y.unsqueeze(0).to(b))

    per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(weights, x, y)
    hessian = torch.func.hessian(lambda v: (v.to(b) ** 3).sum())(x[0])
    return [*(g.cpu() for g in per_sample.values()), hessian.cpu()]


def hooks_and_second_derivatives(a, b):
    model, seen = nn.Linear(4, 4).to(a), []
    model.register_full_backward_hook(lambda module, into, out: seen.append(out[0].to(b).norm()))
    x = torch.randn(3, 4, device=a, requires_grad=True)
    (first,) = torch.autograd.grad(model(x).tanh().to(b).sum(), x, create_graph=True)
    first.square().sum().backward()
    return [first.detach().cpu(), x.grad.cpu(), torch.stack(seen).detach().cpu()]


def random_numbers(a, b):
    torch.manual_seed(3)
    draws = [torch.randn(4, device=a), torch.rand(3, device=b), torch.randint(9, (5,), device=a)]
    generator = torch.Generator(device=a).manual_seed(1)
    draws.append(torch.randperm(6, device=a, generator=generator))
    return [
        draw.cpu() for draw in [*draws, torch.randn_like(draws[0]), torch.bernoulli(torch.full((9,), 0.5, device=b))]
    ]


PROGRAMS = {
    program.__name__ if program.__name__ != "program" else name: program
    for name, program in list(globals().items())
    if callable(program)
    and getattr(program, "__module__", "") == __name__
    and name not in ("train", "pictures")
    and not name.startswith("_")
    and not isinstance(program, type)
}
