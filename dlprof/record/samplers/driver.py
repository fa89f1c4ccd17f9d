"""What the samplers of GPUs share: each queries its vendor's driver about the GPUs that this host's ranks train on.

Nothing is queried before a rank trains on such a GPU. Each query is tried once on each GPU: what this GPU, driver or
permission does not give is left out of the file from then on, and never a zero in it. What fails once is missing once.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, TypeVar

from dlprof.record.log import Log
from dlprof.record.samplers.sampling import Periodic, RankHere, line

Reading = Mapping[str, float]
T = TypeVar("T")


class Fate(Enum):
    """What an error of a driver's means."""

    ONCE = "one reading is missing"
    REFUSED = "this GPU will not answer this query later either"
    LOST = "this GPU cannot be read any more"
    OVER = "no GPU can be read any more"


class Gpu:
    """One GPU, and the queries that it answers."""

    def __init__(self, sampler: DriverSampler, *queries: Callable[[], Reading]) -> None:
        self.sampler = sampler
        self.queries = list(queries)

    def read(self) -> Reading:
        """Return what can be read now. Raises one of the driver's errors where the GPU or the driver has gone."""
        row: dict[str, float] = {}
        for query in tuple(self.queries):
            try:
                row.update(query())
            except self.sampler.errors as e:  # noqa: PERF203 - each may refuse
                fate = self.sampler.fate(e)
                if fate in (Fate.LOST, Fate.OVER):
                    raise
                if fate is Fate.REFUSED:
                    self.queries.remove(query)
        return row


class DriverSampler(Periodic, ABC):
    """Writes gpu.jsonl of each rank here that trains on a GPU of one vendor: keys as metrics of the table `samples`."""

    name: str
    library: str  # the driver's, in messages
    identity: str  # what torch must say of a GPU
    errors: tuple[type[Exception], ...] = ()  # the driver's, once it is loaded

    def __init__(self) -> None:
        self.driver: Any = None
        self.gpus: dict[str, Gpu | None] = {}  # by its name for the driver; None: it cannot be read, or no longer
        self._logs: dict[RankHere, Log] = {}
        self._over = False  # the driver has gone

    @abstractmethod
    def _name_of(self, device: Mapping[str, Any]) -> str | None:
        """Return the driver's name for a rank's GPU; "": this torch does not report it, None: another vendor's."""

    @abstractmethod
    def _load(self) -> Any:
        """Return the driver, ready, and set `errors`; raise OSError with a message if this host has none that works."""

    @abstractmethod
    def _unload(self) -> None:
        """Leave the driver; may raise its errors."""

    @abstractmethod
    def _open(self, name: str, device: Mapping[str, Any]) -> Gpu:
        """Find a GPU; raise one of the driver's errors if there is none."""

    @abstractmethod
    def fate(self, error: Exception) -> Fate:
        """Return what one of the driver's errors means."""

    def tick(self) -> None:
        """Read each GPU that ranks train on, and write a line for each of these ranks."""
        read: dict[str, Reading | None] = {}
        for rank in self.host.ranks:
            name = self._name_of(rank.device)
            if name is None or self._over:
                continue
            if self.driver is None:
                self.driver = self._load()
            if not name:
                self.host.warn(f"the GPU of rank {rank.rank} is not sampled: this torch does not tell {self.identity}")
                continue
            if name not in read:
                read[name] = self.safely(name, lambda: self._read(name, rank.device))  # noqa: B023 - called here
            if row := read[name]:
                if rank not in self._logs:
                    self._logs[rank] = self.host.log("gpu.jsonl", rank)
                self._logs[rank].write(line(row))

    def stop(self) -> None:
        """Leave the driver, which may have gone before us."""
        if self.driver is not None:
            with contextlib.suppress(*self.errors):
                self._unload()

    def safely(self, name: str, ask: Callable[[], T]) -> T | None:
        """Return the answer; None, after one warning, where the GPU or the driver has gone."""
        if self._over:
            return None
        try:
            return ask()
        except self.errors as e:
            words = " ".join(str(e.args[0] if isinstance(e, LookupError) else e).split())
            if self.fate(e) is Fate.OVER:
                self._over = True
                self.host.warn(f"no GPU is sampled any more: {self.library}: {words}")
            else:
                more = " any more" if name in self.gpus else ""
                self.gpus[name] = None  # lost, or to be reset: the others are read on
                self.host.warn(f"GPU {name} is not sampled{more}: {words}")
            return None

    def _read(self, name: str, device: Mapping[str, Any]) -> Reading | None:
        if name not in self.gpus:
            self.gpus[name] = self._open(name, device)
        gpu = self.gpus[name]
        return gpu.read() if gpu is not None else None
