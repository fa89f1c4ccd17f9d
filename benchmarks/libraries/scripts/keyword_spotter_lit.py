"""Keyword spotting on log-mel patches with Lightning and TensorBoard."""
import tempfile
import time

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import TensorBoardLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

KEYWORDS = 12


def block(cin, cout, stride):
    return nn.Sequential(nn.Conv2d(cin, cout, 3, stride, 1, bias=False), nn.BatchNorm2d(cout), nn.ReLU())


class KeywordSpotter(L.LightningModule):
    def __init__(self, lr=2e-3):
        super().__init__()
        self.save_hyperparameters()
        self.features = nn.Sequential(block(1, 16, 2), block(16, 32, 2), block(32, 64, 2),
                                      nn.Flatten())
        self.classifier = nn.Sequential(nn.Linear(64 * 5 * 13, 256), nn.ReLU(), nn.Dropout(0.2),
                                        nn.Linear(256, KEYWORDS))

    def forward(self, mel):
        return self.classifier(self.features(mel))

    def training_step(self, batch, batch_idx):
        mel, label = batch
        logits = self(mel)
        loss = F.cross_entropy(logits, label)
        self.log("train/loss", loss)
        self.log("train/acc", (logits.argmax(1) == label).float().mean())
        return loss

    def on_after_backward(self):
        for name, param in self.named_parameters():
            self.logger.experiment.add_histogram(f"grads/{name}", param.grad, self.global_step)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


class StepClock(L.Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == 5:
            self.start = time.perf_counter()

    def on_train_end(self, trainer, pl_module):
        elapsed = time.perf_counter() - self.start
        print(f"loss {trainer.callback_metrics['train/loss']:.4f}")
        print(f"{elapsed / (trainer.global_step - 5) * 1000:.1f} ms per step")


def make_patches(n, seed=0):
    gen = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, KEYWORDS, (n,), generator=gen)
    mel = torch.randn(n, 1, 40, 100, generator=gen)
    mel += F.one_hot(labels, KEYWORDS).float().repeat_interleave(4, 1)[:, None, :40, None]
    return TensorDataset(mel, labels)


if __name__ == "__main__":
    L.seed_everything(2)
    loader = DataLoader(make_patches(64 * 75), batch_size=64, shuffle=True)
    with tempfile.TemporaryDirectory() as out:
        trainer = L.Trainer(max_epochs=2, accelerator="cpu", logger=TensorBoardLogger(out, name="kws"),
                            callbacks=[StepClock()], log_every_n_steps=25, enable_checkpointing=False,
                            enable_progress_bar=False, enable_model_summary=False)
        trainer.fit(KeywordSpotter(), loader)
