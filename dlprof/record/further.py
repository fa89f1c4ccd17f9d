"""When a trace window opens again: a file in the run folder asks for it, or steps have become slower and stay so.

Rank 0 alone looks at the file and at the lengths of its steps. It says in the process group's store which steps will be
traced, so far ahead that all ranks have looked there by then. Ranks without a process group look at the file
themselves, and agree on nothing.

Only what ranks cannot compute alike by themselves is in that store, a few numbers in a job. A rank that reads waits for
an answer of the store's server, some tens of µs, and for nothing else. What fails there ends the agreement, not the
job.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dlprof.record.ranks import find_size, process_group
from dlprof.record.recorder import Recorder
from dlprof.record.step_clock import Step, kind_of


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


ASK = "ask-window.json"  # in the run folder: how many steps

# A trace takes tens of MB a rank, and each window costs the job some seconds. `MOST` counts the first one.
MOST, STEPS, MOST_STEPS, WARMUP = 5, 5, 1_000, 1

# How long a rank does not look again. At most so many ranks together ask the store in a second, of whose server one
# thread answers all; ranks that do not know each other look at a disk that may be a network's.
_LOOK_NS, _EACH_NS, _APART_NS = 1_000_000_000, 1_000_000, 5_000_000_000

# The steps that are passed on to collectors ended up to this long ago; ranks are a step apart.
_PASSED_ON_NS, _AHEAD = 1_000_000_000, 2

# Steps have become slower where so many in a row take this many times as long as those before, in the mean, and go on
# to for so long: a neighbour on the machine is often gone sooner. Before that, so many must have been measured.
# The longest step of a row is left out: a checkpoint, or the wait of a host for all that it has launched.
# Of steps that were passed on together only the last are looked at.
_ROW, _MOST_SEEN, _SLOWER, _STAYS_NS, _FEWEST, _WARMING = 20, 40, 1.25, 2_000_000_000, 50, 10


class Due(NamedTuple):
    """A window that is to be opened: its number, its first step and how many, and why: asked or slower."""

    number: int
    first: int
    steps: int
    why: str


class Lengths:
    """Says whether steps have become slower, by sums over them."""

    def __init__(self) -> None:
        self.slower = False
        self._before = self._before_ns = 0  # the steps that are as usual
        self._row = self._row_ns = self._longest_ns = 0  # the row that is not full yet
        self._from_ns = 0  # when the slower rows since the last usual one began

    def see(self, dur_ns: int, end_ns: int) -> None:
        """Take in a step and when it ended."""
        self._row += 1
        self._row_ns += dur_ns
        self._longest_ns = max(self._longest_ns, dur_ns)
        if self._row < _ROW:
            return
        steps, ns = self._row - 1, self._row_ns - self._longest_ns
        self._row = self._row_ns = self._longest_ns = 0
        if self._before >= _FEWEST and ns * self._before >= _SLOWER * self._before_ns * steps:
            self._from_ns = self._from_ns or end_ns - ns
            self.slower = end_ns - self._from_ns >= _STAYS_NS
        else:
            self._before, self._before_ns = self._before + steps, self._before_ns + ns
            self._from_ns, self.slower = 0, False


class Further:
    """Says when the next window is due. Asked while none is open, with the steps that have ended."""

    _recorder: Recorder
    _file: Path

    def __init__(self, agreed: Agreed) -> None:
        self._agreed = agreed
        self._number = 1  # of the last window
        self._lengths: Lengths | None = None
        self._taken = 0  # when the file that was answered last had been written
        self._next_ns = 0  # no look before

    def start(self, recorder: Recorder, *, by_itself: bool) -> None:
        """Begin; a file that is there by now is older than this process. `by_itself`: slower steps open a window."""
        self._recorder = recorder
        self._file = recorder.run / ASK
        self._taken = self._written()
        self._lengths = Lengths() if by_itself else None

    def due(self, done: Sequence[Step]) -> Due | None:
        """Return the next window once it is known; None: there is none yet."""
        if self._number >= MOST:
            return None
        if self._lengths is not None:
            first = self._recorder.clock.trained_from + _WARMING
            for step in done[-_MOST_SEEN:]:
                if not step.profiled and not step.first and step.number >= first and kind_of(step) == "train":
                    self._lengths.see(step.dur_ns, step.end_ns)
        now = done[-1].end_ns
        if now < self._next_ns:
            return None
        agreed = self._agreed
        agreed.connect(self._recorder.run.name)
        known = agreed.leads or agreed.follows
        apart = not known and (self._recorder.rank > 0 or (find_size() or 1) > 1)
        pause = max(_LOOK_NS, _EACH_NS * agreed.size)
        self._next_ns = now + (_APART_NS if apart else pause if agreed.follows else _LOOK_NS)
        if agreed.follows or apart:
            self._lengths = None  # rank 0's are looked at
        if agreed.follows:
            return self._from_rank_0()
        steps, why = self._requested(), "asked"
        if steps is None and self._lengths is not None and self._lengths.slower:
            steps, why, self._lengths = STEPS, "slower", None
        if steps is None:
            return None
        first = done[-1].number + 1 + WARMUP
        if agreed.leads:
            each_ns = max((now - done[0].start_ns) / len(done), 1)
            first += math.ceil((2 * pause + _PASSED_ON_NS) / each_ns) + _AHEAD
        self._number += 1
        agreed.write(f"window {self._number} steps", steps)
        agreed.write(f"window {self._number} slower", int(why == "slower"))
        agreed.write(f"window {self._number}", first)  # the last one: who reads it finds the others
        return Due(self._number, first, steps, why)

    def _from_rank_0(self) -> Due | None:
        """Return the window that rank 0 has written to the store."""
        name = f"window {self._number + 1}"
        if (first := self._agreed.read(name)) is None:
            return None
        self._number += 1
        steps, slower = self._agreed.read(f"{name} steps"), self._agreed.read(f"{name} slower")
        return Due(self._number, first, steps or STEPS, "slower" if slower else "asked")

    def _requested(self) -> int | None:
        """Return how many steps a new file asks for; None: there is none, or it makes no sense."""
        written = self._written()
        if written in (0, self._taken):
            return None
        self._taken = written
        try:
            steps = json.loads(self._file.read_text())["steps"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return steps if isinstance(steps, int) and 0 < steps <= MOST_STEPS else None

    def _written(self) -> int:
        try:
            return self._file.stat().st_mtime_ns
        except OSError:
            return 0
