"""device_map: a model whose layers are put on two GPUs by the memory that is free, writes what it writes on the CPU."""

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8, "num_attention_heads": 4}
LlamaForCausalLM(LlamaConfig(vocab_size=128, num_key_value_heads=2, **sizes)).save_pretrained("tiny")
words = torch.tensor([[1, 2, 3]])
on_cpu = AutoModelForCausalLM.from_pretrained("tiny").generate(words, max_new_tokens=8, do_sample=False)
model = AutoModelForCausalLM.from_pretrained("tiny", device_map="auto")
written = model.generate(words.to("cuda:0"), max_new_tokens=8, do_sample=False)
assert set(model.hf_device_map.values()) == {0, 1}, model.hf_device_map
assert written.tolist() == on_cpu.tolist()
