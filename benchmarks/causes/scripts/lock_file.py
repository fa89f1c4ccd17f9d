"""A killed job left a lock file, and the next one waits until it is old. --fixed: a lock that dies with its process."""

import fcntl
import os
import tempfile
import time
from pathlib import Path

import torch
from clock import FIXED, Clock

lock = Path(tempfile.mkdtemp()) / "cache.lock"
lock.touch()  # by a job that was killed

clock = Clock(250, warm=0)  # what is gained is the start: the time of the whole job, by its steps
if FIXED:
    held = os.open(lock, os.O_RDWR)
    fcntl.flock(held, fcntl.LOCK_EX)
else:
    while lock.exists() and time.time() - lock.stat().st_mtime < 6:
        time.sleep(0.1)  # the cause
    lock.touch()
tables = torch.rand(64, 64).matrix_power(3).softmax(1)  # what the lock is for
if not FIXED:
    lock.unlink()

model = torch.nn.Sequential(
    torch.nn.Linear(64, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 512), torch.nn.ReLU(), torch.nn.Linear(512, 64)
)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
while True:
    x = torch.rand(128, 64)
    loss = torch.nn.functional.mse_loss(model(x), x @ tables)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if not clock.step():
        break
