"""Fine-tune a small ViT on surface-defect crops with the Hugging Face Trainer."""
import tempfile
import time

import numpy as np
from datasets import Dataset
from transformers import (Trainer, TrainerCallback, TrainingArguments, ViTConfig,
                          ViTForImageClassification, set_seed)

MEAN, STD = 0.5, 0.5
IMAGE_SIZE = 64
LABELS = ["ok", "scratch", "dent", "stain"]


class StepClock(TrainerCallback):
    def __init__(self, skip=5):
        self.skip = skip

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.skip:
            self.start = time.perf_counter()
        self.end, self.steps = time.perf_counter(), state.global_step - self.skip

    def report(self):
        print(f"{(self.end - self.start) / self.steps * 1000:.1f} ms per step")


def make_crops(n, seed=0):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, len(LABELS), n)
    crops = rng.integers(0, 200, (n, IMAGE_SIZE, IMAGE_SIZE, 3), dtype=np.uint8)
    for crop, label in zip(crops, labels):
        crop[label * 8:label * 8 + 8] += 50
    return {"image": list(crops), "label": labels}


def preprocess(examples):
    images = np.asarray(examples["image"], dtype=np.float32) / 255.0
    images = (images - MEAN) / STD
    examples["pixel_values"] = list(images.transpose(0, 3, 1, 2))
    return examples


def main():
    set_seed(7)
    dataset = Dataset.from_dict(make_crops(1200))
    dataset = dataset.map(preprocess, batched=True, batch_size=100, remove_columns=["image"])
    dataset = dataset.rename_column("label", "labels").with_format("torch")

    config = ViTConfig(image_size=IMAGE_SIZE, patch_size=8, hidden_size=128, num_hidden_layers=4,
                       num_attention_heads=4, intermediate_size=512, num_labels=len(LABELS))
    model = ViTForImageClassification(config)

    clock = StepClock()
    with tempfile.TemporaryDirectory() as out:
        args = TrainingArguments(output_dir=out, per_device_train_batch_size=16, max_steps=100,
                                 learning_rate=3e-4, logging_steps=20, save_strategy="no",
                                 report_to="none", disable_tqdm=True, use_cpu=True)
        trainer = Trainer(model=model, args=args, train_dataset=dataset, callbacks=[clock])
        trainer.train()
    clock.report()


if __name__ == "__main__":
    main()
