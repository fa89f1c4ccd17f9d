"""Makes the tensor of every sample of a list of arrays, number by number."""

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset


class Windows(Dataset):
    def __init__(self):
        self.series = np.random.default_rng(0).random((5000, 64), dtype=np.float32)

    def __len__(self):
        return 60_000

    def __getitem__(self, index):
        rows = [self.series[(7 * index + n) % 5000] for n in range(50)]
        return torch.tensor(rows, dtype=torch.float32)


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = torch.nn.GRU(64, 24, batch_first=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, windows in enumerate(DataLoader(Windows(), batch_size=16)):
        optimizer.zero_grad()
        loss = model(windows)[0].square().mean()
        loss.backward()
        optimizer.step()
        if step % 100 == 0:
            print(step, loss.item())


if __name__ == "__main__":
    main()
