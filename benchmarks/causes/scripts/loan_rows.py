"""Will a loan be paid back? A residual network over the columns of an application form."""

import argparse
import time

import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

NUMBERS, CODES = 24, (12, 50, 7, 300, 31)


def make_forms(rows, seed):
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(rows, NUMBERS, generator=generator) * 40 + 100
    codes = torch.stack([torch.randint(0, n, (rows,), generator=generator) for n in CODES], 1)
    risk = (numbers[:, 0] - numbers[:, 3]) / 60 + torch.sin(codes[:, 1].float()) + (codes[:, 4] % 3 - 1)
    paid = (risk + torch.randn(rows, generator=generator) > 0).float()
    return numbers, codes, paid


class LoanForms(Dataset):
    """Forms held in memory as tensors; columns of numbers are standardised on the way out."""

    def __init__(self, numbers, codes, paid):
        self.numbers, self.codes, self.paid = numbers, codes, paid
        self.mean, self.scale = numbers.mean(0), numbers.std(0)

    def __len__(self):
        return self.paid.shape[0]

    def __getitem__(self, item):
        return {
            "numbers": (self.numbers[item] - self.mean) / self.scale,
            "codes": self.codes[item],
            "paid": self.paid[item],
        }


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class FormNet(nn.Module):
    def __init__(self, width=64, depth=3):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(n, 8) for n in CODES)
        self.first = nn.Linear(NUMBERS + 8 * len(CODES), width)
        self.blocks = nn.Sequential(*(Residual(width) for _ in range(depth)))
        self.last = nn.Linear(width, 1)

    def forward(self, numbers, codes):
        looked_up = [table(codes[:, i]) for i, table in enumerate(self.tables)]
        return self.last(self.blocks(self.first(torch.cat([numbers, *looked_up], 1)))).squeeze(1)


def loader_for(forms, batch, seed, whole):
    order = RandomSampler(forms, generator=torch.Generator().manual_seed(seed))
    if whole:
        return DataLoader(forms, sampler=BatchSampler(order, batch, drop_last=True), batch_size=None)
    return DataLoader(forms, batch_size=batch, sampler=order, drop_last=True)  # the cause


def epochs(loader):
    while True:
        for batch in loader:
            yield batch


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=120_000)
    parser.add_argument("--fixed", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(11)
    forms = LoanForms(*make_forms(args.rows, 5))
    batches = epochs(loader_for(forms, args.batch, 3, args.fixed))
    model = FormNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=args.steps)
    for step in range(args.steps):
        if step == args.steps // 2:
            since = time.perf_counter()
        batch = next(batches)
        score = model(batch["numbers"], batch["codes"])
        loss = nn.functional.binary_cross_entropy_with_logits(score, batch["paid"])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        schedule.step()
    spent = time.perf_counter() - since
    print(f"loss {loss.item():.6f}")
    print(f"{spent / (args.steps - args.steps // 2) * 1e3:.2f} ms per step")


if __name__ == "__main__":
    main()
