"""The NVTX ranges of a process: what people, frameworks, PyTorch's operators and NCCL name."""

from __future__ import annotations

import re

import numpy as np

from dlprof.read.columnar.database import MISSING, Database
from dlprof.read.columnar.rows import Ranges
from dlprof.read.nsys.processes import THREADS, of_process

TABLE = "NVTX_EVENTS"

# Event types that are ranges, by their names in the file; the numbers are those of all versions seen (2022 to 2026).
_RANGES = {"NvtxPushPopRange": 59, "NvtxStartEndRange": 60, "NvtxtPushPopRange": 70, "NvtxtStartEndRange": 71}

# What torch.autograd.profiler.emit_nvtx writes behind an operator's name.
_SAID = (", seq = ", ", op_id = ", ", sizes = ", ", input_op_ids = ")
_OPERATOR = re.compile("|".join(map(re.escape, _SAID)))
_LONGEST = 2_000  # characters of a name


class _Names(dict[tuple[bool, str], int]):
    def __missing__(self, key: tuple[bool, str]) -> int:
        self[key] = code = len(self)
        return code


def read(database: Database, process: int | None) -> Ranges:
    """Return the ranges of a process; none where the export has no NVTX."""
    condition = of_process(database, TABLE, process)
    names = ["start", "end", "eventType", "textId", "globalTid"]
    held = database.integers(TABLE, names, *condition)
    count = len(held["start"])
    known, codes = _Names(), np.full(count, -1, dtype=np.int64)
    texts = database.columns(TABLE).get("text")
    if texts is not None:
        # SQLite cuts off what torch says of each call: those names are all different, and the operators' are few.
        place = [f"ifnull(nullif(instr(\"{texts}\", '{said}'), 0), {_LONGEST})" for said in _SAID]
        cut = f"min({', '.join(place)})"
        what = [f'substr("{texts}", 1, {cut} - 1)', f"{cut} < {_LONGEST}"]
        for row, (text, is_operator) in enumerate(database.rows(TABLE, what, *condition)):
            if text is not None and row < count:
                codes[row] = known[bool(is_operator), str(text)]
    of_text = held["textId"]
    referred = np.flatnonzero((codes < 0) & (of_text != MISSING))
    wanted = np.unique(of_text[referred])
    registered = database.texts("StringIds", "id", "value", wanted.tolist())
    place_of = np.array([known[split(registered[i])] if i in registered else -1 for i in wanted.tolist()], np.int64)
    if len(referred):
        codes[referred] = place_of[np.searchsorted(wanted, of_text[referred])]
    is_range = np.isin(held["eventType"], _range_types(database)) & (codes >= 0) & (held["start"] != MISSING)
    ended = (held["end"] != MISSING) & (held["end"] >= held["start"])
    keep = np.flatnonzero(is_range & ended)
    keep = keep[np.lexsort((-held["end"][keep], held["start"][keep]))]
    return Ranges(
        names=[text for _, text in known],
        operator=[is_operator for is_operator, _ in known],
        name=codes[keep],
        start=held["start"][keep],
        end=held["end"][keep],
        thread=np.where(held["globalTid"] == MISSING, 0, held["globalTid"] % THREADS)[keep],
        open=int((is_range & ~ended).sum()),
    )


def split(text: str) -> tuple[bool, str]:
    """Return whether a text is an operator of PyTorch's, and its name."""
    said = _OPERATOR.search(text)
    return said is not None, (text[: said.start()] if said else text)[:_LONGEST]


def _range_types(database: Database) -> list[int]:
    """Return the numbers of the event types that are ranges, as the file itself has them."""
    told = {name: number for number, name in database.texts("ENUM_NSYS_EVENT_TYPE", "id", "name").items()}
    return [told.get(name, number) for name, number in _RANGES.items()]
