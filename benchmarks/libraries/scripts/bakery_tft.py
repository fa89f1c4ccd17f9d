"""Demand of bakery shops, temporal fusion transformer from pytorch-forecasting."""
import tempfile
import time
import warnings

import lightning.pytorch as pl
import matplotlib
import numpy as np
import pandas as pd
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from pytorch_forecasting import TemporalFusionTransformer, TimeSeriesDataSet
from pytorch_forecasting.data import GroupNormalizer
from pytorch_forecasting.metrics import QuantileLoss

matplotlib.use("Agg")
warnings.filterwarnings("ignore")

DAYS = 120
SHOPS = 24
ENCODER, HORIZON = 28, 7
CUTOFF = DAYS - 14
BATCH = 32
MAX_STEPS = 180
WARMUP = 10


def make_sales():
    rng = np.random.default_rng(8)
    frames = []
    days = np.arange(DAYS)
    for shop in range(SHOPS):
        level = rng.uniform(40, 160)
        weekly = 1 + 0.3 * np.sin(2 * np.pi * (days + shop) / 7)
        promo = (rng.random(DAYS) < 0.1).astype(float)
        sales = level * weekly * (1 + 0.4 * promo) * rng.lognormal(0, 0.1, DAYS)
        frames.append(
            pd.DataFrame(
                {
                    "day": days,
                    "shop": f"shop_{shop:02d}",
                    "weekday": [f"d{d % 7}" for d in days],
                    "promo": promo,
                    "sales": sales.astype(np.float32),
                }
            )
        )
    return pd.concat(frames, ignore_index=True)


class StepTimer(pl.Callback):
    def __init__(self):
        self.marks = []
        self.losses = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.marks.append(time.perf_counter())
        self.losses.append(float(outputs["loss"]))


def main():
    pl.seed_everything(1)
    sales = make_sales()
    training = TimeSeriesDataSet(
        sales[sales.day <= CUTOFF],
        time_idx="day",
        target="sales",
        group_ids=["shop"],
        min_encoder_length=ENCODER,
        max_encoder_length=ENCODER,
        max_prediction_length=HORIZON,
        static_categoricals=["shop"],
        time_varying_known_categoricals=["weekday"],
        time_varying_known_reals=["day", "promo"],
        time_varying_unknown_reals=["sales"],
        target_normalizer=GroupNormalizer(groups=["shop"], transformation="softplus"),
        add_relative_time_idx=True,
        add_target_scales=True,
    )
    validation = TimeSeriesDataSet.from_dataset(training, sales, min_prediction_idx=CUTOFF + 1)
    train_loader = training.to_dataloader(train=True, batch_size=BATCH, num_workers=0)
    val_loader = validation.to_dataloader(train=False, batch_size=BATCH, num_workers=0)

    tft = TemporalFusionTransformer.from_dataset(
        training,
        learning_rate=0.01,
        hidden_size=16,
        attention_head_size=2,
        dropout=0.1,
        hidden_continuous_size=8,
        loss=QuantileLoss(),
        log_interval=2,
        reduce_on_plateau_patience=4,
    )
    timer = StepTimer()
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            max_steps=MAX_STEPS,
            limit_train_batches=20,
            accelerator="cpu",
            gradient_clip_val=0.1,
            logger=TensorBoardLogger(folder, name="tft"),
            callbacks=[timer],
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(tft, train_dataloaders=train_loader, val_dataloaders=val_loader)

    steps = torch.tensor(timer.marks, dtype=torch.float64).diff()[WARMUP:]
    print(f"final loss {np.mean(timer.losses[-10:]):.4f}")
    print(f"{1000 * steps.mean().item():.1f} ms per step")


if __name__ == "__main__":
    main()
