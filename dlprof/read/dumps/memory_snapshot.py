"""Reads snapshots of PyTorch's allocator, as `torch.cuda.memory._dump_snapshot(file)` writes them.

What it holds at the moment is in `segments`, of any version; what happened before, in `device_traces`, where
`_record_memory_history` ran: a ring of the last events of each device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlprof.errors import DlprofError
from dlprof.read.dumps import pickles
from dlprof.read.dumps.pickles import Columns, Sites
from dlprof.read.formats import Format, Head, Part
from dlprof.read.kineto.patterns import rank_in
from dlprof.read.limits import MOST_ROWS, limit, too_many
from dlprof.read.sources import Reading

if TYPE_CHECKING:
    import pandas as pd

ACTIONS = (
    *("alloc", "free_requested", "free_completed", "oom", "snapshot"),
    *("segment_alloc", "segment_free", "segment_map", "segment_unmap"),
)
STATES = ("active_allocated", "active_awaiting_free", "inactive")

_LARGEST = 1 << 62


def recognise(head: Head) -> Sequence[Part]:
    """Return one part where a file is a pickle that begins with the allocator's segments."""
    if not pickles.is_pickle(head.start):
        return ()
    start = head.start
    mine = (b"segments" in start and b"segment_type" in start) or (b"device_traces" in start)
    older = b"total_size" in start and b"active_size" in start  # a list of segments alone, before torch 2.0
    return (Part(rank_in(head.name)),) if mine or older else ()


def read(path: Path, piece: str = "") -> Reading:  # noqa: ARG001 - one piece is all of it
    """Return the tables "memory_events" and "memory_blocks"; facts: `allocator`, its settings.

    A file that is cut off is read up to the cut. Raises DlprofError if it is no such snapshot, or holds
    more than plain data.
    """
    data, cut = pickles.bytes_of(path)
    try:
        held, ends = pickles.load(data)
    except pickles.NotPlain as e:
        raise DlprofError(f"{path}: not read as a memory snapshot: {e}") from None
    segments = held if isinstance(held, list) else held.get("segments") if isinstance(held, dict) else None
    traces = held.get("device_traces") if isinstance(held, dict) else None
    if not isinstance(segments, list) or not (segments or traces):
        raise DlprofError(f"{path}: a pickle, and no memory snapshot: it has no segments")
    sites = Sites()
    left = [limit(MOST_ROWS)]
    blocks = Columns("memory_blocks")
    for row in _blocks(segments, sites, left):
        blocks.add(row)
    events = Columns("memory_events")
    for row in _events(traces if isinstance(traces, list) else [], sites, left):
        events.add(row)
    warnings = []
    if cut or ends:
        warnings.append(f"{path.name}: its end is missing: what comes before is used")
    if left[0] <= 0:
        warnings.append(too_many(path, "events and blocks", MOST_ROWS))
    tables: dict[str, pd.DataFrame] = {"memory_blocks": blocks.frame()}
    lacks = {}
    if events.count:
        tables["memory_events"] = events.frame()
    else:
        lacks["memory_events"] = (
            "the snapshot has no events (torch.cuda.memory._record_memory_history() before the first step brings them)"
        )
    return Reading(tables, {"allocator": _settings(held)}, tuple(warnings), lacks)


def _number(value: Any) -> int:
    """Return an integer that a table can hold; −1 of anything else."""
    return value if type(value) is int and -_LARGEST < value < _LARGEST else -1


def _pool(value: Any) -> str:
    """Return the memory pool's id as text; "": the default one, or unknown."""
    if isinstance(value, (tuple, list)) and len(value) == 2 and all(type(n) is int for n in value) and any(value):
        return f"{value[0]}:{value[1]}"
    return ""


def _blocks(segments: list[Any], sites: Any, left: list[int]) -> Iterator[tuple[Any, ...]]:
    """Yield a row for each block of each segment, while rows are left."""
    for segment in segments:
        if not isinstance(segment, dict) or left[0] <= 0:
            continue
        device, stream = _number(segment.get("device", 0)), _number(segment.get("stream"))
        base, size = _number(segment.get("address", 0)), _number(segment.get("total_size"))
        pool, expandable = _pool(segment.get("segment_pool_id")), int(bool(segment.get("is_expandable")))
        of = (device, base, size, stream, pool, expandable)
        at = base
        blocks = segment.get("blocks")
        for block in blocks if isinstance(blocks, list) else ():
            left[0] -= 1
            if left[0] <= 0:
                return
            if not isinstance(block, dict) or (bytes_ := _number(block.get("size"))) < 0:
                continue
            history = block.get("history")  # torch before 2.1: the allocations in the block, the latest first
            last = history[0] if isinstance(history, list) and history and isinstance(history[0], dict) else block
            requested = _number(block.get("requested_size", last.get("real_size", bytes_)))
            state = block.get("state")
            site = sites.of(last.get("frames"))
            address = _number(block.get("address", at))
            at += bytes_
            yield (
                *of,
                address,
                bytes_,
                requested if requested >= 0 else bytes_,
                state if state in STATES else "active_awaiting_free" if state == "active_pending_free" else "inactive",
                *site,
            )


def _events(traces: list[Any], sites: Any, left: list[int]) -> Iterator[tuple[Any, ...]]:
    """Yield a row for each event of each device, in order, while rows are left."""
    for device, trace in enumerate(traces):
        for event in trace if isinstance(trace, list) else ():
            left[0] -= 1
            if left[0] <= 0:
                return
            if not isinstance(event, dict) or event.get("action") not in ACTIONS:
                continue
            at = event.get("time_us")
            category = event.get("category")
            yield (
                device,
                at * 1000 if type(at) is int and 0 <= at < _LARGEST // 1000 else -1,
                event["action"],
                _number(event.get("addr")),
                max(_number(event.get("size")), 0),
                _number(event.get("stream")),
                _pool(event.get("pool_id")),
                *sites.of(event.get("frames")),
                category[:80] if isinstance(category, str) else "",
                _number(event.get("device_free")),
            )


def _settings(held: Any) -> dict[str, Any]:
    """Return the allocator's settings as far as a report names them."""
    found = held.get("allocator_settings") if isinstance(held, dict) else None
    if not isinstance(found, dict):
        return {}
    conf = found.get("PYTORCH_CUDA_ALLOC_CONF")
    expandable = found.get("expandable_segments")
    return {
        **({"conf": conf[:300]} if isinstance(conf, str) else {}),
        **({"expandable": expandable} if isinstance(expandable, bool) else {}),
    }


FORMAT = Format(
    name="memory_snapshot",
    title="memory snapshot of PyTorch's allocator",
    recognised="a pickle of plain data with `segments`, and `device_traces`",
    recognise=recognise,
    read=read,
    tables=("memory_events", "memory_blocks"),
    brings="what held the GPU's memory at the peak and when it ran out, by line of the script; fragmentation",
    record="torch.cuda.memory._record_memory_history(), and ._dump_snapshot(file) at the end or when memory runs out",
    lacks={"memory_events": "torch.cuda.memory._record_memory_history() before the first step"},
)
