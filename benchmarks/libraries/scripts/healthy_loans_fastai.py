"""Default risk of small loans, fastai tabular model."""
import time

import numpy as np
import pandas as pd
import torch
from fastai.callback.core import Callback
from fastai.tabular.all import (
    Categorify,
    CategoryBlock,
    CrossEntropyLossFlat,
    FillMissing,
    Normalize,
    RandomSplitter,
    TabularPandas,
    accuracy,
    range_of,
    set_seed,
    tabular_learner,
)

ROWS = 60_000
EPOCHS = 12
BATCH = 1024
WARMUP = 5


def make_loans():
    rng = np.random.default_rng(19)
    frame = pd.DataFrame(
        {
            "region": rng.choice([f"r{i}" for i in range(30)], ROWS),
            "purpose": rng.choice(["car", "home", "study", "health", "other"], ROWS),
            "employer": rng.choice([f"e{i}" for i in range(200)], ROWS),
            "amount": rng.lognormal(8.5, 0.6, ROWS),
            "income": rng.lognormal(10.2, 0.5, ROWS),
            "age": rng.integers(19, 75, ROWS).astype(float),
            "late_payments": rng.poisson(0.6, ROWS).astype(float),
            "tenure": rng.exponential(5.0, ROWS),
        }
    )
    score = 1.2 * np.log(frame.amount / frame.income) + 0.8 * frame.late_payments - 0.05 * frame.tenure
    score += 0.4 * (frame.purpose == "car") + rng.normal(0, 0.7, ROWS)
    frame["default"] = np.where(score > score.quantile(0.8), "yes", "no")
    return frame


class StepTimer(Callback):
    def before_fit(self):
        self.marks = []

    def after_batch(self):
        if self.training:
            self.marks.append(time.perf_counter())


def main():
    set_seed(1)
    frame = make_loans()
    table = TabularPandas(
        frame,
        procs=[Categorify, FillMissing, Normalize],
        cat_names=["region", "purpose", "employer"],
        cont_names=["amount", "income", "age", "late_payments", "tenure"],
        y_names="default",
        y_block=CategoryBlock(),
        splits=RandomSplitter(valid_pct=0.1, seed=4)(range_of(frame)),
    )
    loaders = table.dataloaders(bs=BATCH, device=torch.device("cpu"))
    timer = StepTimer()
    learner = tabular_learner(
        loaders,
        layers=[1200, 600, 200],
        loss_func=CrossEntropyLossFlat(),
        metrics=accuracy,
        cbs=[timer],
    )
    with learner.no_bar():
        learner.fit_one_cycle(EPOCHS, 2e-3)

    steps = np.diff(timer.marks)[WARMUP:]
    print(f"final loss {float(learner.recorder.losses[-1]):.4f}")
    print(f"{1000 * steps.mean():.1f} ms per step")


if __name__ == "__main__":
    main()
