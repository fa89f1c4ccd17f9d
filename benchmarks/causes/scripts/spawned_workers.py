"""A worker is spawned anew for every epoch: it imports PyTorch and is sent the data. --fixed: persistent workers."""

import torch
from clock import FIXED, Clock
from torch.utils.data import DataLoader, Dataset


class Grids(Dataset):
    def __init__(self):
        self.grids = [torch.rand(4, 24, 24) for _ in range(600)]

    def __len__(self):
        return len(self.grids)

    def __getitem__(self, index):
        return self.grids[index] - self.grids[index].mean()


def main():
    loader = DataLoader(
        Grids(),
        batch_size=16,
        shuffle=True,
        num_workers=1,
        multiprocessing_context="spawn",
        persistent_workers=FIXED,  # the cause
    )
    model = torch.nn.Sequential(
        torch.nn.Conv2d(4, 32, 3), torch.nn.ReLU(), torch.nn.Conv2d(32, 32, 3), torch.nn.ReLU(),
        torch.nn.Flatten(), torch.nn.Linear(32 * 20 * 20, 8),
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters())
    clock = Clock(150, warm=20)
    more = True
    while more:
        for x in loader:  # the cause
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            more = clock.step()
            if not more:
                break


if __name__ == "__main__":
    main()
