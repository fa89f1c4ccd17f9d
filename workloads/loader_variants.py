"""Train a small network on records that come in any of the ways a DataLoader has, well, or with one of FAULTS planted.

    python workloads/loader_variants.py                                        files, two workers, forked
    python workloads/loader_variants.py --storage tar --start-method spawn     a stream of sharded tar files
    python workloads/loader_variants.py --storage hdf5                         or lmdb, webdataset: see parts/formats.py
    python workloads/loader_variants.py --ceiling                              the loader alone: how fast it can be
    python workloads/loader_variants.py --fault workers_restart                with a mistake

The records are written once, under --data, in each form: a file a record, tar files of many (read from front to end, a
share of them a worker), one array that is mapped into memory, and what parts/formats.py has. --local copies them to a
folder of this machine's first, as jobs on a cluster do.
"""

from __future__ import annotations

import argparse
import fcntl
import functools
import io
import shutil
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own custom
from parts.formats import Hdf5, Lmdb, Shared, WebDataset
from parts.job import announce, batches, options, read
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

# ---- the faults ----------------------------------------------------------------------------------------------------

# What can be planted, and the dlprof rule that must notice it. plant() has a line for each.
FAULTS = {
    "blocking_copies": "blocking_copy",  # from pinned memory, but each is waited for
    "needless_workers": "needless_workers",  # workers for batches that are cheaper to make than to hand over
    "no_workers": "input_wait",  # the training thread reads
    "one_thread": "idle_cores",  # on the CPU, whose other cores do nothing
    "pageable": "pageable_copy",  # batches copied to the GPU from ordinary memory
    "slow_collate": "input_wait",  # samples put together number by number, in Python
    "slow_storage": "input_wait",  # each read waits, for longer than the workers can hide
    "slow_worker": "slow_worker_batches",  # the first worker reads from slower storage than the others
    "workers_restart": "worker_restart",  # new workers in each of many short epochs
}
# Options under which it is healthy as well.
HEALTHY = {
    "mapped": "--storage mapped",
    "spawned": "--start-method spawn",
    "tar": "--storage tar",
}
# What else a fault needs, to cost more than a little.
SHOWN_WITH = {"one_thread": "--storage mapped --workers 0 --read-ms 0 --batch-size 512"}
OTHER_STEP = ("needless_workers",)
NEEDS_GPU = ("blocking_copies", "pageable")  # on the CPU no batch is copied
RANKS = 1  # no distributed job
# What `dlprof run loader_variants --ladder` records: options, each on top of those before.
LADDER = {
    "files": "--storage files --workers 0 --epochs 8",
    "tar": "--storage tar",
    "webdataset": "--storage webdataset",
    "hdf5": "--storage hdf5",
    "lmdb": "--storage lmdb",
    "memory": "--storage memory",
    "workers": "--workers 2",
}


