"""Valve faults from vibration windows: 1-D CNN behind the scikit-learn interface of skorch."""
import time

import numpy as np
import torch
import torch.nn as nn
from skorch import NeuralNetBinaryClassifier
from skorch.callbacks import Callback, EpochScoring, GradientNormClipping, LRScheduler
from skorch.dataset import ValidSplit

WINDOW = 512
COUNT = 1200
EPOCHS = 22
BATCH = 50
WARMUP = 5


def make_vibration():
    """Two channels; faults add short bursts."""
    rng = np.random.default_rng(6)
    t = np.arange(WINDOW) / 256.0
    y = (rng.random(COUNT) < 0.35).astype(np.float32)
    x = rng.normal(0, 1.0, (COUNT, 2, WINDOW))
    x[:, 0] += np.sin(2 * np.pi * rng.uniform(10, 14, (COUNT, 1)) * t)
    x[:, 1] += 0.5 * np.sin(2 * np.pi * rng.uniform(20, 28, (COUNT, 1)) * t)
    for row in np.flatnonzero(y):
        for start in rng.integers(0, WINDOW - 24, 3):
            x[row, :, start : start + 24] += 1.6 * np.hanning(24) * np.sin(np.arange(24) * 1.7)
    return x.astype(np.float32), y


class VibrationNet(nn.Module):
    def __init__(self, width=48, kernel=9):
        super().__init__()
        layers = []
        channels = 2
        for index in range(4):
            layers += [
                nn.Conv1d(channels, width, kernel, stride=2 if index else 1, padding=kernel // 2),
                nn.BatchNorm1d(width),
                nn.ReLU(),
            ]
            channels = width
        self.features = nn.Sequential(*layers)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(2 * width, 1)

    def forward(self, x):
        x = self.features(x)
        pooled = torch.cat([x.mean(-1), x.amax(-1)], dim=1)
        return self.head(self.dropout(pooled)).squeeze(-1)


class StepTimer(Callback):
    def on_train_begin(self, net, X=None, y=None, **kwargs):
        self.marks = []

    def on_batch_end(self, net, batch=None, training=False, **kwargs):
        if training:
            self.marks.append(time.perf_counter())


def scoring_callbacks():
    callbacks = []
    for metric in ("roc_auc", "average_precision", "f1"):
        callbacks.append(
            (
                f"train_{metric}",
                EpochScoring(
                    metric,
                    name=f"train_{metric}",
                    lower_is_better=False,
                    on_train=True,
                    use_caching=False,
                ),
            )
        )
        callbacks.append(
            (f"valid_{metric}", EpochScoring(metric, name=f"valid_{metric}", lower_is_better=False))
        )
    return callbacks


def main():
    torch.manual_seed(0)
    np.random.seed(0)
    x, y = make_vibration()
    timer = StepTimer()
    net = NeuralNetBinaryClassifier(
        VibrationNet,
        criterion=nn.BCEWithLogitsLoss,
        optimizer=torch.optim.Adam,
        lr=1e-3,
        max_epochs=EPOCHS,
        batch_size=BATCH,
        iterator_train__shuffle=True,
        train_split=ValidSplit(6, stratified=True),
        callbacks=[
            *scoring_callbacks(),
            ("clip", GradientNormClipping(1.0)),
            ("schedule", LRScheduler("CosineAnnealingLR", T_max=EPOCHS)),
            ("timer", timer),
        ],
    )
    net.fit(x, y)

    steps = np.diff(timer.marks)[WARMUP:]
    print(f"best validation AUC {max(net.history[:, 'valid_roc_auc']):.4f}")
    print(f"final loss {net.history[-1, 'train_loss']:.4f}")
    print(f"{1000 * steps.mean():.1f} ms per step")


if __name__ == "__main__":
    main()
