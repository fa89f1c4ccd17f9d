"""Reads dumps of PyTorch's flight recorder: the last collectives of one rank, each with its state and its caller.

ProcessGroupNCCL writes a pickle for each rank when a collective times out. Its name is TORCH_FR_DUMP_TEMP_FILE plus the
rank (before torch 2.8: TORCH_NCCL_DEBUG_INFO_TEMP_FILE). `torch._C._distributed_c10d._dump_fr_trace_json()` returns the
same as JSON, without stacks. Gloo's collectives are recorded too; their state is always "scheduled".
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dlprof.errors import DlprofError
from dlprof.read.dumps import pickles
from dlprof.read.dumps.pickles import Columns, Sites
from dlprof.read.formats import Format, Head, Part
from dlprof.read.kineto.patterns import rank_in
from dlprof.read.limits import MOST_ENTRIES, MOST_RANKS, limit
from dlprof.read.sources import Reading

_LARGEST = 1 << 62
_STATES = ("scheduled", "started", "completed")
_LONGEST = 200  # characters of a name or of the sizes of tensors

_LAST_NUMBER = re.compile(r"(\d{1,7})(?:\.(?:json|pickle|pkl|pt|bin))?(?:\.gz)?$")
_RANKS = re.compile(r"\s*\[([\d,\s]*)\]\s*")


def recognise(head: Head) -> Sequence[Part]:
    """Return one part if a file is a pickle or JSON with the recorder's entries. Only its name holds the rank."""
    start = head.start
    if pickles.is_pickle(start):
        mine = b"pg_config" in start or (b"profiling_name" in start and b"record_id" in start)
    else:
        names = head.first if head.opens in ("{", "[") else b""
        mine = b'"profiling_name"' in names and b'"record_id"' in names
        mine = mine or (b'"pg_config"' in names and b'"pg_status"' in names)
    return (Part(_rank(head.name)),) if mine else ()


def _rank(name: str) -> int | None:
    """Return the rank in a file's name, where the recorder puts it at the end; None: there is none."""
    known = rank_in(name)
    if known is not None:
        return known
    last = _LAST_NUMBER.search(name)
    return int(last[1]) if last else None


def read(path: Path, piece: str = "") -> Reading:  # noqa: ARG001 - one piece is all of it
    """Return the table "recorder_calls"; facts: `recorder` (version, groups, enqueued) and world_size.

    `groups`: name → ranks, as far as the dump has them. `enqueued`: name → number of the last collective that the rank
    issued. A file that is cut off is read up to the cut. Raises DlprofError if it is no such dump, or holds more than
    plain data.
    """
    data, cut = pickles.bytes_of(path)
    try:
        held, ends = pickles.load(data) if pickles.is_pickle(data[:4]) else _json(data)
    except pickles.NotPlain as e:
        raise DlprofError(f"{path}: not read as a dump of the flight recorder: {e}") from None
    entries = held if isinstance(held, list) else held.get("entries") if isinstance(held, dict) else None
    if not isinstance(entries, list):
        raise DlprofError(f"{path}: no dump of the flight recorder: it has no entries")
    sites = Sites()
    most = limit(MOST_ENTRIES)
    columns = Columns("recorder_calls")
    for entry in entries[:most]:
        if (row := _row(entry, sites)) is not None:
            columns.add(row)
    warnings = []
    if cut or ends:
        warnings.append(f"{path.name}: its end is missing: what comes before is used")
    if len(entries) > most:
        warnings.append(
            f"{path.name}: holds more than {most:,} collectives: the first are used (--no-limits reads all)"
        )
    bad = min(len(entries), most) - columns.count
    if bad > 0:
        warnings.append(f"{path.name}: {bad:,} malformed entries are left out")
    about = held if isinstance(held, dict) else {}
    groups, world = _groups(about.get("pg_config"))
    names = _names(entries[:most])
    facts: dict[str, Any] = {
        "recorder": {
            "version": str(about.get("version", ""))[:20],
            "groups": groups,
            "enqueued": dict(_statuses(about.get("pg_status"), names)),
        }
    }
    if world:
        facts["world_size"] = world
    return Reading({"recorder_calls": columns.frame()}, facts, tuple(warnings))


def _json(data: bytes) -> tuple[Any, bool]:
    """Return the contents of a JSON dump, and whether it is cut off; then only the entries before the cut."""
    text = data.decode(errors="replace")
    try:
        return json.loads(text), False
    except RecursionError:
        raise pickles.NotPlain("collections within each other, too many") from None
    except ValueError:
        pass
    begin = re.search(r'"entries"\s*:\s*\[', text)
    entries: list[Any] = []
    decode, at = json.JSONDecoder().raw_decode, begin.end() if begin else len(text)
    while True:
        at = re.compile(r"[\s,]*").match(text, at).end()  # type: ignore[union-attr] # it always matches
        try:
            entry, at = decode(text, at)
        except (ValueError, RecursionError):
            break
        entries.append(entry)
    if not entries:
        raise pickles.NotPlain("broken JSON")
    return {"entries": entries}, True


def _number(value: Any, unknown: int = -1) -> int:
    """Return an integer, also one that JSON holds as text; `unknown` for anything else."""
    if isinstance(value, str) and value.lstrip("-").isdecimal() and len(value) < 20:
        value = int(value)
    return value if type(value) is int and -_LARGEST < value < _LARGEST else unknown


def _text(value: Any) -> str:
    return value[:_LONGEST] if isinstance(value, str) else ""


