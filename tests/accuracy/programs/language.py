"""Words by PyTorch's own layers; GPT-2 as nanoGPT has it (no dropout, tied words): 124M, medium, in parts, and with what it saves kept by
the host; a Llama of 1.0 B parameters: trained whole, by adapters, and a word at a time."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.accuracy import gpt, llama
from tests.accuracy.published import Published
from tests.accuracy.runner import Step, autocast, training


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


class Block(gpt.Block):
    gelu = staticmethod(gpt.tanh)


class PlainBlock(Block):
    def mix(self, q, k, v):
        seen = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()
        scores = (q @ k.transpose(-2, -1)) * 0.125
        return F.softmax(scores.masked_fill(~seen, float("-inf")), dim=-1) @ v


class GPT2(gpt.GPT):
    """forward gives the loss."""

    def __init__(self, length: int, block=Block, vocabulary: int = 50304, hidden: int = 768, layers: int = 12):
        blocks = [block(hidden, hidden // 64, bias=False) for _ in range(layers)]
        super().__init__(vocabulary, length, hidden, blocks)

    def given(self, logits, tokens):
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def gpt2(row: Published) -> Step:
    options = row.options
    block = PlainBlock if options.get("attention") == "plain" else Block
    model = GPT2(row.size, block, int(options.get("vocabulary", 50304))).cuda()
    model.recompute = "recompute" in options
    tokens = torch.randint(0, 50000, (row.batch, row.size), device="cuda")
    fused = {"foreach" if options["optimizer"].endswith("foreach") else "fused": True}
    return training(model.parameters(), lambda: model(tokens), row, torch.optim.AdamW, **fused)


def medium(row: Published) -> Step:
    """GPT-2 medium, or 124M whose step is made of four smaller batches."""
    parts = int(row.options.get("parts", 1))
    model = GPT2(row.size, **({"hidden": 1024, "layers": 24} if parts == 1 else {})).cuda()
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
    model = GPT2(row.size).cuda()
    tokens = torch.randint(0, 50000, (row.batch, row.size), device="cuda")

    def loss():
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            return model(tokens)

    return training(model.parameters(), loss, row, torch.optim.AdamW, fused=True)


def repeated(q, k, v, causal: bool):
    times = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(times, dim=1), v.repeat_interleave(times, dim=1)
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


SMALL = llama.Sizes(dim=2048, hidden=5632, vocabulary=32000, layers=16)  # 1.0 B parameters


def block_of_llama(sizes: llama.Sizes) -> llama.Block:
    return llama.Block(sizes, llama.Attention(sizes, repeated), nn.RMSNorm)


def llama_1b(row: Published) -> Step:
    dtype = torch.bfloat16 if row.precision == "bfloat16" else torch.float32
    with torch.device("cuda"):
        model = llama.Llama(SMALL, block=block_of_llama, norm=nn.RMSNorm).to(dtype)
        tokens = torch.randint(0, 32000, (row.batch, row.size))
        turns = torch.outer(torch.arange(row.size), 10000 ** -torch.linspace(0, 1, 32))
        turns = torch.cat([turns, turns], dim=1)
        cos, sin = turns.cos().to(dtype), turns.sin().to(dtype)
    model.turns = lambda x: (cos, sin)
    if row.mode == "infer":
        cache = [torch.randn(row.batch, 8, row.size, 64, device="cuda", dtype=dtype) for _ in range(2)]
        last = cos[-1:], sin[-1:], cache
        model.turns = lambda x: last

        def step():
            with torch.inference_mode():
                return model(tokens[:, -1:])[:, -1].argmax(-1)

        return step

    def loss():
        return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())

    if "adapters" in row.options:
        model.requires_grad_(False)
        for layer in model.layers:
            for name in "qv":
                adapted = llama.Adapted(getattr(layer.attention, name), rank=16, scale=2, dropout=0.05)
                setattr(layer.attention, name, adapted)
        model.cuda().to(dtype)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return training(parameters, loss, row, torch.optim.AdamW)


PROGRAMS = {
    "lstm": lstm,
    "nn.Transformer": transformer,
    "BERT base": bert,
    "GRU translation": translation,
    "gpt2": gpt2,
    "GPT-2": medium,
    "GPT-2 on the host": offloaded,
    "Llama 1B": llama_1b,
}
