"""Question-answer retrieval for a help desk with sentence-transformers."""
import random
import tempfile
import time

import torch
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    losses,
    models,
)
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers import models as token_models
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast, TrainerCallback, set_seed

TOPICS = 60
PAIRS = 4800
BATCH = 32
STEPS = 140
WARMUP = 10


def make_pairs():
    rng = random.Random(17)
    words = [a + b + c for a in ("ba", "ko", "li", "me") for b in ("ra", "to", "su", "ni") for c in ("", "n", "s", "ka")]
    topics = [rng.sample(words, 8) for _ in range(TOPICS)]
    questions, answers = [], []
    for _ in range(PAIRS):
        topic = rng.choice(topics)
        questions.append(" ".join(rng.choices(topic, k=12) + rng.choices(words, k=5)))
        answers.append(" ".join(rng.choices(topic, k=17) + rng.choices(words, k=5)))
    return Dataset.from_dict({"anchor": questions, "positive": answers}), words


def save_base(folder, words):
    vocabulary = {token: i for i, token in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words])}
    tokenizer = Tokenizer(token_models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]", mask_token="[MASK]",
        model_max_length=64,
    ).save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(vocabulary), hidden_size=192, num_hidden_layers=4, num_attention_heads=6,
        intermediate_size=768, max_position_embeddings=64,
    )
    BertModel(config).save_pretrained(folder)


class StepClock(TrainerCallback):
    def __init__(self):
        self.marks = []

    def on_step_end(self, args, state, control, **kwargs):
        self.marks.append(time.perf_counter())


def main():
    set_seed(5)
    pairs, words = make_pairs()
    with tempfile.TemporaryDirectory() as folder:
        save_base(folder, words)
        encoder = models.Transformer(folder, max_seq_length=64)
        pooling = models.Pooling(encoder.get_word_embedding_dimension(), pooling_mode="mean")
        model = SentenceTransformer(modules=[encoder, pooling], device="cpu")
        args = SentenceTransformerTrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=BATCH,
            max_steps=STEPS,
            learning_rate=3e-4,
            warmup_steps=15,
            logging_steps=35,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            dataloader_pin_memory=False,
            disable_tqdm=True,
        )
        clock = StepClock()
        trainer = SentenceTransformerTrainer(
            model=model,
            args=args,
            train_dataset=pairs,
            loss=losses.MultipleNegativesRankingLoss(model),
            callbacks=[clock],
        )
        result = trainer.train()

    steps = torch.tensor(clock.marks, dtype=torch.float64).diff()[WARMUP:]
    print(f"final loss {result.training_loss:.4f}")
    print(f"{1000 * steps.mean().item():.1f} ms per step")


if __name__ == "__main__":
    main()
