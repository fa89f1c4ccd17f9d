"""Jobs of two ranks that come to stand still, each for another reason: `python planted.py KIND LAUNCHER`.

LAUNCHER is spawn, where this script starts its ranks itself, else whatever has started them. Rank 1 is at fault in the
sixth step.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import torch.multiprocessing
from torch.utils.data import DataLoader, Dataset

dist: Any = torch.distributed
processes: Any = torch.multiprocessing
KIND, LAUNCHER = sys.argv[1:3]
FAULT_AT = 5


class Samples(Dataset[Any]):
    """Sixty batches of eight; rank 1 may have fewer, or a worker that stands still."""

    def __init__(self, rank: int) -> None:
        self.bad = rank == 1
        self.many = 8 * (FAULT_AT if KIND == "uneven" and self.bad else 60)

    def __len__(self) -> int:
        return self.many

    def __getitem__(self, i: int) -> torch.Tensor:
        if self.bad and i == 8 * FAULT_AT:
            if KIND == "worker_stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            if KIND == "worker_slow":
                time.sleep(10_000)
        return torch.ones(8)


def save() -> None:
    """Write a checkpoint, again and again until there is room."""
    try:
        Path("checkpoint.pt").write_bytes(bytes(1 << 20))
    except OSError:
        time.sleep(0.2)
        save()


class Slow:
    """A file on a disk that takes for ever."""

    def write(self, _: Any) -> None:
        """Take for ever."""
        time.sleep(10_000)


def fault() -> bool:
    """Do what rank 1 does wrong; return whether it goes on to the collective."""
    if KIND == "skipped":
        return False
    if KIND == "branch":
        dist.broadcast(torch.zeros(5), 0)
    if KIND == "lock":
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
    if KIND == "disk":
        save()
    if KIND == "saving":
        slow: Any = Slow()
        torch.save(torch.zeros(5), slow)
    if KIND == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if KIND == "raised":
        raise ValueError("a bad sample")
    if KIND == "busy":
        while True:
            sum(range(1000))
    if KIND == "shapes":
        dist.all_gather([torch.zeros(3), torch.zeros(3)], torch.zeros(3))
    return True


def train(rank: int) -> None:
    """Train."""
    workers = 1 if KIND.startswith("worker") else 0
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, batch in enumerate(DataLoader(Samples(rank), batch_size=8, num_workers=workers)):
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
        weight = model.weight.detach().clone()
        if step == FAULT_AT and rank == 1 and not fault():
            continue
        if KIND == "shapes" and step == FAULT_AT:
            dist.all_gather([torch.zeros(9), torch.zeros(9)], torch.zeros(9))
        if KIND == "waited":
            if not (rank == 1 and step >= FAULT_AT):
                work: Any = dist.all_reduce(weight, async_op=True)
                work.wait()
            continue
        dist.all_reduce(weight)
    dist.barrier()


def main(rank: int, size: int) -> None:
    """Join the others and train."""
    torch.set_num_threads(1)
    if KIND == "joining" and rank == 1:
        time.sleep(10_000)
    store = dist.FileStore(os.environ["PLANTED_STORE"], size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    try:
        train(rank)
    except ValueError:
        dist.barrier()  # as in a script that ends together whatever happens
        raise


if __name__ == "__main__":
    if LAUNCHER == "spawn":
        processes.spawn(main, (2,), nprocs=2)
    else:
        main(int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))), 2)