def _row(entry: Any, sites: Any) -> tuple[Any, ...] | None:
    """Return the row of an entry; None if it is malformed."""
    if not isinstance(entry, dict) or not isinstance(entry.get("profiling_name"), str):
        return None
    group, about = _group(entry)
    backend, colon, op = _text(entry["profiling_name"]).partition(":")
    p2p = entry.get("is_p2p") is True or op.startswith(("send ", "recv "))
    # Version 1 numbers collectives and p2p calls of a group in one sequence.
    number = entry.get("p2p_seq_id") if p2p else entry.get("collective_seq_id", entry.get("seq_id"))
    state = entry.get("state")
    retired = entry.get("retired")
    created = _number(entry.get("time_created_ns"))
    if created < 0 and (at := _number(entry.get("time_created_us"))) >= 0:
        created = at * 1000
    return (
        _number(entry.get("record_id", entry.get("id"))),
        group,
        about,
        "p2p" if p2p else "collective",
        _number(number),
        op if colon else backend,
        backend if colon else "",
        state if state in _STATES else "scheduled",
        int(retired) if isinstance(retired, bool) else -1,
        created,
        _number(entry.get("time_discovered_started_ns")) or -1,
        _number(entry.get("time_discovered_completed_ns")) or -1,
        _number(entry.get("timeout_ms")),
        _sizes(entry.get("input_sizes")),
        _sizes(entry.get("output_sizes")),
        _types(entry),
        *sites.of(entry.get("frames")),
    )


def _group(entry: Mapping[Any, Any]) -> tuple[str, str]:
    """Return the name and the description of an entry's process group; "" for a missing description."""
    group = entry.get("process_group")
    if isinstance(group, (tuple, list)) and len(group) == 2:
        about = _text(group[1])
        return _text(group[0]), "" if about == "undefined" else about
    if isinstance(group, str) and group:
        return _text(group), ""
    return str(_number(entry.get("pg_id"), 0)), ""


def _sizes(value: Any) -> str:
    """Return sizes of tensors as text: "1000" for one tensor of 1,000 elements, "2x3, 4" for two; "": unknown."""
    texts = []
    for size in value if isinstance(value, (list, tuple)) else ():
        if not isinstance(size, (list, tuple)) or not all(type(n) is int for n in size):
            return ""
        texts.append("x".join(map(str, size[:8])) or "scalar")
        if len(texts) >= 8:
            break
    return ", ".join(texts)[:_LONGEST]


def _types(entry: Mapping[Any, Any]) -> str:
    """Return the element types of a call's inputs, and of its outputs if they differ: "Float", "Half → Float"."""
    texts = []
    for name in ("input_dtypes", "output_dtypes"):
        types = entry.get(name)
        found = {_text(t) for t in types[:64]} if isinstance(types, (list, tuple)) else set()
        texts.append(", ".join(sorted(found - {""})))
    return (texts[0] if texts[0] == texts[1] or not texts[1] else " → ".join(filter(None, texts)))[:_LONGEST]


def _groups(config: Any) -> tuple[dict[str, list[int]], int]:
    """Return the ranks of each group that the dump lists, and the least possible world size; 0: unknown."""
    found: dict[str, list[int]] = {}
    for name, about in config.items() if isinstance(config, dict) else ():
        ranks = about.get("ranks") if isinstance(about, dict) else None
        if isinstance(ranks, str):
            listed = _RANKS.fullmatch(ranks[: 8 * MOST_RANKS])
            ranks = [int(n) for n in listed[1].split(",") if n.strip().isdecimal()] if listed else []
        ranks = ranks if isinstance(ranks, list) else []
        ranks = sorted({n for n in ranks if type(n) is int and 0 <= n < MOST_RANKS})
        if isinstance(name, str) and ranks:
            found[name[:_LONGEST]] = ranks
    return found, max((ranks[-1] + 1 for ranks in found.values()), default=0)


def _names(entries: list[Any]) -> dict[int, str]:
    """Return the group name for each group number in `pg_status`, if the entries give it exactly one."""
    seen: dict[int, set[str]] = {}
    for entry in entries:
        if isinstance(entry, dict) and type(entry.get("pg_id")) is int:
            seen.setdefault(entry["pg_id"], set()).add(_group(entry)[0])
    return {number: next(iter(names)) for number, names in seen.items() if len(names) == 1}


def _statuses(status: Any, names: Mapping[int, str]) -> Iterator[tuple[str, int]]:
    for number, recorded in status.items() if isinstance(status, dict) else ():
        name = names.get(_number(number))
        last = _number(recorded.get("last_enqueued_collective")) if isinstance(recorded, dict) else -1
        if name is not None and last >= 0:
            yield name, last


FORMAT = Format(
    name="flight_recorder",
    title="dump of PyTorch's flight recorder",
    recognised="a pickle of plain data, or JSON, with `entries` that have a `profiling_name`, and `pg_config`",
    recognise=recognise,
    read=read,
    tables=("recorder_calls",),
    of_any_rank=True,  # a rank that hangs often left no trace
    brings="which collective each rank waits in, which ranks never came, and calls that do not fit together",
    record="TORCH_FR_BUFFER_SIZE=2000 (before torch 2.8 TORCH_NCCL_TRACE_BUFFER_SIZE) and TORCH_NCCL_DUMP_ON_TIMEOUT=1:"
    " a file a rank when a collective times out, named by TORCH_FR_DUMP_TEMP_FILE",
)
