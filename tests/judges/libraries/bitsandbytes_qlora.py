"""QLoRA: a model whose weights are of 4 bits and on two GPUs learns its adapters, with an optimizer of 8 bits."""

import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
LlamaForCausalLM(LlamaConfig(vocab_size=256, num_key_value_heads=4, **sizes)).save_pretrained("tiny")
quantized = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float16)
model = AutoModelForCausalLM.from_pretrained("tiny", quantization_config=quantized, device_map="balanced")
assert set(model.hf_device_map.values()) == {0, 1}, model.hf_device_map
model = prepare_model_for_kbit_training(model)
model = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
weight = model.base_model.model.model.layers[0].mlp.up_proj.weight
assert weight.dtype is torch.uint8 and weight.device == torch.device("cuda:0"), weight
rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 256, (4, 16)).repeat(16, 1)]
often = {"logging_steps": 1, "save_strategy": "no", "report_to": []}
settings = TrainingArguments(
    "out", max_steps=6, per_device_train_batch_size=4, learning_rate=0.03, optim="paged_adamw_8bit", **often
)
trainer = Trainer(model, settings, train_dataset=rows)
trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
assert losses[-1] < losses[0], losses
