"""Data of the form that programs expect, made up and small: files as torchvision, datasets and transformers read them.

`make(what, folder)`: what is "mnist:data:2000" and the like, the kind, where in the folder, how many.
"""

import gzip
import json
import pickle
import struct
from pathlib import Path

import numpy as np


def make(what: str, folder: Path) -> None:
    """One of these sets of data, under `folder`. Raises KeyError where there is no such kind."""
    kind, _, rest = what.partition(":")
    place, _, count = rest.partition(":")
    _KINDS[kind](folder / (place or "data"), int(count or 256))


def _pictures(random, count: int, shape: tuple[int, ...], classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Pictures that tell their class: noise, and a brighter band where the class says."""
    labels = random.integers(0, classes, count)
    pictures = random.integers(0, 128, (count, *shape), dtype=np.uint8)
    height = shape[0]
    for picture, label in zip(pictures, labels, strict=True):
        at = int(label) * height // classes
        picture[at : at + max(1, height // classes)] += 100
    return pictures, labels


def _mnist(folder: Path, count: int) -> None:
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    for part, seed, many in (("train", 1, count), ("t10k", 2, max(64, count // 4))):
        pictures, labels = _pictures(np.random.default_rng(seed), many, (28, 28), 10)
        images = struct.pack(">IIII", 0x00000803, many, 28, 28) + pictures.tobytes()
        names = struct.pack(">II", 0x00000801, many) + labels.astype(np.uint8).tobytes()
        for name, content in ((f"{part}-images-idx3-ubyte", images), (f"{part}-labels-idx1-ubyte", names)):
            (raw / name).write_bytes(content)
            (raw / f"{name}.gz").write_bytes(gzip.compress(content, 1))


def _cifar(folder: Path, count: int, classes: int) -> None:
    hundred = classes == 100
    inside = folder / ("cifar-100-python" if hundred else "cifar-10-batches-py")
    inside.mkdir(parents=True, exist_ok=True)
    parts = ["train", "test"] if hundred else [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    for seed, part in enumerate(parts):
        many = count if hundred and part == "train" else max(16, count // 4) if "test" in part else count // 5
        pictures, labels = _pictures(np.random.default_rng(seed), many, (32, 32, 3), classes)
        data = pictures.transpose(0, 3, 1, 2).reshape(many, -1)
        content = {"data": data, "fine_labels" if hundred else "labels": [int(label) for label in labels]}
        (inside / part).write_bytes(pickle.dumps(content))
    names = {"fine_label_names" if hundred else "label_names": [str(at) for at in range(classes)]}
    (inside / ("meta" if hundred else "batches.meta")).write_bytes(pickle.dumps(names))


def _folder(folder: Path, count: int) -> None:
    """ImageFolder: train/ and val/, a folder a class."""
    from PIL import Image

    for part, seed, many in (("train", 1, count), ("val", 2, max(8, count // 4))):
        pictures, labels = _pictures(np.random.default_rng(seed), many, (64, 64, 3), 10)
        for at, (picture, label) in enumerate(zip(pictures, labels, strict=True)):
            inside = folder / part / f"class{label}"
            inside.mkdir(parents=True, exist_ok=True)
            Image.fromarray(picture).save(inside / f"{at}.png")


# fmt: off
_WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "one", "dog", "run", "home", "to", "eat", "red", "fish", "by", "sea", "while"]
# fmt: on


def _sentences(count: int) -> list[str]:
    random = np.random.default_rng(3)
    return [" ".join(random.choice(_WORDS, 24)) for _ in range(count)]


def _text(folder: Path, count: int) -> None:
    """A data set of one column "text", as `datasets.load_dataset(folder)` reads it."""
    folder.mkdir(parents=True, exist_ok=True)
    for part, many in (("train", count), ("validation", max(8, count // 8))):
        (folder / f"{part}.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in _sentences(many)))


def _words(folder: Path, count: int) -> None:
    """One file of plain text, with the letters that minGPT's prompt has."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.write_text("\n".join(["O God, O God!", *_sentences(count)]))


def _tokens(folder: Path, count: int) -> None:
    """One file of unsigned 16-bit tokens."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    np.random.default_rng(4).integers(0, 512, count).astype(np.uint16).tofile(folder)


def _llama(folder: Path, count: int) -> None:
    """A Llama's configuration `count` wide, and a tokenizer of a few words, as transformers reads them from a folder."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    special = ["<unk>", "<s>", "</s>"]
    tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate([*special, *_WORDS])}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    _configuration(folder, {"hidden_size": count, "intermediate_size": 2 * count, "num_hidden_layers": 2, "num_attention_heads": 8,
                            "num_key_value_heads": 4, "vocab_size": 512})  # fmt: skip
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 1024, **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


# What the hub's configurations of these models say
_PUBLISHED = {
    "llama1b": (2048, 8192, 16, 32, 8, 128256, True), "llama8b": (4096, 14336, 32, 32, 8, 128256, False),
    "llama405b": (16384, 53248, 126, 128, 8, 128256, False),
}  # fmt: skip


def _configuration(folder: Path, shapes: dict) -> None:
    """A Llama of these shapes, as transformers reads it from a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5, "max_position_embeddings": 8192,
        "rope_theta": 500000.0, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, "tie_word_embeddings": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config | shapes))


def _published(name: str, folder: Path) -> None:
    words = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    _llama(folder, 64)
    _configuration(folder, dict(zip((*words, "vocab_size", "tie_word_embeddings"), _PUBLISHED[name], strict=True)))


def _pairs(folder: Path, count: int) -> None:
    """Pairs of sentences with a label, as GLUE has them."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = _sentences(2 * count)
    files = "".join(f"  - split: {part}\n    path: {part}.jsonl\n" for part in ("train", "validation"))
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: mrpc\n  data_files:\n{files}---\n")
    for part, many in (("train", count), ("validation", max(8, count // 8))):
        rows = [
            {"sentence1": lines[at], "sentence2": lines[at + many], "label": at % 2, "idx": at} for at in range(many)
        ]
        (folder / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


_KINDS = {
    "mnist": _mnist,
    "cifar10": lambda folder, count: _cifar(folder, count, 10),
    "cifar100": lambda folder, count: _cifar(folder, count, 100),
    "folder": _folder,
    "text": _text,
    "words": _words,
    "tokens": _tokens,
    "llama": _llama,
    "pairs": _pairs,
    **{name: lambda folder, count, name=name: _published(name, folder) for name in _PUBLISHED},
}
