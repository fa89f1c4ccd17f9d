"""Workers are forked while a thread holds a lock that they need: they wait until the time-out. --fixed: not held."""

import threading
import time

import torch
from clock import FIXED, Clock
from torch.utils.data import DataLoader, Dataset

lock = threading.Lock()


def hold():
    with lock:
        time.sleep(8)


class Rows(Dataset):
    def __len__(self):
        return 6400

    def __getitem__(self, index):
        with lock:  # the cause
            return torch.full((64,), float(index))


if not FIXED:
    threading.Thread(target=hold).start()
    time.sleep(0.1)
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.Adam(model.parameters())
clock = Clock(190, warm=0)  # what is gained is the start
workers = 2
more = True
while more:
    loader = DataLoader(Rows(), batch_size=64, num_workers=workers, timeout=20 if workers else 0)
    try:
        for x in loader:  # the cause
            loss = torch.nn.functional.mse_loss(model(x), x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            more = clock.step()
            if not more:
                break
    except RuntimeError as e:
        print("once more without workers:", e)
        workers = 0
