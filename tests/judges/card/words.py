"""Models of words, speech, and pictures beside words, as transformers has them: weights made up, its own settings but for sizes."""

from collections.abc import Callable

import torch

from tests.judges.card.training import Step, autocast, training

LLAMA = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "use_cache": False,
}


def _model(name: str, config, dtype=torch.float32):
    import transformers

    with torch.device("cuda"):
        return getattr(transformers, name)(config).to(dtype).cuda()


def _config(name: str, **values):
    import transformers

    return getattr(transformers, name)(**values)


def tokens(batch: int, length: int, vocabulary: int = 30000) -> torch.Tensor:
    return torch.randint(0, vocabulary, (batch, length), device="cuda")


def language(
    name: str,
    precision: str,
    batch: int,
    length: int,
    *,
    infer: bool = False,
    checkpointing: bool = False,
    adapters: bool = False,
    attention: str = "sdpa",
    mask: bool = False,
    **values,
) -> Step:
    """name: of the class; its configuration has the same, up to "For". precision: "bfloat16" is of the weights, too."""
    config = _config(_config_name(name), **values)
    config._attn_implementation = attention
    model = _model(name, config, torch.bfloat16 if precision == "bfloat16" else torch.float32)
    x = tokens(batch, length, config.vocab_size)
    inputs = {"input_ids": x}
    if mask:
        inputs["attention_mask"] = torch.ones_like(x)
        inputs["attention_mask"][:, -length // 8 :] = 0
    if infer:
        return _inference(model, precision, inputs)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.config.use_cache = False
    if adapters:
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(r=16, target_modules=["q_proj", "v_proj"]))
    return training(model, lambda: model(**inputs, labels=x).loss, precision)


def _config_name(name: str) -> str:
    for end in ("LMHeadModel", "Model"):
        name = name.removesuffix(end)
    return f"{name.split('For')[0]}Config"


def _inference(model, precision: str, inputs: dict) -> Step:
    model.eval()

    def step():
        with torch.no_grad(), autocast(precision):
            model(**inputs)

    return step


def translation(name: str, precision: str, batch: int, length: int, **values) -> Step:
    model = _model(name, _config(_config_name(name), **values))
    x, y = tokens(batch, length), tokens(batch, length // 2)
    return training(model, lambda: model(input_ids=x, labels=y).loss, precision)


def images(name: str, precision: str, batch: int, size: int = 224, **values) -> Step:
    model = _model(name, _config(_config_name(name), **values))
    x = torch.randn(batch, 3, size, size, device="cuda")
    return training(model, lambda: model(x)[0].float().square().mean(), precision)


def whisper(precision: str, batch: int) -> Step:
    sizes = {f"{part}_{what}": number for part in ("encoder", "decoder") for what, number in WHISPER_BASE.items()}
    model = _model("WhisperForConditionalGeneration", _config("WhisperConfig", d_model=512, **sizes))
    x, y = torch.randn(batch, 80, 3000, device="cuda"), tokens(batch, 128, 50000)
    return training(model, lambda: model(input_features=x, labels=y).loss, precision)


WHISPER_BASE = {"layers": 6, "attention_heads": 8, "ffn_dim": 2048}


def clip(precision: str, batch: int) -> Step:
    model = _model("CLIPModel", _config("CLIPConfig"))
    x, y = torch.randn(batch, 3, 224, 224, device="cuda"), tokens(batch, 77, 49000)
    return training(model, lambda: model(input_ids=y, pixel_values=x, return_loss=True).loss, precision)


def generation(batch: int, new: int) -> Step:
    model = _model("GPT2LMHeadModel", _config("GPT2Config"), torch.bfloat16).eval()
    x = tokens(batch, 64, 50000)

    def step():
        with torch.no_grad():
            model.generate(x, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0)

    return step


BASE = {"d_model": 768, "decoder_start_token_id": 0}
BART = {
    f"{part}_{what}": n
    for part in ("encoder", "decoder")
    for what, n in (("layers", 6), ("attention_heads", 12), ("ffn_dim", 3072))
}
DEBERTA = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "relative_attention": True,
    "pos_att_type": ["c2p", "p2c"],
    "position_buckets": 256,
    "vocab_size": 30000,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
}
ALBERT = {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12}
NEOX = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
    "vocab_size": 50304,
    "use_cache": False,
}
OPT = {"hidden_size": 1024, "num_hidden_layers": 24, "ffn_dim": 4096, "num_attention_heads": 16, "use_cache": False}
QWEN = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "use_cache": False,
}
GEMMA = {
    "vocab_size": 100000,
    "hidden_size": 1152,
    "intermediate_size": 4608,
    "num_hidden_layers": 13,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 144,
    "use_cache": False,
}
MISTRAL = {
    "sliding_window": 1024,
    "hidden_size": 2048,
    "intermediate_size": 7168,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "use_cache": False,
}
PHI = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "use_cache": False,
}
XLNET = {"d_model": 768, "n_layer": 12, "n_head": 12, "d_inner": 3072}
T5 = {"d_ff": 3072, "num_layers": 12, "num_heads": 12}
DINO = {"image_size": 224, "patch_size": 14}

