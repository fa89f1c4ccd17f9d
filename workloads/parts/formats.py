"""Records in the containers that people keep data sets in, with the libraries that they use: HDF5, LMDB, WebDataset.

    pip install h5py lmdb webdataset, or '.[formats]'

Each is written once beside the other forms of the records, and read as its library's own documentation has it: a file
is opened by each worker for itself, when it first reads.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

Record = tuple[Tensor, int]
Read = Callable[[], None]

_SHARDS = 8


def needed(name: str) -> Any:
    """Return a library, or end with a usage error that says what to install."""
    import importlib

    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        raise SystemExit(f"--storage needs {name}: pip install {name}") from None


class Hdf5(Dataset[Record]):
    """One HDF5 file: a chunk a record, as random reads want it."""

    def __init__(self, folder: Path, read: Read, classes: int) -> None:
        self.path, self.read, self.classes = folder / "records.h5", read, classes
        self.records: Any = None
        h5py = needed("h5py")
        if not self.path.exists():
            every = np.load(folder / "records.npy")
            partial = self.path.with_suffix(".partial")
            with h5py.File(partial, "w") as file:
                file.create_dataset("records", data=every, chunks=(1, every.shape[1]))
            partial.rename(self.path)
        with h5py.File(self.path, "r") as file:
            self.length = len(file["records"])

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Record:
        if self.records is None:
            self.records = needed("h5py").File(self.path, "r")["records"]
        self.read()
        return torch.from_numpy(self.records[index]), index % self.classes


class Lmdb(Dataset[Record]):
    """One LMDB database: a value a record, mapped into memory by the library."""

    def __init__(self, folder: Path, read: Read, classes: int) -> None:
        self.path, self.read, self.classes = folder / "records.lmdb", read, classes
        self.transaction: Any = None
        lmdb = needed("lmdb")
        every = np.load(folder / "records.npy", mmap_mode="r")
        self.length = len(every)
        if not self.path.exists():
            partial = self.path.with_suffix(".partial")
            size = 4 * every.nbytes + (1 << 24)
            with lmdb.open(str(partial), map_size=size) as database, database.begin(write=True) as writing:
                for n, record in enumerate(every):
                    writing.put(f"{n:08d}".encode(), record.tobytes())
            partial.rename(self.path)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Record:
        if self.transaction is None:
            # No lock and no read-ahead: many readers of random places.
            database = needed("lmdb").open(str(self.path), readonly=True, lock=False, readahead=False)
            self.transaction = database.begin()
        self.read()
        value = self.transaction.get(f"{index:08d}".encode())
        return torch.from_numpy(np.frombuffer(value, dtype=np.float32).copy()), index % self.classes


class WebDataset(IterableDataset[Record]):
    """Tar files of WebDataset's layout, a share of them a worker, shuffled in a buffer."""

    def __init__(self, folder: Path, read: Read, classes: int) -> None:
        self.read, self.classes = read, classes
        self.shards = folder / "webdataset"
        webdataset = needed("webdataset")
        if not self.shards.exists():
            every = np.load(folder / "records.npy", mmap_mode="r")
            partial = folder / "webdataset.partial"
            partial.mkdir(exist_ok=True)
            for shard in range(_SHARDS):
                with webdataset.TarWriter(str(partial / f"{shard:03d}.tar")) as writer:
                    for n in range(shard, len(every), _SHARDS):
                        writer.write({"__key__": f"{n:08d}", "npy": every[n]})
            partial.rename(self.shards)

    def __iter__(self) -> Iterator[Record]:
        """Read this worker's shards."""
        webdataset = needed("webdataset")
        urls = [str(path) for path in sorted(self.shards.glob("*.tar"))]
        stream = webdataset.DataPipeline(
            webdataset.SimpleShardList(urls),
            webdataset.split_by_worker,
            webdataset.tarfile_to_samples(),
            webdataset.shuffle(256),
        )
        for sample in stream:
            self.read()
            record = np.load(io.BytesIO(sample["npy"]))
            yield torch.from_numpy(record), int(sample["__key__"]) % self.classes


class Shared(Dataset[Record]):
    """All records in shared memory: workers read what the training process has loaded once."""

    def __init__(self, folder: Path, read: Read, classes: int) -> None:
        self.read, self.classes = read, classes
        self.records = torch.from_numpy(np.load(folder / "records.npy")).share_memory_()  # type: ignore[no-untyped-call]

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> Record:
        self.read()
        return self.records[index], index % self.classes
