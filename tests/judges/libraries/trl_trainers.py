"""TRL's trainers on a small Llama under torchrun: sft (with LoRA), dpo (with LoRA), grpo. Its Triton kernels are interpreted."""

import os
import sys

os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

torch.manual_seed(0)
kind = sys.argv[1]
words = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{at}" for at in range(200))]
split = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="<unk>"))
split.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=split, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=256, num_key_value_heads=2, **sizes, **ends))
settings = {"output_dir": "out", "max_steps": 2, "per_device_train_batch_size": 2, "logging_steps": 1, "report_to": []}
settings |= {"save_strategy": "no", "bf16": False}
lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def says(first: int, length: int) -> str:
    return " ".join(f"w{(first * 7 + at) % 200}" for at in range(length))


prompts = [says(row, 4) for row in range(16)]
if kind == "sft":
    rows = {"text": [says(row, 10) for row in range(16)]}
    trainer = SFTTrainer(
        model,
        SFTConfig(**settings),
        train_dataset=Dataset.from_dict(rows),
        processing_class=tokenizer,
        peft_config=lora,
    )
elif kind == "dpo":
    rows = {
        "prompt": prompts,
        "chosen": [says(row, 4) for row in range(16)],
        "rejected": [says(row, 5) for row in range(16)],
    }
    trainer = DPOTrainer(
        model,
        args=DPOConfig(**settings),
        train_dataset=Dataset.from_dict(rows),
        processing_class=tokenizer,
        peft_config=lora,
    )
else:
    trainer = GRPOTrainer(
        model,
        lambda completions, **others: [float(len(completion)) for completion in completions],
        GRPOConfig(**settings, num_generations=2, max_completion_length=8),
        Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer,
    )
trainer.train()
learned = trainer.accelerator.unwrap_model(trainer.model)
assert {parameter.device for parameter in learned.parameters()} == {torch.device("cuda", torch.distributed.get_rank())}
assert [entry for entry in trainer.state.log_history if "loss" in entry]
