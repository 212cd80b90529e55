"""DeepSpeed: ZeRO of the stage that is the first argument, or a pipeline of two stages ("pipeline"); "dry": losses are not looked at."""

import sys

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn

deepspeed.init_distributed("nccl")
rank = torch.distributed.get_rank()
torch.cuda.set_device(rank)
torch.manual_seed(0)
settings = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "steps_per_print": 1000,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}},
}
layers = [LayerSpec(nn.Linear, 32, 64), LayerSpec(nn.ReLU), LayerSpec(nn.Linear, 64, 64), LayerSpec(nn.Linear, 64, 10)]
x, y = torch.randn(4, 32), torch.randint(0, 10, (4,))
losses = []
if sys.argv[1] == "pipeline":
    model = PipelineModule(layers, num_stages=2, loss_fn=nn.functional.cross_entropy)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=settings)
    losses = [engine.train_batch(iter(2 * [(x, y)])).item() for _ in range(4)]
else:
    settings |= {"bf16": {"enabled": True}, "zero_optimization": {"stage": int(sys.argv[1]), "overlap_comm": True}}
    with deepspeed.zero.Init(config_dict_or_path=settings, enabled=sys.argv[1] == "3"):
        model = nn.Sequential(*[layer.build() for layer in layers])
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
    for _ in range(8):
        loss = nn.functional.cross_entropy(engine(x.bfloat16().cuda()).float(), y.cuda())
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
assert "dry" in sys.argv or losses[-1] < losses[0], losses
if "dry" not in sys.argv and sys.argv[1] == "3":
    engine.save_checkpoint("saved")
    engine.load_checkpoint("saved")
torch.distributed.destroy_process_group()
