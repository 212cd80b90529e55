"""torch._dynamo is imported when a program needs it (_compat/dynamo.py): what trains eagerly does without, and whoever asks finds all of it."""

import pytest

from tests.forks import DYNAMO, outcomes

TRAINED = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

@torch.compiler.disable(recursive=False)
def loss_of(out):
    "The sum."
    return out.sum()

def train():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    dist.init_process_group("nccl", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    ddp = DistributedDataParallel(model)
    for _ in range(2):
        loss_of(checkpoint(model[0], ddp(torch.ones(2, 4, device="cuda")), use_reentrant=False)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss_of.__doc__ == "The sum."
    return [p.double().sum().item() for p in model.parameters()]
"""
WAITS = "import sys; waits = lambda name='': type(sys.modules['torch._dynamo' + name]).__name__ == '_Waiting'\n"
STEP = """
weight = torch.nn.Parameter(torch.ones(2, device="cuda"))
optimizer = torch.optim.SGD([weight], lr=0.5)
weight.grad = torch.ones_like(weight)
optimizer.step()
assert waits()
"""
CASES = {
    "numbers are the same with it": TRAINED
    + """
torch.manual_seed(1)
without = train()
dist.destroy_process_group()
assert waits() and "sympy" not in sys.modules
torch._dynamo.reset()
assert not waits() and "sympy" in sys.modules
torch.manual_seed(1)
assert train() == without
""",
    "a part by its name": STEP
    + "import torch._dynamo.eval_frame as part; assert part is torch._dynamo.eval_frame; assert not waits(); "
    "assert part.__spec__.loader is part.__loader__; assert part.OptimizedModule is torch._dynamo.OptimizedModule",
    "a part that waits": STEP
    + "from torch._dynamo import utils; import torch._dynamo.utils as again; assert waits('.utils'); "
    "before = utils.counters; import torch._dynamo.convert_frame; assert not waits('.utils'); "
    "assert utils is again is torch._dynamo.utils is sys.modules['torch._dynamo.utils']; assert torch._dynamo.convert_frame.counters is before",
    "one that is not there": STEP
    + """
try:
    import torch._dynamo.no_such_part
except ModuleNotFoundError as error:
    assert error.name == "torch._dynamo.no_such_part"
try:
    torch._dynamo.no_such_name
except AttributeError as error:
    assert "no_such_name" in str(error)
assert not waits()
""",
    "its settings alone": STEP
    + "torch._dynamo.config.cache_size_limit = 99; assert waits(); import torch._dynamo.config as config; "
    "assert waits() and config.cache_size_limit == 99; torch._dynamo.eval_frame; assert torch._dynamo.config is config and config.cache_size_limit == 99",
    "a setting that DDP heeds": STEP + "torch._dynamo.config.optimize_ddp = 'python_reducer'; "
    "assert torch._dynamo.utils.get_optimize_ddp_mode() == 'python_reducer'",
    "what is set on it stays": STEP
    + "torch._dynamo.graph_break = len; assert not waits() and torch._dynamo.graph_break is len",
    "what was disabled before": STEP
    + """
function = torch._dynamo.disable(lambda: torch.compiler.is_compiling())
assert function() is False and waits()
assert torch._dynamo.is_compiling() is False and not waits()
assert function() is False
""",
    "a module": STEP
    + "layer = torch._dynamo.disable(torch.nn.Linear(2, 2)); assert layer(torch.ones(1, 2)).shape == (1, 2)",
    "torchvision": STEP
    + """
import torchvision.ops.roi_align
asked = torchvision.ops.roi_align.__globals__["is_compile_supported"]
assert waits(".utils")
assert asked("mps") is False and not waits(".utils")
assert asked("cpu") == torch._dynamo.utils.is_compile_supported("cpu")
""",
    "threads": STEP
    + """
import threading
begin, failed = threading.Barrier(4), []
def use(number):
    begin.wait()
    try:
        torch._dynamo.OptimizedModule if number % 2 else optimizer.step()
    except Exception as error:
        failed.append(error)
threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert not failed and not waits(), failed
""",
    "a compiled function": """
double = torch.compile(lambda x: 2 * x, mode="max-autotune", fullgraph=True)
@torch.compile(dynamic=True)
def triple(x, *, by=3):
    "Three times."
    return by * x
x = torch.ones(2, device="cuda")
assert double(x).tolist() == [2, 2] and triple(x, by=4).tolist() == [4, 4] and triple.__doc__ == "Three times."
assert "torch._dynamo" not in sys.modules and "torch._inductor" not in sys.modules
for wrong in ({"mode": "fast"}, {"options": {"quick": True}}, {"backend": "none"}):
    try:
        torch.compile(lambda x: x, **wrong)(x)
        assert False, wrong
    except Exception as error:
        assert not isinstance(error, AssertionError), wrong
model = torch.compile(torch.nn.Linear(2, 2).cuda())
assert model(x).shape == (2,) and list(model.state_dict()) == ["_orig_mod.weight", "_orig_mod.bias"]
virtualgpu.reset()
import torch._dynamo.utils
torch._dynamo.config.suppress_errors = False
assert not torch._dynamo.utils.counters["frames"]
compiled = torch.compile(lambda x: x + 1, backend="eager")
assert compiled(torch.ones(2)).tolist() == [2, 2] and torch._dynamo.utils.counters["frames"]["total"] == 1
""",
    "what is allowed in graphs": """
def allowed(x): return x + 1
assert torch.compiler.allow_in_graph(allowed) is allowed and waits()
virtualgpu.reset()
assert waits()
graphs = []
def backend(module, inputs):
    graphs.append(module)
    return module.forward
assert torch.compile(lambda x: 2 * allowed(x), backend=backend)(torch.ones(2)).tolist() == [4, 4]
assert not waits() and allowed in [node.target for node in graphs[0].graph.nodes]
""",
    "deterministic algorithms": """
def state(): return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
torch.use_deterministic_algorithms(True, warn_only=True)
assert state() == (True, True)
torch.use_deterministic_algorithms(False)
assert state() == (False, False)
torch.use_deterministic_algorithms(True)
assert state() == (True, False) and "torch._inductor" not in sys.modules
for wrong in (1, None):
    try:
        torch.use_deterministic_algorithms(wrong)
        assert False
    except TypeError as error:
        assert "_set_deterministic_algorithms" in str(error)
virtualgpu.gpus(2)
assert state() == (True, False)
virtualgpu.reset()
import torch._inductor.config
assert torch._inductor.config.deterministic is True and state() == (True, False)
""",
    "virtual GPUs go": STEP
    + "import virtualgpu; virtualgpu.reset(); import torch._dynamo; assert not waits(); optimizer.zero_grad(); "
    "torch._dynamo.graph_break; assert 'torch._dynamo.utils' in sys.modules",
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """{case: its exit status and what it wrote}."""
    programs = [WAITS + "virtualgpu.gpus(1)\n" + code for code in CASES.values()]
    folder = tmp_path_factory.mktemp("programs")
    # Nearly half of what torch._dynamo takes to import; from the second on, none asks whether these are there.
    ended = outcomes(programs, folder, DYNAMO, first=1)
    return dict(zip(CASES, ended, strict=True))


@pytest.mark.parametrize("case", CASES)
def test_in_a_process_of_its_own(ended, case):
    status, said = ended[case]
    assert status == 0, said
