"""What ranks agree on without a collective: rank 0 writes it to the process group's own store, and the others read it.

Only what ranks cannot compute alike by themselves is written, a few numbers in a job. A rank that reads waits for an
answer of the store's server, some tens of µs, and for nothing else; what fails there ends the agreement, not the job.
"""

from __future__ import annotations

from typing import Any

from dlprof.record.ranks import process_group


class Agreed:
    """Numbers by name. `leads`: others may follow this rank; `follows`: rank 0 leads it; neither: it is alone."""

    def __init__(self) -> None:
        self._store: Any = None
        self._rank = -1
        self._run = ""
        self._written: dict[str, int] = {}
        self.size = 1  # how many ranks agree

    def connect(self, run: str) -> None:
        """Look for the process group, if none was found yet. `run`: a name of the recording, alike on all ranks.

        Of several recordings of one job, each has numbers of its own.
        """
        if self._store is not None or self._rank == 0:
            return
        distributed = process_group()
        if distributed is None or distributed.get_world_size() < 2:
            return
        try:
            from torch.distributed.distributed_c10d import _get_default_store

            self.share(_get_default_store(), distributed.get_rank(), distributed.get_world_size(), run)
        except Exception:  # noqa: BLE001 - a backend without a store, as MPI's
            self._rank = 0

    def share(self, store: Any, rank: int, size: int = 2, run: str = "") -> None:
        """Agree with the other ranks that have this store."""
        self._store, self._rank, self.size, self._run = store, rank, size, run

    @property
    def leads(self) -> bool:
        """Whether others may follow this rank."""
        return self._store is not None and self._rank == 0

    @property
    def follows(self) -> bool:
        """Whether rank 0 leads this one."""
        return self._store is not None and self._rank > 0

    def write(self, name: str, number: int) -> None:
        """Write a number, if this rank leads."""
        if self.leads and self._written.get(name) != number:
            self._written[name] = number
            try:
                self._store.set(f"dlprof/{self._run}/{name}", str(number))
            except Exception:  # noqa: BLE001 - the server is gone, and the job with it
                self._store = None

    def read(self, name: str) -> int | None:
        """Return the number that rank 0 wrote; None: none, or nothing can be read."""
        if not self.follows:
            return None
        try:
            key = f"dlprof/{self._run}/{name}"
            return int(self._store.get(key)) if self._store.check([key]) else None
        except Exception:  # noqa: BLE001 - as above
            self._store = None
            return None
