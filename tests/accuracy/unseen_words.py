"""Programs with words, tables and small nets of `unseen`: a function each, which returns a step."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.accuracy.one_card import GPT2, Step, training
from tests.accuracy.published import Published
from tests.accuracy.vision import autocast


class Layer(nn.Module):
    """Of Llama: RMS norm, rotated queries and keys, fewer keys than queries, SwiGLU."""

    def __init__(self, hidden: int, heads: int, groups: int, inner: int):
        super().__init__()
        self.heads, self.groups, width = heads, groups, hidden // heads
        self.q, self.o = nn.Linear(hidden, hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.k, self.v = (nn.Linear(hidden, groups * width, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(hidden, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, hidden, bias=False)
        self.n1, self.n2 = nn.RMSNorm(hidden), nn.RMSNorm(hidden)

    def heads_of(self, x, count: int):
        return x.view(*x.shape[:2], count, -1).transpose(1, 2)

    def forward(self, x, cos, sin, cache=None):
        h = self.n1(x)
        q, k, v = (
            self.heads_of(self.q(h), self.heads),
            self.heads_of(self.k(h), self.groups),
            self.heads_of(self.v(h), self.groups),
        )
        q, k = turned(q, cos, sin), turned(k, cos, sin)
        if cache is not None:
            k, v = torch.cat([cache[0], k], dim=2), torch.cat([cache[1], v], dim=2)
        times = self.heads // self.groups
        k, v = k.repeat_interleave(times, dim=1), v.repeat_interleave(times, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=cache is None)
        x = x + self.o(y.transpose(1, 2).reshape(x.shape))
        h = self.n2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def turned(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class Llama(nn.Module):
    def __init__(self, layers: int, hidden: int, heads: int, groups: int, inner: int, vocabulary: int = 32000):
        super().__init__()
        self.words, self.head = nn.Embedding(vocabulary, hidden), nn.Linear(hidden, vocabulary, bias=False)
        self.layers = nn.ModuleList(Layer(hidden, heads, groups, inner) for _ in range(layers))
        self.norm = nn.RMSNorm(hidden)

    def forward(self, tokens, cos, sin, caches=None):
        x = self.words(tokens)
        for i, layer in enumerate(self.layers):
            x = layer(x, cos, sin, None if caches is None else caches[i])
        return self.head(self.norm(x))


def angles(length: int, width: int, dtype: torch.dtype):
    turns = torch.outer(torch.arange(length, device="cuda"), 10000 ** -torch.linspace(0, 1, width // 2, device="cuda"))
    turns = torch.cat([turns, turns], dim=1)
    return turns.cos().to(dtype), turns.sin().to(dtype)


SMALL = {"layers": 16, "hidden": 2048, "heads": 32, "groups": 8, "inner": 5632}  # 1.0 B parameters


def llama(row: Published) -> Step:
    dtype = torch.bfloat16 if row.precision == "bfloat16" else torch.float32
    with torch.device("cuda"):
        model = Llama(**SMALL).to(dtype)
        tokens = torch.randint(0, 32000, (row.batch, row.size))
    cos, sin = angles(row.size, 64, dtype)
    if row.mode == "infer":
        rows = [torch.randn(row.batch, 8, row.size, 64, device="cuda", dtype=dtype) for _ in range(2)]
        cos, sin, caches = cos[-1:], sin[-1:], [rows] * 16

        def step():
            with torch.inference_mode():
                return model(tokens[:, -1:], cos, sin, caches)[:, -1].argmax(-1)

        return step

    def loss():
        return F.cross_entropy(model(tokens, cos, sin).flatten(0, 1), tokens.flatten())

    if "adapters" in row.options:
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        for layer in model.layers:
            layer.q, layer.v = Adapted(layer.q), Adapted(layer.v)
        model.cuda().to(dtype)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return training(parameters, loss, row, torch.optim.AdamW)


class Adapted(nn.Module):
    """LoRA: what a layer gives, and a product of two thin matrices."""

    def __init__(self, layer: nn.Linear, rank: int = 16):
        super().__init__()
        self.layer, self.drop = layer, nn.Dropout(0.05)
        self.a = nn.Linear(layer.in_features, rank, bias=False)
        self.b = nn.Linear(rank, layer.out_features, bias=False)

    def forward(self, x):
        return self.layer(x) + 2 * self.b(self.a(self.drop(x)))


def medium(row: Published) -> Step:
    """GPT-2 medium, or 124M whose step is made of four smaller batches."""
    parts = int(row.options.get("parts", 1))
    sizes = {"hidden": 1024, "layers": 24} if parts == 1 else {}
    model = GPT2(50304, row.size, fused=True, recompute=False, **sizes).cuda()
    tokens = torch.randint(0, 50000, (row.batch, row.size), device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step():
        for part in tokens.chunk(parts):
            with autocast(row):
                loss = model(part) / parts
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def bert(row: Published) -> Step:
    """A classifier of sentences: BERT base's sizes, dropout, a mask, a scaler."""
    layer = nn.TransformerEncoderLayer(768, 12, 3072, activation="gelu", batch_first=True)
    with torch.device("cuda"):
        words, places, head = nn.Embedding(30522, 768), nn.Embedding(512, 768), nn.Linear(768, 2)
        encoder = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False).cuda()
        tokens, y = torch.randint(0, 30000, (row.batch, row.size)), torch.zeros(row.batch, dtype=torch.int64)
        padded = torch.arange(row.size).expand(row.batch, -1) >= row.size - 16
    parameters = [*words.parameters(), *places.parameters(), *encoder.parameters(), *head.parameters()]
    optimizer, scaler = torch.optim.AdamW(parameters), torch.amp.GradScaler("cuda")

    def step():
        optimizer.zero_grad()
        with autocast(row):
            x = words(tokens) + places.weight[: row.size]
            loss = F.cross_entropy(head(encoder(x, src_key_padding_mask=padded)[:, 0]), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


def experts(row: Published) -> Step:
    """Eight experts, two for each token, chosen by index: the host waits for every count."""
    with torch.device("cuda"):
        gate = nn.Linear(1024, 8, bias=False)
        nets = nn.ModuleList(nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)) for _ in range(8))
        x = torch.randn(row.batch * row.size, 1024)

    def loss():
        weights, chosen = gate(x).softmax(-1).topk(2, dim=-1)
        y = torch.zeros_like(x)
        for i, net in enumerate(nets):
            token, place = torch.where(chosen == i)
            y = y.index_add(0, token, (net(x[token]) * weights[token, place, None]).to(y.dtype))
        return y.square().mean()

    return training([*gate.parameters(), *nets.parameters()], loss, row, torch.optim.AdamW)


