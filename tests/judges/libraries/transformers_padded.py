"""Padded texts: a loss of the words that count alone, and texts written on to their end: as on the CPU, or dry, where they end as well."""

import sys

import torch
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=128, pad_token_id=0, **sizes))
words, mask = torch.randint(3, 128, (3, 12)), torch.ones(3, 12, dtype=torch.long)
words[0, :4] = mask[0, :4] = 0


def found(place):
    there = {"input_ids": words.to(place), "attention_mask": mask.to(place)}
    counts = there["attention_mask"].bool()
    loss = functional.cross_entropy(model.to(place)(**there).logits[counts], there["input_ids"][counts])
    loss.backward()
    return loss.item(), model.generate(**there, max_new_tokens=8, do_sample=False)


(loss, written), (on_cpu, expected) = found("cuda"), found("cpu")
assert written.shape == (3, 20)
if sys.argv[1:] != ["dry"]:
    assert loss == on_cpu and torch.equal(written.cpu(), expected)
