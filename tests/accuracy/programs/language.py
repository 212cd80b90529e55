"""Words by PyTorch's own layers; GPT-2 as nanoGPT has it (no dropout, tied words): 124M, medium, in parts, and with what it saves kept by
the host; a Llama of 1.0 B parameters: trained whole, by adapters, and a word at a time."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.accuracy.published import Published
from tests.accuracy.vision import Step, autocast, training


def lstm(row: Published) -> Step:
    with torch.device("cuda"):
        words, head = nn.Embedding(10000, 640), nn.Linear(640, 10000)
        layers = nn.LSTM(640, 640, 2, dropout=0.3, batch_first=True)
        tokens = torch.randint(0, 10000, (row.batch, row.size))

    def loss():
        return F.cross_entropy(head(layers(words(tokens))[0]).flatten(0, 1), tokens.flatten())

    parameters = [*words.parameters(), *layers.parameters(), *head.parameters()]
    return training(parameters, loss, row, torch.optim.SGD, lr=0.1)


def transformer(row: Published) -> Step:
    model = nn.Transformer(d_model=1024, nhead=16, batch_first=True).cuda()
    x = torch.randn(row.batch, row.size, 1024, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        with autocast(row):
            loss = model(x, x).square().mean()
        optimizer.zero_grad()  # so the last gradients are there in the forward pass
        loss.backward()
        optimizer.step()

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


class Block(nn.Module):
    """Of GPT-2."""

    def __init__(self, hidden: int, fused: bool):
        super().__init__()
        self.heads, self.fused = hidden // 64, fused
        self.n1, self.n2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.up, self.down = nn.Linear(hidden, 4 * hidden, bias=False), nn.Linear(4 * hidden, hidden, bias=False)

    def attend(self, x):
        batch, length, hidden = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, 64).transpose(1, 2) for part in self.qkv(x).split(hidden, dim=2)
        )
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            seen = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
            scores = (q @ k.transpose(-2, -1)) * 0.125
            y = F.softmax(scores.masked_fill(~seen, float("-inf")), dim=-1) @ v
        return self.out(y.transpose(1, 2).contiguous().view(batch, length, hidden))

    def forward(self, x):
        x = x + self.attend(self.n1(x))
        return x + self.down(F.gelu(self.up(self.n2(x)), approximate="tanh"))


class GPT2(nn.Module):
    def __init__(self, vocabulary: int, length: int, fused: bool, recompute: bool, hidden: int = 768, layers: int = 12):
        super().__init__()
        self.vocabulary, self.recompute = vocabulary, recompute
        self.words, self.places = nn.Embedding(vocabulary, hidden), nn.Embedding(length, hidden)
        self.blocks, self.norm = nn.ModuleList(Block(hidden, fused) for _ in range(layers)), nn.LayerNorm(hidden)

    def forward(self, tokens):
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        logits = F.linear(self.norm(x), self.words.weight)
        return F.cross_entropy(logits.view(-1, self.vocabulary), tokens.view(-1))


def gpt2(row: Published) -> Step:
    options = row.options
    plain, vocabulary = options.get("attention") == "plain", int(options.get("vocabulary", 50304))
    model = GPT2(vocabulary, row.size, not plain, "recompute" in options).cuda()
    tokens = torch.randint(0, 50000, (row.batch, row.size), device="cuda")
    fused = {"foreach" if options["optimizer"].endswith("foreach") else "fused": True}
    return training(model.parameters(), lambda: model(tokens), row, torch.optim.AdamW, **fused)


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


def offloaded(row: Published) -> Step:
    """GPT-2 124M whose saved tensors wait in the host's pinned memory."""
    model = GPT2(50304, row.size, fused=True, recompute=False).cuda()
    tokens = torch.randint(0, 50000, (row.batch, row.size), device="cuda")

    def loss():
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            return model(tokens)

    return training(model.parameters(), loss, row, torch.optim.AdamW, fused=True)


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
