"""Click prediction for a shop search page, with Lightning and torchmetrics."""
import time

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import BinaryAUROC, BinaryAveragePrecision

FIELDS = [5000, 2000, 300, 24, 7]
DENSE = 13


class ClickModel(L.LightningModule):
    def __init__(self, dim=16, hidden=256, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.embeddings = nn.ModuleList(nn.Embedding(n, dim) for n in FIELDS)
        width = dim * len(FIELDS) + DENSE
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(),
                                 nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1))
        self.train_auroc = BinaryAUROC()
        self.train_ap = BinaryAveragePrecision()

    def forward(self, cats, dense):
        emb = [table(cats[:, i]) for i, table in enumerate(self.embeddings)]
        return self.mlp(torch.cat(emb + [dense], dim=1)).squeeze(1)

    def training_step(self, batch, batch_idx):
        cats, dense, clicked = batch
        logits = self(cats, dense)
        loss = F.binary_cross_entropy_with_logits(logits, clicked.float())
        scores = logits.detach().sigmoid()
        self.train_auroc.update(scores, clicked)
        self.train_ap.update(scores, clicked)
        self.log("train/loss", loss, prog_bar=True)
        self.log("train/auroc", self.train_auroc.compute())
        self.log("train/ap", self.train_ap.compute())
        return loss

    def on_train_epoch_end(self):
        self.train_auroc.reset()
        self.train_ap.reset()

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


def make_data(n, seed=0):
    gen = torch.Generator().manual_seed(seed)
    cats = torch.stack([torch.randint(0, f, (n,), generator=gen) for f in FIELDS], dim=1)
    dense = torch.randn(n, DENSE, generator=gen)
    p = torch.sigmoid(dense[:, 0] + 0.3 * dense[:, 1] - 1 + (cats[:, 4] == 6).float())
    return TensorDataset(cats, dense, (torch.rand(n, generator=gen) < p).long())


if __name__ == "__main__":
    L.seed_everything(1)
    loader = DataLoader(make_data(250 * 512), batch_size=512, shuffle=True)
    trainer = L.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
                        enable_progress_bar=False, enable_model_summary=False, callbacks=[StepClock()])
    trainer.fit(ClickModel(), loader)
