"""Classifies texts that are read and hashed one by one, without loader workers."""

import random
import zlib

import torch
from torch.utils.data import DataLoader, Dataset

WORDS = [f"word{n}" for n in range(5000)]


class Texts(Dataset):
    def __len__(self):
        return 20_000

    def __getitem__(self, index):
        draw = random.Random(index)
        text = " ".join(draw.choice(WORDS) for _ in range(90))
        counts = torch.zeros(512)
        for word in text.split():
            counts[zlib.crc32(word.encode()) % 512] += 1
        return counts, index % 10


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    loader = DataLoader(Texts(), batch_size=32, shuffle=True)
    model = torch.nn.Sequential(torch.nn.Linear(512, 1536), torch.nn.ReLU(), torch.nn.Linear(1536, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(3):
        for counts, labels in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(counts), labels)
            loss.backward()
            optimizer.step()
        print(epoch, loss.item())


if __name__ == "__main__":
    main()
