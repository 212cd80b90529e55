"""Megatron Core's GPT: cut over `tp` ranks and into `pp` stages, the rest in parallel on other rows; "zero": its distributed optimizer;
"dry": losses are not looked at."""

import os
import sys

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

ROWS, WORDS, KNOWN = 4, 32, 64
words = torch.randint(KNOWN, (ROWS, WORDS + 1), generator=torch.Generator().manual_seed(0))
hidden = torch.ones(WORDS, WORDS).triu(1).bool().view(1, 1, WORDS, WORDS)


def step_of(rows, model):
    given = [tensor.cuda() for tensor in (words[:, :-1], torch.arange(WORDS).repeat(ROWS, 1), hidden)]

    def mean(losses):
        return losses.mean(), {"loss": losses.detach().mean()}

    return model(*given, labels=words[:, 1:].cuda()), mean


if __name__ == "__main__":  # saving starts processes that import this file
    tp, pp, zero = int(sys.argv[1]), int(sys.argv[2]), "zero" in sys.argv
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl")
    parallel_state.initialize_model_parallel(tp, pp)
    model_parallel_cuda_manual_seed(0)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        pipeline_dtype=torch.float32,
    )
    gpt = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=KNOWN,
        max_sequence_length=WORDS,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    ).cuda()
    ddp = DistributedDataParallelConfig(overlap_grad_reduce=zero, use_distributed_optimizer=zero)
    model = DistributedDataParallel(config=config, ddp_config=ddp, module=gpt)
    settings = OptimizerConfig(optimizer="adam", lr=1e-2, use_distributed_optimizer=zero)
    optimizer = get_megatron_optimizer(settings, [model])
    losses = []
    for _ in range(4):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        told = get_forward_backward_func()(
            forward_step_func=step_of,
            data_iterator=iter(()),
            model=model,
            num_microbatches=2,
            seq_length=WORDS,
            micro_batch_size=ROWS,
            forward_only=False,
        )
        finalize_model_grads([model])
        optimizer.step()
        losses += [each["loss"].item() for each in told]
    assert "dry" in sys.argv or not losses or losses[-1] < losses[0], losses
    if "dry" not in sys.argv:
        os.makedirs("saved", exist_ok=True)
        dist_checkpointing.save(gpt.sharded_state_dict(), "saved")
        gpt.load_state_dict(dist_checkpointing.load(gpt.sharded_state_dict(), "saved"))
    torch.distributed.destroy_process_group()
