"""Image denoising with a small U-Net in Lightning; PSNR on the validation set at the end of each epoch."""
import tempfile
import time

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.image import PeakSignalNoiseRatio

SIZE = 48


def conv(cin, cout):
    return nn.Sequential(nn.Conv2d(cin, cout, 3, padding=1), nn.ReLU(),
                         nn.Conv2d(cout, cout, 3, padding=1), nn.ReLU())


class Denoiser(L.LightningModule):
    def __init__(self, width=24, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.down1, self.down2 = conv(1, width), conv(width, 2 * width)
        self.bottom = conv(2 * width, 2 * width)
        self.up = conv(4 * width, width)
        self.out = nn.Conv2d(2 * width, 1, 1)
        self.val_psnr = PeakSignalNoiseRatio(data_range=1.0)

    def forward(self, noisy):
        a = self.down1(noisy)
        b = self.down2(F.max_pool2d(a, 2))
        c = F.interpolate(self.bottom(F.max_pool2d(b, 2)), scale_factor=2.0)
        d = F.interpolate(self.up(torch.cat([b, c], dim=1)), scale_factor=2.0)
        return noisy - self.out(torch.cat([a, d], dim=1))

    def training_step(self, batch, batch_idx):
        noisy, clean = batch
        loss = F.mse_loss(self(noisy), clean)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        noisy, clean = batch
        self.val_psnr.update(self(noisy), clean)
        self.log("val_psnr", self.val_psnr)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


class StepClock(L.Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == 5:
            self.start = time.perf_counter()

    def on_train_end(self, trainer, pl_module):
        elapsed = time.perf_counter() - self.start
        print(f"val_psnr {trainer.callback_metrics['val_psnr']:.2f}")
        print(f"{elapsed / (trainer.global_step - 5) * 1000:.1f} ms per step")


def make_images(n, seed):
    gen = torch.Generator().manual_seed(seed)
    clean = F.interpolate(torch.rand(n, 1, 6, 6, generator=gen), size=SIZE, mode="bilinear")
    return TensorDataset(clean + 0.1 * torch.randn(clean.shape, generator=gen), clean)


def main():
    L.seed_everything(3)
    train_loader = DataLoader(make_images(60 * 16, 0), batch_size=16, shuffle=True)
    val_loader = DataLoader(make_images(64, 1), batch_size=32)
    with tempfile.TemporaryDirectory() as out:
        trainer = L.Trainer(max_epochs=2, accelerator="cpu", logger=False, log_every_n_steps=20,
                            callbacks=[ModelCheckpoint(dirpath=out, monitor="val_psnr", mode="max"), StepClock()],
                            enable_progress_bar=False, enable_model_summary=False)
        trainer.fit(Denoiser(), train_loader, val_loader)


if __name__ == "__main__":
    main()
