"""Masked-language-model pretraining on log lines; reports masked-token accuracy during training."""
import tempfile
import time

import numpy as np
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (BertConfig, BertForMaskedLM, DataCollatorForLanguageModeling,
                          PreTrainedTokenizerFast, Trainer, TrainerCallback, TrainingArguments, set_seed)

VOCAB_SIZE = 8000
SEQ_LEN = 64


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
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocab = {w: i for i, w in enumerate(specials + [f"w{i}" for i in range(VOCAB_SIZE - len(specials))])}
    tok = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tok.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tok, pad_token="[PAD]", unk_token="[UNK]",
                                   cls_token="[CLS]", sep_token="[SEP]", mask_token="[MASK]")


def make_lines(n, seed):
    rng = np.random.default_rng(seed)
    ids = np.minimum(rng.zipf(1.3, (n, SEQ_LEN)), VOCAB_SIZE - 6)
    return [" ".join(f"w{i}" for i in row) for row in ids]


def compute_metrics(eval_pred):
    logits, labels = eval_pred
    predictions = np.argmax(logits, axis=-1)
    mask = labels != -100
    return {"masked_accuracy": float((predictions[mask] == labels[mask]).mean())}


def main():
    set_seed(3)
    tokenizer = build_tokenizer()

    def tokenize(batch):
        return tokenizer(batch["text"], truncation=True, max_length=SEQ_LEN)

    train_ds = Dataset.from_dict({"text": make_lines(1600, 0)}).map(tokenize, batched=True, remove_columns=["text"])
    eval_ds = Dataset.from_dict({"text": make_lines(320, 1)}).map(tokenize, batched=True, remove_columns=["text"])

    model = BertForMaskedLM(BertConfig(vocab_size=VOCAB_SIZE, hidden_size=96, num_hidden_layers=2,
                                       num_attention_heads=4, intermediate_size=384,
                                       max_position_embeddings=SEQ_LEN))
    with tempfile.TemporaryDirectory() as out:
        args = TrainingArguments(output_dir=out, per_device_train_batch_size=16,
                                 per_device_eval_batch_size=32, max_steps=80, learning_rate=5e-4,
                                 eval_strategy="steps", eval_steps=10, logging_steps=20,
                                 save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True)
        trainer = Trainer(model=model, args=args, train_dataset=train_ds, eval_dataset=eval_ds,
                          data_collator=DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15),
                          compute_metrics=compute_metrics, callbacks=[StepClock()])
        trainer.train()


if __name__ == "__main__":
    main()
