"""transformers' Trainer on a causal language model made from a kind's configuration: gpt2, opt, ...; then TrainingArguments' options."""

import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments

config = AutoConfig.for_model(sys.argv.pop(1))
(settings,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
model = AutoModelForCausalLM.from_config(config)
words = torch.randint(0, config.vocab_size, (256, 512))
rows = [{"input_ids": row, "labels": row} for row in words]
Trainer(model, settings, train_dataset=rows).train()
