"""Intent classification of short customer questions with a small BERT and the HF Trainer."""
import random
import tempfile
import time

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

INTENTS = ["refund", "delivery", "password", "invoice", "cancel", "upgrade", "outage", "contact"]
WARMUP = 10
MAX_STEPS = 130


def make_questions(count=4000):
    rng = random.Random(3)
    filler = [a + b for a in ("ka", "lo", "mi", "ne", "su", "ta") for b in ("ren", "dol", "vi", "sta", "mer", "po")]
    texts, labels = [], []
    for _ in range(count):
        label = rng.randrange(len(INTENTS))
        words = [rng.choice(filler) for _ in range(rng.randint(7, 26))]
        words[rng.randrange(len(words))] = INTENTS[label]
        if rng.random() < 0.3:
            words[rng.randrange(len(words))] = rng.choice(INTENTS)
        texts.append(" ".join(words))
        labels.append(label)
    return Dataset.from_dict({"text": texts, "label": labels})


def make_tokenizer(texts):
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordPieceTrainer(
        vocab_size=2000, special_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        special_tokens=[("[CLS]", tokenizer.token_to_id("[CLS]")), ("[SEP]", tokenizer.token_to_id("[SEP]"))],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_max_length=128,
    )


class StepClock(TrainerCallback):
    def __init__(self):
        self.marks = []

    def on_step_end(self, args, state, control, **kwargs):
        self.marks.append(time.perf_counter())


def main():
    set_seed(42)
    raw = make_questions()
    tokenizer = make_tokenizer(raw["text"])

    def tokenize(examples):
        return tokenizer(examples["text"], truncation=True, padding="max_length")

    train_dataset = raw.map(tokenize, batched=True, remove_columns=["text"])
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=512,
        max_position_embeddings=128,
        num_labels=len(INTENTS),
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = BertForSequenceClassification(config)

    clock = StepClock()
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=32,
            max_steps=MAX_STEPS,
            learning_rate=5e-4,
            warmup_steps=20,
            logging_steps=20,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            dataloader_pin_memory=False,
        )
        trainer = Trainer(
            model=model,
            args=args,
            train_dataset=train_dataset,
            processing_class=tokenizer,
            callbacks=[clock],
        )
        result = trainer.train()

    steps = torch.tensor(clock.marks, dtype=torch.float64).diff()[WARMUP:]
    print(f"final loss {result.training_loss:.4f}")
    print(f"{1000 * steps.mean().item():.1f} ms per step")


if __name__ == "__main__":
    main()
