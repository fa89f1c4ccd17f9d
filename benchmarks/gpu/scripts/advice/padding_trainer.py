"""Short texts, all padded to 512 tokens, with transformers' Trainer. --fixed: to the longest, in multiples of 64."""

import random
import tempfile
from typing import Any

import torch
from clock import Clock, options
from torch import Tensor
from torch.utils.data import Dataset
from transformers import (
    DistilBertConfig,
    DistilBertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

args = options(steps=70)
width, layers, batch, most = (64, 2, 2, 64) if args.tiny else (768, 8, 32, 512)


class Texts(Dataset[tuple[list[int], int]]):
    def __init__(self) -> None:
        drawn = random.Random(0)
        lengths = [drawn.randint(8, most // 8) for _ in range(batch * (args.steps + 1))]
        self.texts = [[drawn.randrange(5, 30000) for _ in range(length)] for length in lengths]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, number: int) -> tuple[list[int], int]:
        return self.texts[number], number % 2


def collate(rows: list[tuple[list[int], int]]) -> dict[str, Tensor]:
    longest = -(-max(len(tokens) for tokens, _ in rows) // 64) * 64 if args.fixed else most  # the cause
    ids = torch.tensor([tokens + [0] * (longest - len(tokens)) for tokens, _ in rows])
    return {"input_ids": ids, "attention_mask": ids.ne(0).long(), "labels": torch.tensor([label for _, label in rows])}


class Timed(TrainerCallback):
    def __init__(self) -> None:
        self.clock = Clock(args)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.clock.step()


config = DistilBertConfig(dim=width, hidden_dim=4 * width, n_layers=layers, n_heads=max(1, width // 64))
with tempfile.TemporaryDirectory() as folder:
    settings = TrainingArguments(
        folder,
        per_device_train_batch_size=batch,
        max_steps=args.steps,
        bf16=args.device == "cuda",
        use_cpu=args.device == "cpu",
        dataloader_num_workers=0 if args.tiny else 2,
        logging_steps=50,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    model = DistilBertForSequenceClassification(config)
    trainer = Trainer(model, settings, collate, Texts(), callbacks=[Timed()])  # the cause
    trainer.train()  # the cause