PROGRAMS: dict[str, Callable[[], Step]] = {
    "bert_mlm fp32 b32 s128": lambda: language("BertForMaskedLM", "fp32", 32, 128, mask=True),
    "bert_mlm fp16 b64 s128": lambda: language("BertForMaskedLM", "fp16", 64, 128, mask=True),
    "roberta eager fp16 b16 s256": lambda: language(
        "RobertaForMaskedLM", "fp16", 16, 256, attention="eager", max_position_embeddings=514, vocab_size=50265
    ),
    "distilbert bf16 b64 s256": lambda: language("DistilBertForMaskedLM", "bf16", 64, 256),
    "albert fp16 b32 s256": lambda: language("AlbertForMaskedLM", "fp16", 32, 256, **ALBERT),
    "electra infer fp32 b64 s128": lambda: language("ElectraForPreTraining", "fp32", 64, 128, infer=True),
    "deberta_v2 fp16 b16 s128": lambda: language("DebertaV2ForMaskedLM", "fp16", 16, 128, attention="eager", **DEBERTA),
    "modernbert bf16 b16 s512": lambda: language("ModernBertForMaskedLM", "bf16", 16, 512),
    "t5_base fp32 b8 s256": lambda: translation("T5ForConditionalGeneration", "fp32", 8, 256, **BASE, **T5),
    "bart_base bf16 b16 s256": lambda: translation(
        "BartForConditionalGeneration", "bf16", 16, 256, d_model=768, **BART
    ),
    "gpt2 hf fp32 b8 s512": lambda: language("GPT2LMHeadModel", "fp32", 8, 512),
    "gpt2 medium bf16 b8 s1024 checkpointing": lambda: language(
        "GPT2LMHeadModel", "bf16", 8, 1024, checkpointing=True, n_embd=1024, n_layer=24, n_head=16
    ),
    "gpt_neox 410m bfloat16 b8 s1024": lambda: language("GPTNeoXForCausalLM", "bfloat16", 8, 1024, **NEOX),
    "opt_350m fp16 b8 s512": lambda: language("OPTForCausalLM", "fp16", 8, 512, **OPT),
    "llama 1b bfloat16 b4 s2048 checkpointing": lambda: language(
        "LlamaForCausalLM", "bfloat16", 4, 2048, checkpointing=True, **LLAMA
    ),
    "llama 1b lora bf16 b4 s1024": lambda: language("LlamaForCausalLM", "bf16", 4, 1024, adapters=True, **LLAMA),
    "llama 1b infer bfloat16 b1 s1024": lambda: language("LlamaForCausalLM", "bfloat16", 1, 1024, infer=True, **LLAMA),
    "qwen3 0.6b bf16 b4 s1024": lambda: language("Qwen3ForCausalLM", "bf16", 4, 1024, **QWEN),
    "gemma2 eager bfloat16 b2 s1024": lambda: language(
        "Gemma2ForCausalLM", "bfloat16", 2, 1024, attention="eager", **GEMMA
    ),
    "mistral window bfloat16 b1 s4096": lambda: language("MistralForCausalLM", "bfloat16", 1, 4096, **MISTRAL),
    "phi bf16 b4 s1024": lambda: language("PhiForCausalLM", "bf16", 4, 1024, **PHI),
    "xlnet fp16 b8 s256": lambda: language("XLNetLMHeadModel", "fp16", 8, 256, attention="eager", **XLNET),
    "vit hf bf16 b64": lambda: images("ViTForImageClassification", "bf16", 64),
    "dinov2 fp32 b32": lambda: images("Dinov2Model", "fp32", 32, **DINO),
    "swin hf fp16 b64": lambda: images("SwinForImageClassification", "fp16", 64),
    "segformer bf16 b8 512": lambda: images("SegformerForSemanticSegmentation", "bf16", 8, 512),
    "convnextv2 hf fp32 b32": lambda: images("ConvNextV2ForImageClassification", "fp32", 32),
    "whisper base fp16 b16": lambda: whisper("fp16", 16),
    "clip bf16 b64": lambda: clip("bf16", 64),
    "gpt2 generate bfloat16 b8 n32": lambda: generation(8, 32),
}