def translation(row: Published) -> Step:
    """A GRU that looks at all of a sentence for each word it writes: a loop of the host's."""
    with torch.device("cuda"):
        words, head = nn.Embedding(10000, 512), nn.Linear(1024, 10000)
        reader, writer = nn.GRU(512, 512, batch_first=True), nn.GRUCell(1024, 512)
        source, target = (torch.randint(0, 10000, (row.batch, row.size)) for _ in range(2))

    def loss():
        read, state = reader(words(source))
        state, context, total = state[0], torch.zeros_like(state[0]), 0.0
        for i in range(row.size - 1):
            state = writer(torch.cat([words(target[:, i]), context], dim=1), state)
            scores = torch.bmm(read, state.unsqueeze(2)).softmax(dim=1)
            context = (scores * read).sum(dim=1)
            total = total + F.cross_entropy(head(torch.cat([state, context], dim=1)), target[:, i + 1])
        return total / row.size

    parameters = [parameter for part in (words, head, reader, writer) for parameter in part.parameters()]
    return training(parameters, loss, row)


def autoencoder(row: Published) -> Step:
    """PyTorch's example of a VAE: digits, 128 at a time; the loss is printed."""
    with torch.device("cuda"):
        first, mean, spread, third, last = (
            nn.Linear(784, 400),
            nn.Linear(400, 20),
            nn.Linear(400, 20),
            nn.Linear(20, 400),
            nn.Linear(400, 784),
        )
        x = torch.rand(row.batch, 1, row.size, row.size)
    parameters = [parameter for layer in (first, mean, spread, third, last) for parameter in layer.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=1e-3)

    def step():
        optimizer.zero_grad()
        h = F.relu(first(x.view(-1, 784)))
        mu, logvar = mean(h), spread(h)
        std = torch.exp(0.5 * logvar)
        y = torch.sigmoid(last(F.relu(third(mu + torch.randn_like(std) * std))))
        loss = F.binary_cross_entropy(y, x.view(-1, 784), reduction="sum")
        loss = loss - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def policy(row: Published) -> Step:
    """PPO: 64 moves of many small worlds, then four epochs of updates."""
    actor = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4)).cuda()
    critic = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)).cuda()
    optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], lr=2.5e-4, eps=1e-5)
    world = torch.randn(row.size, row.batch, 64, device="cuda")

    def step():
        actions, olds, values = [], [], []
        with torch.no_grad():
            for view in world:
                chances = torch.distributions.Categorical(logits=actor(view))
                action = chances.sample()
                actions.append(action), olds.append(chances.log_prob(action)), values.append(critic(view)[:, 0])
        views, actions, olds, values = world.flatten(0, 1), torch.cat(actions), torch.cat(olds), torch.cat(values)
        for _ in range(4):
            for part in torch.randperm(len(views), device="cuda").chunk(4):
                chances = torch.distributions.Categorical(logits=actor(views[part]))
                ratio = (chances.log_prob(actions[part]) - olds[part]).exp()
                gain = values[part] - values[part].mean()
                loss = -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean() - 0.01 * chances.entropy().mean()
                loss = loss + 0.5 * (critic(views[part])[:, 0] - values[part]).square().mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(actor.parameters(), 0.5)
                optimizer.step()

    return step


def factors(row: Published) -> Step:
    """Users and films: wide tables, a whole optimizer over them."""
    with torch.device("cuda"):
        users, films = nn.Embedding(row.size, 64), nn.Embedding(row.size // 4, 64)
        user, film = torch.randint(0, row.size, (row.batch,)), torch.randint(0, row.size // 4, (row.batch,))
        stars = torch.rand(row.batch)
    parameters = [users.weight, films.weight]
    return training(parameters, lambda: F.mse_loss((users(user) * films(film)).sum(1), stars), row)


def offloaded(row: Published) -> Step:
    """GPT-2 124M whose saved tensors wait in the host's pinned memory."""
    model = GPT2(50304, row.size, fused=True, recompute=False).cuda()
    tokens = torch.randint(0, 50000, (row.batch, row.size), device="cuda")

    def loss():
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            return model(tokens)

    return training(model.parameters(), loss, row, torch.optim.AdamW, fused=True)


PROGRAMS = {
    "Llama 1B": llama,
    "GPT-2": medium,
    "BERT base": bert,
    "experts": experts,
    "GRU translation": translation,
    "VAE": autoencoder,
    "PPO": policy,
    "factors": factors,
    "GPT-2 on the host": offloaded,
}
