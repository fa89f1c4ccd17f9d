"""What the scripts of benchmarks/field.toml read, generated small: files in the formats that they expect."""

from __future__ import annotations

import json
import pickle
import random
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np


def mnist(folder: Path) -> None:
    """Write images and labels in MNIST's format where PyTorch's examples look for them."""
    _mnist(folder.parent / "data" / "MNIST" / "raw")


def lightning_mnist(folder: Path) -> None:
    """Write the same as tensors where Lightning's examples look for them without torchvision."""
    import torch

    there = folder.parents[1] / "Datasets" / "MNIST" / "complete"
    there.mkdir(parents=True, exist_ok=True)
    for name, count in (("training.pt", 60_000), ("test.pt", 2_000)):
        images, labels = _images(count)
        torch.save((torch.from_numpy(images), torch.from_numpy(labels.astype(np.int64))), there / name)


def _images(count: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(count)
    return rng.integers(0, 256, (count, 28, 28), np.uint8), rng.integers(0, 10, count, np.uint8)


def _mnist(raw: Path) -> None:
    raw.mkdir(parents=True, exist_ok=True)
    for part, count in (("train", 60_000), ("t10k", 2_000)):
        images, labels = _images(count)
        (raw / f"{part}-images-idx3-ubyte").write_bytes(struct.pack(">4i", 2051, count, 28, 28) + images.tobytes())
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">2i", 2049, count) + labels.tobytes())


def words(folder: Path) -> None:
    """Write a text of 2,000 different words in WikiText's layout, with the checkout's own texts for the other parts."""
    rng = random.Random(0)
    lines = [" ".join(f"w{int(rng.paretovariate(0.7)) % 2000}" for _ in range(40)) for _ in range(20_000)]
    there = folder / "data" / "wikitext-2"
    for part, share in (("train", 1.0), ("valid", 0.02), ("test", 0.02)):
        (there / f"{part}.txt").write_text("\n".join(lines[: int(share * len(lines))]))


def sines(folder: Path) -> None:
    """Run the script of the checkout that makes its data."""
    subprocess.run([sys.executable, "generate_sine_wave.py"], cwd=folder, check=True)


def characters(folder: Path) -> None:
    """Write random tokens of 65 characters as nanoGPT keeps Shakespeare's."""
    there, rng = folder / "data" / "shakespeare_char", np.random.default_rng(0)
    for part, count in (("train", 1_000_000), ("val", 100_000)):
        rng.integers(0, 65, count).astype(np.uint16).tofile(there / f"{part}.bin")
    (there / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 65, "itos": {}, "stoi": {}}))


def alpaca(folder: Path) -> None:
    """Write instructions, and a small Llama with a tokenizer that knows their words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    rng = random.Random(0)
    text = [" ".join(f"w{rng.randrange(1000)}" for _ in range(60)) for _ in range(2_000)]
    rows = [{"instruction": t[:80], "input": "", "output": t} for t in text]
    (folder / "made.json").write_text(json.dumps(rows))
    vocabulary = {w: i for i, w in enumerate(["<unk>", "<s>", "</s>", *(f"w{i}" for i in range(1000))])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    shutil.rmtree(folder / "tiny", ignore_errors=True)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder / "tiny")
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(vocabulary),
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
        )
    ).save_pretrained(folder / "tiny")


MADE: dict[str, Callable[[Path], None]] = {
    made.__name__: made for made in (alpaca, characters, lightning_mnist, mnist, sines, words)
}


if __name__ == "__main__":
    MADE[sys.argv[1]](Path(sys.argv[2]))
