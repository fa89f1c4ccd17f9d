"""Two-tower recommender for playlists and songs (Lightning, manual optimisation)."""
import time

import lightning.pytorch as pl
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

SONGS = 300_000
PLAYLISTS = 60_000
DIM = 32
CONTEXT = 20
BATCH = 512
STEPS = 320
WARMUP = 5


class PlaylistDataset(Dataset):
    """(playlist, songs already in it, next song), popularity is heavy-tailed."""

    def __init__(self, count):
        gen = torch.Generator().manual_seed(12)
        self.playlist = torch.randint(PLAYLISTS, (count,), generator=gen)
        skew = torch.rand(count, CONTEXT + 1, generator=gen) ** 3
        offset = (self.playlist % 97)[:, None] * 4000
        self.songs = ((skew * 60_000).long() + offset) % SONGS

    def __len__(self):
        return len(self.playlist)

    def __getitems__(self, indices):
        rows = torch.tensor(indices)
        songs = self.songs[rows]
        return self.playlist[rows], songs[:, :-1], songs[:, -1]


class TwoTower(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.song_table = nn.Embedding(SONGS, DIM)
        self.playlist_table = nn.Embedding(PLAYLISTS, DIM)
        nn.init.normal_(self.song_table.weight, std=0.05)
        nn.init.normal_(self.playlist_table.weight, std=0.05)
        self.query_tower = nn.Sequential(
            nn.Linear(2 * DIM, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 64)
        )
        self.song_tower = nn.Sequential(nn.Linear(DIM, 512), nn.ReLU(), nn.Linear(512, 64))
        self.temperature = 0.07
        self.marks = []

    def forward(self, playlist, context, song):
        history = self.song_table(context).mean(1)
        query = self.query_tower(torch.cat([self.playlist_table(playlist), history], dim=1))
        candidate = self.song_tower(self.song_table(song))
        return F.normalize(query, dim=1), F.normalize(candidate, dim=1)

    def training_step(self, batch, batch_idx):
        tables, towers = self.optimizers()
        query, candidate = self(*batch)
        logits = query @ candidate.T / self.temperature
        loss = F.cross_entropy(logits, torch.arange(len(logits)))

        tables.zero_grad()
        towers.zero_grad()
        self.manual_backward(loss)
        tables.step()
        towers.step()

        self.last_loss = loss.detach()
        if batch_idx % 50 == 0:
            print(f"batch {batch_idx}: in-batch loss {loss.item():.4f}")
        self.marks.append(time.perf_counter())

    def configure_optimizers(self):
        embeddings = [self.song_table.weight, self.playlist_table.weight]
        dense = [*self.query_tower.parameters(), *self.song_tower.parameters()]
        return [
            torch.optim.Adagrad(embeddings, lr=0.05),
            torch.optim.AdamW(dense, lr=1e-3, weight_decay=1e-3),
        ]


def main():
    pl.seed_everything(3, verbose=False)
    dataset = PlaylistDataset(BATCH * STEPS)
    loader = DataLoader(dataset, batch_size=BATCH, shuffle=True, collate_fn=lambda batch: batch)
    model = TwoTower()
    trainer = pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, loader)

    steps = torch.tensor(model.marks, dtype=torch.float64).diff()[WARMUP:]
    print(f"final loss {model.last_loss.item():.4f}")
    print(f"{1000 * steps.mean().item():.1f} ms per step")


if __name__ == "__main__":
    main()
