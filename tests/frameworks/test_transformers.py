"""Steps of the Trainer of transformers: it takes all micro-batches of an optimizer step from the loader first."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fixtures.jobs import environment, facts, record, rows

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")

SCRIPT = """
import sys
import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

class Tokens(Dataset):
    def __len__(self):
        return 48
    def __getitem__(self, n):
        ids = torch.full((8,), n)
        return {"input_ids": ids, "labels": ids}

model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=8, n_embd=16, n_layer=1, n_head=2))
arguments = TrainingArguments(
    "out", per_device_train_batch_size=4, per_device_eval_batch_size=8, num_train_epochs=2, use_cpu=True,
    gradient_accumulation_steps=int(sys.argv[1]), eval_strategy="epoch", save_strategy="epoch", report_to=[],
    disable_tqdm=True,
)
Trainer(model, arguments, train_dataset=Tokens(), eval_dataset=Tokens()).train()
"""


@pytest.mark.parametrize("accumulated", [1, 3])
def test_a_step_is_an_optimizer_step_with_all_its_micro_batches(accumulated: int, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    options = ["--window", "1,1,1"]
    env = environment(HF_HUB_OFFLINE="1")
    record(tmp_path / "train.py", str(accumulated), folder=tmp_path / "run", options=options, env=env)
    rank = tmp_path / "run/ranks/00000"
    steps = rows(rank)
    trained = 12 // accumulated
    assert [row["kind"] for row in steps] == (["train"] * trained + ["validation"] * 6) * 2
    assert [row["optimizer_steps"] for row in steps] == ([1] * trained + [0] * 6) * 2
    assert [row["backwards"] for row in steps] == ([accumulated] * trained + [0] * 6) * 2
    # Its loader looks one batch ahead.
    assert [row["fetches"] for row in steps][1 : trained - 1] == [accumulated] * (trained - 2)
    told = facts(rank)
    assert (told["window"]["state"], told["warnings"]) == ("exported", [])
    assert told["models"][0]["class"] == "GPT2LMHeadModel"
    assert (told["loaders"][0]["role"], told["loaders"][0]["batch_size"]) == ("train", 4)


PADS = """
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

data = [{"input_ids": list(range(5, 5 + n)), "labels": n % 2} for n in range(4, 12)] * 16

def collate(rows):
    ids = torch.zeros(len(rows), 64, dtype=torch.long)
    for n, row in enumerate(rows):
        ids[n, : len(row["input_ids"])] = torch.tensor(row["input_ids"])
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": torch.tensor([r["labels"] for r in rows])}

config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
arguments = TrainingArguments("out", per_device_train_batch_size=8, use_cpu=True, report_to=[], disable_tqdm=True)
Trainer(BertForSequenceClassification(config), arguments, train_dataset=data, data_collator=collate).train()
"""


def test_the_lengths_of_rows_in_the_trainers_batches(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PADS)
    env = environment(HF_HUB_OFFLINE="1")
    record(tmp_path / "train.py", folder=tmp_path / "run", options=["--no-trace", "--no-sample"], env=env)
    told = facts(tmp_path / "run/ranks/00000")
    assert told["warnings"] == []
    assert {(row["source"], row["padded"]) for row in told["padding"]} == {("attention_mask", 64)}
    assert all(len(row["lengths"]) == 8 and set(row["lengths"]) <= set(range(4, 12)) for row in told["padding"])
    collate = told["loaders"][0]["collate"]
    assert (collate["name"], collate["line"]) == ("collate", PADS.splitlines().index("def collate(rows):") + 1)
