"""A training loop by accelerate: DDP, or FSDP2 with "fsdp2" after the program's name; "dry": nothing is saved."""

import sys

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch import nn

plugin = None
if "fsdp2" in sys.argv:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=1000)
accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2, fsdp_plugin=plugin)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
model.to(
    accelerator.device
)  # accelerate's FSDP2 finds parameters by their addresses, which in a dry run a GPU alone gives
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
data = torch.utils.data.TensorDataset(torch.randn(64, 16), torch.randn(64, 1))
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
losses = []
for _ in range(8):
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    losses.append(accelerator.gather(loss.detach().reshape(1)).mean().item())
assert accelerator.num_processes == 2 and x.device.type == "cuda"
states = [state for of_one in optimizer.optimizer.state.values() for state in of_one.values() if state.dim()]
assert len(states) == 2 * sum(
    map(len, (group["params"] for group in optimizer.optimizer.param_groups))
)  # AdamW has two for each
if "dry" not in sys.argv:
    assert losses[-1] < losses[0], losses
    accelerator.save_state("saved")
    accelerator.wait_for_everyone()
    accelerator.load_state("saved")
accelerator.end_training()
