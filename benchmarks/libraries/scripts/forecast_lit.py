"""Energy-load forecasting with an LSTM in Lightning; short epochs over the last weeks of data."""
import tempfile
import time

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

HISTORY, HORIZON, SITES = 24, 24, 32


class LoadForecaster(L.LightningModule):
    def __init__(self, hidden=448, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.LSTM(SITES, hidden, num_layers=2, batch_first=True)
        self.head = nn.Linear(hidden, HORIZON * SITES)

    def forward(self, history):
        out, _ = self.encoder(history)
        return self.head(out[:, -1]).view(-1, HORIZON, SITES)

    def training_step(self, batch, batch_idx):
        history, target = batch
        loss = F.l1_loss(self(history), target)
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.9)
        return [optimizer], [scheduler]


class StepClock(L.Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == 4:
            self.start = time.perf_counter()

    def on_train_end(self, trainer, pl_module):
        elapsed = time.perf_counter() - self.start
        print(f"loss {trainer.callback_metrics['train_loss']:.4f}")
        print(f"{elapsed / (trainer.global_step - 4) * 1000:.1f} ms per step")


def make_windows(n, seed=0):
    gen = torch.Generator().manual_seed(seed)
    t = torch.arange(HISTORY + HORIZON).float()
    phase = torch.rand(n, 1, SITES, generator=gen) * 24
    series = torch.sin((t[None, :, None] + phase) * 6.283 / 24)
    series = series + 0.1 * torch.randn(series.shape, generator=gen)
    return TensorDataset(series[:, :HISTORY], series[:, HISTORY:])


def main():
    L.seed_everything(5)
    loader = DataLoader(make_windows(4 * 12), batch_size=12, shuffle=True)
    with tempfile.TemporaryDirectory() as out:
        checkpoint = ModelCheckpoint(dirpath=out, filename="{epoch}-{train_loss:.3f}",
                                     monitor="train_loss", mode="min", save_top_k=3, save_last=True)
        trainer = L.Trainer(max_epochs=30, accelerator="cpu", logger=False,
                            callbacks=[checkpoint, StepClock()], log_every_n_steps=1,
                            enable_progress_bar=False, enable_model_summary=False)
        trainer.fit(LoadForecaster(), loader)
        print("best:", checkpoint.best_model_path.split("/")[-1])


if __name__ == "__main__":
    main()
