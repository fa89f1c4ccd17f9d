"""What is to be measured: sizes, collectives, how often and for how long."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass

from dlprof.errors import DlprofError

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")
DTYPES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int8": 1}

FACTOR = 4
MOST_SIZES = 64
MOST_BYTES = 1 << 40

_SIZE = re.compile(r"(\d+)([KMGT]?)(?:i?B)?", re.IGNORECASE)
_RANGE = re.compile(r"(.+?)\.\.([^*]+)(?:\*(\d+))?")
_POWERS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}


@dataclass(frozen=True)
class Plan:
    """What is to be measured. `sizes` in bytes, ascending. `backend` "": nccl where each rank has a GPU, else gloo.

    `iterations`: samples of each collective and size, after `warmup` calls. `seconds` bounds all of it, but for
    starting. `timeout_s`: how long a rank waits for the others before it gives up.
    """

    sizes: tuple[int, ...]
    collectives: tuple[str, ...] = COLLECTIVES
    iterations: int = 20
    warmup: int = 5
    dtype: str = "float32"
    backend: str = ""
    seconds: float = 60.0
    timeout_s: float = 60.0

    def to_text(self) -> str:
        """Return it as text for another process."""
        return json.dumps(asdict(self))


def from_text(text: str) -> Plan:
    """Return the plan that `to_text` has written."""
    data = json.loads(text)
    return Plan(**{**data, "sizes": tuple(data["sizes"]), "collectives": tuple(data["collectives"])})


def sizes(text: str) -> tuple[int, ...]:
    """Return the sizes that words like 1K..256M, 1K..1G*2 or 64K,1M name, in bytes; raise DlprofError.

    K, M and G are powers of 1,024, as in nccl-tests. A range goes by factors of FACTOR where it names none.
    """
    found: set[int] = set()
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            found.add(_bytes(part.strip()))
            continue
        at, last, factor = _bytes(match[1]), _bytes(match[2]), int(match[3] or FACTOR)
        if at > last or factor < 2:
            raise DlprofError(f"{part.strip()!r} is no range of sizes; write 1K..256M or 1K..256M*2")
        while at <= last:
            found.add(at)
            at *= factor
    if len(found) > MOST_SIZES:
        raise DlprofError(f"{len(found)} sizes; at most {MOST_SIZES} are measured at once")
    return tuple(sorted(found))


def _bytes(text: str) -> int:
    match = _SIZE.fullmatch(text)
    size = int(match[1]) << _POWERS[match[2].upper()] if match and len(match[1]) < 20 else 0
    if not 0 < size <= MOST_BYTES:
        raise DlprofError(f"{text!r} is no size; write 64K, 1M or 2G")
    return size


def collectives(text: str) -> tuple[str, ...]:
    """Return the collectives that a list names by commas, in the order of COLLECTIVES; raise DlprofError."""
    named = [name.strip().replace("-", "_") for name in text.split(",")]
    if unknown := [name for name in named if name not in COLLECTIVES]:
        raise DlprofError(f"no collective {unknown[0]!r}; there are: {', '.join(COLLECTIVES)}")
    return tuple(name for name in COLLECTIVES if name in named)
