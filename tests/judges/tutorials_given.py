"""What the tutorials leave to the reader: a model, a data set, who starts the processes. The pages' own code is not here."""

from dataclasses import dataclass, field

LIMIT = 600  # seconds: some start eight processes


@dataclass(frozen=True)
class Tutorial:
    """A page of the checkout. blocks: which of its blocks of code, in this order; none: all. ranks: by torchrun; 0: it starts them itself.

    before, after: what the page leaves to the reader. changes: {its words: ours}, in all blocks. shows: a pattern of the output.
    like: the card. commit: the last one that has the page.
    """

    page: str
    gpus: int
    shows: str
    blocks: tuple[int, ...] = ()
    ranks: int = 0
    before: str = ""
    after: str = ""
    changes: dict[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    commit: str = ""
    like: str = "T4"
    limit: float = LIMIT


# MNIST without a download, and the CartPole of gym before 0.26 whose pole falls after eight steps
STAND_INS = {
    "given": """
import torch, torchvision
from torch import nn

class MNIST(torchvision.datasets.FakeData):
    def __init__(self, root, train=True, download=False, transform=None):
        super().__init__(128, (1, 28, 28), 10, transform)

    def __getitem__(self, at):
        image, label = super().__getitem__(at)
        return image, int(label)

torchvision.datasets.MNIST = MNIST

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(784, 50), nn.ReLU(), nn.Linear(50, 10), nn.LogSoftmax(1))

    def forward(self, x):
        return self.layers(x)
""",
    "gym": """
import types
import numpy as np

class CartPole:
    spec = types.SimpleNamespace(reward_threshold=0.3)

    def seed(self, seed):
        self.random = np.random.default_rng(seed)

    def reset(self):
        self.steps = 0
        return self.random.random(4)

    def step(self, action):
        self.steps += 1
        return self.random.random(4), 1.0, self.steps == 8, {}

def make(name):
    return CartPole()
""",
    "llama": """
from dataclasses import dataclass
import torch
import torch.nn.functional as F
from torch import nn

@dataclass
class ModelArgs:
    vocab_size: int = 64
    dim: int = 32
    n_layers: int = 4
    n_heads: int = 4

class Attention(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.head = args.dim // args.n_heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(args.dim, args.dim, bias=False) for _ in range(4))

    def forward(self, x, freqs):
        q, k, v = (w(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        return self.wo(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

class FeedForward(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.w1, self.w3 = (nn.Linear(args.dim, 2 * args.dim, bias=False) for _ in range(2))
        self.w2 = nn.Linear(2 * args.dim, args.dim, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))

class TransformerBlock(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.LayerNorm(args.dim), nn.LayerNorm(args.dim)
        self.attention, self.feed_forward = Attention(args), FeedForward(args)

    def forward(self, x):
        h = x + self.attention(self.attention_norm(x), None)
        return h + self.feed_forward(self.ffn_norm(h))

class Transformer(nn.Module):
    def __init__(self, args=None):
        super().__init__()
        args = args or ModelArgs()
        self.tok_embeddings = nn.Embedding(args.vocab_size, args.dim)
        self.layers = nn.ModuleList(TransformerBlock(args) for _ in range(args.n_layers))
        self.norm, self.output = nn.LayerNorm(args.dim), nn.Linear(args.dim, args.vocab_size, bias=False)

    def forward(self, x):
        h = self.tok_embeddings(x)
        for layer in self.layers:
            h = layer(h)
        return self.output(self.norm(h))

    def reset_parameters(self):
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.1)
""",
}
RANK = """
import itertools, os, torch, torch.distributed as dist
from torch import nn
rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", rank)
torch.cuda.set_device(device)
"""
NCCL = RANK + 'dist.init_process_group("nccl")\n'
END = "\nprint(f'rank {dist.get_rank()} has done all')\ndist.destroy_process_group()\n"
BOTH = "rank [01] has done all.*rank [01] has done all"
FSDP2 = (
    NCCL
    + """
from llama import *
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard
from torch.distributed.checkpoint.state_dict import StateDictOptions
epochs, vocab_size, batch_size, seq_len, max_norm, model_args = 2, 64, 2, 8, 1.0, ModelArgs()
os.makedirs("checkpoints", exist_ok=True)
"""
)
TP = (
    NCCL
    + """
from llama import *
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
torch.manual_seed(0)
model = Transformer().to(device)
input_ids, labels = (torch.randint(0, 64, (2, 8), device=device) for _ in range(2))
expected = model(input_ids)
"""
)
DATA = "import given\n"
MNIST_NEEDS = """
from math import ceil
from random import Random
from given import Net
import torch.nn.functional as F
import torch.optim as optim
from torchvision import datasets, transforms
"""
MLP = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
class MLPModule(nn.Module):
    def __init__(self):
        super().__init__()
        self.net1, self.relu, self.net2 = nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 10)
    def forward(self, x):
        return self.net2(self.relu(self.net1(x)))
model = parallelize_module(
    MLPModule().to(device), init_device_mesh("cuda", (2,)), {"net1": ColwiseParallel(), "net2": RowwiseParallel()}
)
inp = torch.rand(20, 10, device=device)
"""
