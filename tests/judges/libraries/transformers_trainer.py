"""transformers' Trainer on a small BERT: DataParallel in one process on several GPUs, DDP under torchrun."""

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

torch.manual_seed(0)
words = torch.randint(0, 100, (32, 16))
rows = [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": int(row[0]) % 2} for row in words]
sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
model = BertForSequenceClassification(BertConfig(vocab_size=100, max_position_embeddings=16, **sizes))
often = {"logging_steps": 2, "eval_strategy": "epoch", "save_strategy": "no"}
settings = TrainingArguments("out", num_train_epochs=2, per_device_train_batch_size=4, fp16=True, report_to=[], **often)
trainer = Trainer(model, settings, train_dataset=rows, eval_dataset=rows)
trainer.train()
assert {parameter.device for parameter in trainer.model.parameters()} == {settings.device}
assert settings.device.type == "cuda" and settings.n_gpu * settings.world_size == torch.cuda.device_count() == 2