def plant(args: argparse.Namespace) -> None:
    """Change the settings of a healthy run into those of a run with args.fault. No other code asks for the fault."""
    healthy: dict[str, Any] = {"collate": None, "first_worker_ms": 0.0, "threads": None}
    faulty: dict[str, dict[str, Any]] = {
        "blocking_copies": {"pin_memory": True, "non_blocking": False},
        "needless_workers": {"storage": "mapped", "read_ms": 0.0, "workers": 2, "layers": 4, "batch_size": 8},
        "no_workers": {"workers": 0, "read_ms": max(args.read_ms, 0.5)},
        "one_thread": {"threads": 1},
        "pageable": {"pin_memory": False, "non_blocking": False},
        "slow_collate": {"workers": 1, "collate": slow_collate},
        "slow_storage": {"read_ms": 4.0},
        "slow_worker": {"workers": max(2, args.workers), "first_worker_ms": 4.0},
        "workers_restart": {"persistent_workers": False, "records": args.records // 8, "epochs": args.epochs * 8},
    }
    vars(args).update(healthy | faulty.get(args.fault, {}))


def slow_collate(samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    """Put a batch together number by number, each record centred and scaled, in Python."""
    rows = []
    for record, _ in samples:
        mean = sum(float(number) for number in record) / len(record)
        spread = max(abs(float(number) - mean) for number in record)
        rows.append([3 * (float(number) - mean) / spread for number in record])
    return torch.tensor(rows), torch.tensor([label for _, label in samples])


# ---- the records ---------------------------------------------------------------------------------------------------

WIDTH = 512  # numbers of a record
CLASSES = 10
SHARDS = 8

Record = tuple[Tensor, int]


def make_records(data: Path, records: int) -> Path:
    """Return the folder with files/*.npy, shards/*.tar and records.npy, made unless it is there.

    Whoever comes first writes, and others wait on the lock; what an interrupted run left half done is written again.
    """
    folder, partial = data / f"records-{records}", data / f"records-{records}.partial"
    data.mkdir(parents=True, exist_ok=True)
    with (data / f"records-{records}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.exists():
            return folder
        print(f"writing {records} records into {folder}", flush=True)
        shutil.rmtree(partial, ignore_errors=True)
        (partial / "files").mkdir(parents=True)
        (partial / "shards").mkdir()
        rng = np.random.default_rng(7)
        centres = rng.normal(size=(CLASSES, WIDTH))
        every = rng.normal(size=(records, WIDTH)) + centres[np.arange(records) % CLASSES]
        every = every.astype(np.float32)
        np.save(partial / "records.npy", every)
        for n, record in enumerate(every):
            np.save(partial / "files" / f"{n:06d}.npy", record)
        for shard in range(SHARDS):
            with tarfile.open(partial / "shards" / f"{shard:03d}.tar", "w") as tar:
                for n in range(shard, records, SHARDS):
                    tar.add(partial / "files" / f"{n:06d}.npy", f"{n:06d}.npy")
        partial.rename(folder)
    return folder


def copied(folder: Path, local: Path) -> Path:
    """Return a folder of this machine's with the same records, copied there unless they are."""
    to, partial = local / folder.name, local / f"{folder.name}.partial"
    if not to.exists():
        began = time.perf_counter()
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(folder, partial)
        partial.rename(to)
        print(f"copied the records to {to} in {time.perf_counter() - began:.2f} s", flush=True)
    return to


class Files(Dataset[Record]):
    """A file a record."""

    def __init__(self, folder: Path, read: Callable[[], None]) -> None:
        self.files, self.read = sorted((folder / "files").glob("*.npy")), read

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Record:
        self.read()
        return torch.from_numpy(np.load(self.files[index])), index % CLASSES


class Mapped(Dataset[Record]):
    """One array, mapped into memory: a record is read when it is touched."""

    def __init__(self, folder: Path, read: Callable[[], None]) -> None:
        self.path, self.read = folder / "records.npy", read
        self.records: Any = None  # each worker maps it for itself: a mapping does not travel to spawned ones
        self.length = len(np.load(self.path, mmap_mode="r"))

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Record:
        if self.records is None:
            self.records = np.load(self.path, mmap_mode="r")
        self.read()
        return torch.from_numpy(np.array(self.records[index])), index % CLASSES


class Shards(IterableDataset[Record]):
    """A stream: each worker reads its share of the tar files, from front to end."""

    def __init__(self, folder: Path, read: Callable[[], None]) -> None:
        self.shards, self.read = sorted((folder / "shards").glob("*.tar")), read

    def __iter__(self) -> Iterator[Record]:
        """Read this worker's shards."""
        worker = get_worker_info()
        mine = self.shards if worker is None else self.shards[worker.id :: worker.num_workers]
        for shard in mine:
            with tarfile.open(shard, "r|") as tar:
                for member in tar:
                    self.read()
                    file = tar.extractfile(member)
                    assert file is not None
                    record = np.load(io.BytesIO(file.read()))
                    yield torch.from_numpy(record), int(member.name[:6]) % CLASSES


STORAGE: dict[str, Callable[[Path, Callable[[], None]], Dataset[Record]]] = {
    "files": Files,
    "mapped": Mapped,
    "tar": Shards,
    "hdf5": functools.partial(Hdf5, classes=CLASSES),
    "lmdb": functools.partial(Lmdb, classes=CLASSES),
    "webdataset": functools.partial(WebDataset, classes=CLASSES),
    "memory": functools.partial(Shared, classes=CLASSES),
}
STREAMS = ("tar", "webdataset")  # have an order of their own


class Storage:
    """What a read waits for beside the local disk's time, as over a network; longer for the first worker if asked."""

    def __init__(self, read_ms: float, first_worker_ms: float) -> None:
        self.read_ms, self.first_worker_ms = read_ms, first_worker_ms

    def __call__(self) -> None:
        """Wait as a read does."""
        worker = get_worker_info()
        first = worker is not None and worker.id == 0
        time.sleep((self.read_ms + self.first_worker_ms * first) / 1e3)


# ---- the options ---------------------------------------------------------------------------------------------------


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the options, with those of the fault planted; a usage error exits with 2."""
    parser, switch = options(__doc__, FAULTS), argparse.BooleanOptionalAction
    add = parser.add_argument
    add("--data", type=Path, default=Path("data"), help="where the records are kept (default: data)")
    add("--storage", choices=list(STORAGE), default="files")
    add("--records", type=int, default=2048, help="of an epoch (default: 2048)")
    add("--batch-size", type=int, default=64, help="(default: 64)")
    add("--epochs", type=int, default=6, help="(default: 6)")
    add("--steps", type=int, help="stop after so many (default: all epochs')")
    add("--workers", type=int, default=2, help="loader processes (default: 2)")
    add("--prefetch-factor", type=int, default=2, help="batches ahead, a worker (default: 2)")
    add("--persistent-workers", action=switch, default=True, help="keep them between epochs")
    add("--pin-memory", action=switch, help="default: on a GPU")
    add("--non-blocking", action=switch, default=True, help="queue copies to the GPU, wait for none")
    add("--start-method", choices=["fork", "forkserver", "spawn"], default="fork")
    add("--read-ms", type=float, default=0.2, help="what a read waits for storage (default: 0.2)")
    add("--layers", type=int, default=32, help="of the network (default: 32)")
    add("--ceiling", action="store_true", help="a network that costs next to nothing: how fast the loader can be")
    add("--local", type=Path, metavar="DIR", help="copy the records into this folder first, and read them there")
    args = read(parser, argv, {"cpu": {"pin_memory": False}, "cuda": {"pin_memory": True}}, NEEDS_GPU)
    if args.records < args.batch_size:
        parser.error(f"--records {args.records} is not one batch of {args.batch_size}")
    args.layers = 0 if args.ceiling else args.layers
    plant(args)
    return args


# ---- training ------------------------------------------------------------------------------------------------------


def build_loader(args: argparse.Namespace, folder: Path) -> DataLoader[Record]:
    """Return the records in batches of float32 (batch × WIDTH) and their classes."""
    storage = Storage(args.read_ms, args.first_worker_ms)
    records = STORAGE[args.storage](folder, storage)
    return DataLoader(
        records,
        args.batch_size,
        shuffle=None if args.storage in STREAMS else True,
        num_workers=args.workers,
        pin_memory=args.pin_memory,
        drop_last=True,
        prefetch_factor=args.prefetch_factor if args.workers else None,
        persistent_workers=args.persistent_workers and args.workers > 0,
        multiprocessing_context=args.start_method if args.workers else None,
        collate_fn=args.collate,
    )


def main() -> None:
    args = parse()
    folder = make_records(args.data, args.records)
    if args.local:
        folder = copied(folder, args.local)
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    layers = [layer for _ in range(args.layers) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES)).to(args.device)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, fused=True)
    loader = build_loader(args, folder)
    announce(args, f"{args.records} records an epoch, {args.storage}, {args.workers} workers, {args.start_method}")
    began = time.perf_counter()
    step = 0
    for step, (records, labels) in enumerate(batches(loader, args.epochs), start=1):
        records = records.to(args.device, non_blocking=args.non_blocking)
        labels = labels.to(args.device, non_blocking=args.non_blocking)
        loss = F.cross_entropy(model(records), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step == args.steps:
            break
    took = time.perf_counter() - began
    print(f"{step} steps  loss {loss.item():.4f}  {1e3 * took / step:.2f} ms a step, epochs' ends included", flush=True)


if __name__ == "__main__":
    main()
