"""Ticket routing with a small BERT and the Hugging Face Trainer."""
import tempfile
import time

import numpy as np
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (BertConfig, BertForSequenceClassification, DataCollatorWithPadding,
                          PreTrainedTokenizerFast, Trainer, TrainerCallback, TrainingArguments, set_seed)

TEAMS = 5
WORDS = 3000
MAX_LENGTH = 96


class StepClock(TrainerCallback):
    def __init__(self, skip=5):
        self.skip = skip

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.skip:
            self.start = time.perf_counter()

    def on_train_end(self, args, state, control, **kwargs):
        elapsed = time.perf_counter() - self.start
        print(f"{elapsed / (state.global_step - self.skip) * 1000:.1f} ms per step")


def build_tokenizer():
    vocab = {w: i for i, w in enumerate(["[PAD]", "[UNK]"] + [f"w{i}" for i in range(WORDS)])}
    tok = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tok.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tok, pad_token="[PAD]", unk_token="[UNK]")


def make_tickets(n, seed):
    rng = np.random.default_rng(seed)
    texts, labels = [], []
    for length in rng.integers(48, 72, n):
        team = int(rng.integers(TEAMS))
        words = rng.integers(0, WORDS, length)
        words[:6] = rng.integers(team * 20, team * 20 + 20, 6)
        texts.append(" ".join(f"w{i}" for i in words))
        labels.append(team)
    return Dataset.from_dict({"text": texts, "labels": labels})


def compute_metrics(eval_pred):
    logits, labels = eval_pred
    return {"accuracy": float((logits.argmax(-1) == labels).mean())}


def main():
    set_seed(1)
    tokenizer = build_tokenizer()

    def tokenize(batch):
        return tokenizer(batch["text"], truncation=True, max_length=MAX_LENGTH)

    train_ds = make_tickets(1920, 0).map(tokenize, batched=True, remove_columns=["text"])
    eval_ds = make_tickets(128, 1).map(tokenize, batched=True, remove_columns=["text"])
    model = BertForSequenceClassification(BertConfig(
        vocab_size=len(tokenizer), hidden_size=192, num_hidden_layers=4, num_attention_heads=6,
        intermediate_size=768, max_position_embeddings=MAX_LENGTH, num_labels=TEAMS))
    with tempfile.TemporaryDirectory() as out:
        args = TrainingArguments(output_dir=out, per_device_train_batch_size=16,
                                 per_device_eval_batch_size=32, num_train_epochs=1, learning_rate=5e-4,
                                 eval_strategy="epoch", logging_steps=30, save_strategy="no",
                                 report_to="none", disable_tqdm=True, use_cpu=True)
        Trainer(model=model, args=args, train_dataset=train_ds, eval_dataset=eval_ds,
                data_collator=DataCollatorWithPadding(tokenizer), compute_metrics=compute_metrics,
                callbacks=[StepClock()]).train()


if __name__ == "__main__":
    main()
