"""A network on tabular data, with a held-out part that is scored after each epoch."""

import torch
from clock import Clock
from torch import nn

ROWS, NUMBERS, CATEGORIES, LEVELS, BATCH, EPOCHS = 24_000, 40, 6, 50, 512, 4


class TableNet(nn.Module):
    def __init__(self, width=384, embedding=8, dropout=0.1):
        super().__init__()
        self.categories = nn.Embedding(CATEGORIES * LEVELS, embedding)
        self.register_buffer("offsets", torch.arange(CATEGORIES) * LEVELS)
        self.norm = nn.BatchNorm1d(NUMBERS)
        self.layers = nn.Sequential(
            nn.Linear(NUMBERS + CATEGORIES * embedding, width),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(width, 1),
        )

    def forward(self, numbers, categories):
        embedded = self.categories(categories + self.offsets).flatten(1)
        return self.layers(torch.cat([self.norm(numbers), embedded], dim=1)).squeeze(1)


def table():
    numbers = torch.randn(ROWS, NUMBERS)
    categories = torch.randint(LEVELS, (ROWS, CATEGORIES))
    effects = torch.randn(LEVELS)
    target = numbers[:, :5].sum(1) + effects[categories[:, 0]] + 0.3 * torch.randn(ROWS)
    return numbers, categories, target


@torch.no_grad()
def validate(model, parts):
    model.eval()
    total = sum(nn.functional.mse_loss(model(n, c), t, reduction="sum") for n, c, t in parts)
    model.train()
    return (total / sum(len(t) for _, _, t in parts)).item()


def main():
    columns = table()
    split = ROWS * 9 // 10
    train = [column[:split] for column in columns]
    held_out = list(zip(*(column[split:].split(1_024) for column in columns), strict=True))
    model = TableNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-4)
    per_epoch = split // BATCH
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS * per_epoch)
    clock = Clock(EPOCHS * per_epoch)
    for epoch in range(EPOCHS):
        for rows in torch.randperm(split)[: per_epoch * BATCH].split(BATCH):
            numbers, categories, target = (column[rows] for column in train)
            loss = nn.functional.mse_loss(model(numbers, categories), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            clock.step()
        print(f"epoch {epoch}: held out {validate(model, held_out):.4f}")


if __name__ == "__main__":
    main()
