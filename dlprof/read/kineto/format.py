"""Recognises traces of the PyTorch profiler, and reads what their heads say of rank, devices and process groups.

Kineto writes one process a file. Tools that merge files give the processes names with their ranks, or distinct numbers.
A file in the layout of Kineto was not merged, and is not searched for ranks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Union

import msgspec

from dlprof.cupti import short
from dlprof.errors import DlprofError
from dlprof.read import limits
from dlprof.read.formats import Format, Head, Part
from dlprof.read.kineto.events import Scalar, decoder, integer, numbers_of
from dlprof.read.kineto.json_stream import TraceFile, plain
from dlprof.read.kineto.patterns import rank_in
from dlprof.read.opening import open_file
from dlprof.read.sources import Reading

PEEK_BYTES = 256 << 10


def peek(path: Path) -> dict[str, Any]:
    """Return by head and name of a file whether it looks like a trace (`is_trace`), and its rank, world_size, host.

    What neither the first 256 KB nor the name has is absent. Raises DlprofError if the file cannot be opened.
    """
    with open_file(path):
        pass
    file = TraceFile(path, decoder(exact=False), PEEK_BYTES)
    try:
        begun = file.header()
    except DlprofError:
        return {"is_trace": False}
    if file.is_list:
        begun = bool(re.match(rb'\s*\{.{0,4000}?"ph"\s*:\s*"\w"', file.buffered, re.DOTALL))
    known = {"schemaVersion", "deviceProperties", "distributedInfo", "traceName"} & file.keys.keys()
    # In a very large job the head ends before the events. Then the keys decide.
    if not begun and not (known and file.cut):
        return {"is_trace": False}
    facts = header_facts(file.keys, path)
    if not begun:
        # A very large job's list of process groups is longer than the head. Rank and size come before it.
        head = re.match(rb'\{[^{}\[\]]*"world_size"[^{}\[\]]*', file.buffered)
        for name in ("rank", "world_size"):
            if head and (number := re.search(rb'"%s"\s*:\s*(\d{1,18})\s*[,}]' % name.encode(), head[0])):
                facts[name] = int(number[1])
    return {"is_trace": True, **{k: facts[k] for k in ("rank", "world_size", "host") if k in facts}}


def header_facts(keys: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the facts in the keys next to the events; the rank comes from the file's name if they have none."""
    facts: dict[str, Any] = {}
    distributed = keys.get("distributedInfo")
    distributed = distributed if isinstance(distributed, dict) else {}
    for name in ("rank", "world_size"):
        if (number := integer(distributed.get(name))) >= 0:
            facts[name] = number
    if "rank" not in facts and (rank := rank_in(path.name)) is not None:
        facts["rank"] = rank
    texts = {"host": keys.get("host_name") or keys.get("hostname"), "backend": distributed.get("backend")}
    facts |= {name: text for name, text in texts.items() if isinstance(text, str) and text}
    devices = keys.get("deviceProperties")
    if isinstance(devices, list):  # an empty one says that the process saw no device
        renamed = {"totalGlobalMem": "memory_bytes"}
        facts["devices"] = [{renamed.get(k, k): v for k, v in d.items()} for d in devices if isinstance(d, dict)]
    if groups := groups_in(keys):
        facts["groups"] = groups
    if (base := integer(keys.get("baseTimeNanoseconds"))) > 0 and base < 2**62:
        facts["base_time_ns"] = base
    if "schemaVersion" in keys:
        facts["schema"] = keys["schemaVersion"]
    # Warnings of Kineto while it recorded; older releases write them after the events.
    complaints = [line for name in ("ERROR", "WARNING") if isinstance(keys.get(name), list) for line in keys[name]]
    if errors := short([line for line in complaints if isinstance(line, str)]):
        facts["errors"] = errors
    return facts


def groups_in(keys: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the process groups in the keys next to the events: name → desc, size, ranks."""
    distributed = keys.get("distributedInfo")
    listed = distributed.get("pg_config") if isinstance(distributed, dict) else None
    groups = {}
    for group in listed if isinstance(listed, list) else []:
        if isinstance(group, dict) and group.get("pg_name") is not None:
            ranks = numbers_of(group.get("ranks"))
            size = integer(group.get("pg_size"))
            about = {"desc": group.get("pg_desc"), "size": size if size > 0 else len(ranks), "ranks": ranks}
            groups[str(group["pg_name"])] = {k: v for k, v in about.items() if v}
    return groups


# One event in Kineto's layout: its first fields have a line of their own.
_OWN_LAYOUT = re.compile(rb'\{\s*\n\s+"ph": "\w", "cat": "')
_RANK = re.compile(r"(?:^|[^a-z])rank[\s_:=#-]{0,3}(\d{1,6})(?!\d)", re.I)
_OPERATORS = frozenset({"cpu_op", "Operator", "operator"})

# Devices are numbered from 0; a process has a larger number.
_MOST_DEVICES = 64


class _Event(msgspec.Struct, tag_field="ph", tag="X", gc=False):
    cat: str = ""
    pid: Scalar = None


class _Meta(msgspec.Struct, tag_field="ph", tag="M", gc=False):
    name: str = ""
    pid: Scalar = None
    args: msgspec.Raw = msgspec.Raw(b"{}")


_OTHERS = tuple(
    msgspec.defstruct(f"Other{ord(phase)}", [], tag_field="ph", tag=phase, gc=False)
    for phase in "BEsftiICPNODbneSTpFRcVv(),aL"
)
_decode: Any = msgspec.json.Decoder(list[Union[(_Event, _Meta, *_OTHERS)]]).decode  # type: ignore[valid-type]


def is_rewritten(first: bytes) -> bool:
    """Return whether the beginning of a trace has another layout than Kineto's."""
    return not _OWN_LAYOUT.search(first)


def ranks_of_processes(path: Path) -> list[tuple[int | None, str]]:
    """Return each rank of a merged file (None: not named) and its processes, in the text form that `pids` reads.

    Return nothing for a file of one rank, or if it is unknown which device belongs to which rank.
    """
    names: dict[Scalar, str] = {}
    working: dict[Scalar, None] = {}
    others: dict[Scalar, None] = {}
    file: TraceFile[Any] = TraceFile(path, _decoded)
    try:
        if not file.header():
            return []
        seen = 0
        for events in file.events():
            for e in events:
                if type(e) is _Event:
                    (working if e.cat in _OPERATORS else others)[e.pid] = None
                elif type(e) is _Meta and e.name in ("process_name", "process_labels"):
                    args = plain(e.args)
                    if isinstance(args, dict):
                        names[e.pid] = f"{names.get(e.pid, '')} {args.get('name') or args.get('labels') or ''}"
            seen += len(events)
            processes = len(names) + len(others)
            if seen > limits.limit(limits.MOST_ROWS) or processes > limits.MOST_RANKS_OF_FILE * _MOST_DEVICES:
                break
    except DlprofError:
        return []
    return _assigned(names, list(working), [pid for pid in others if pid not in working])


def _decoded(array: bytes | memoryview) -> list[Any]:
    try:
        return _decode(array)  # type: ignore[no-any-return]
    except msgspec.ValidationError:
        return []  # a malformed chunk is not needed: other chunks have the same processes


def _assigned(
    names: Mapping[Scalar, str], working: Sequence[Scalar], others: Sequence[Scalar]
) -> list[tuple[int | None, str]]:
    named = {pid: _named(pid, names.get(pid, "")) for pid in (*working, *others)}
    ranks: dict[int, list[Scalar]] = {}
    for pid, rank in named.items():
        if rank is not None:
            ranks.setdefault(rank, []).append(pid)
    hosts = [pid for pid in working if named[pid] is None]
    devices = sorted(pid for pid in others if named[pid] is None and isinstance(pid, int) and 0 <= pid < _MOST_DEVICES)
    order: list[int | None] = []
    if len(ranks) > 1:
        order += sorted(ranks)
        groups = [ranks[rank] for rank in sorted(ranks)]
    elif not ranks and len(hosts) > 1:
        order += [None] * len(hosts)
        groups = [[pid] for pid in hosts]
    else:
        return []
    if devices:
        if len(devices) != len(groups):
            return []
        groups = [[*pids, device] for pids, device in zip(groups, devices, strict=True)]
    return [(rank, json.dumps(pids)) for rank, pids in zip(order, groups, strict=True)][: limits.MOST_RANKS_OF_FILE]


def _named(pid: Scalar, name: str) -> int | None:
    found = _RANK.search(name) or (_RANK.search(pid) if isinstance(pid, str) else None)
    return int(found[1]) if found else None


def pids(piece: str) -> frozenset[Scalar]:
    """Return the processes of a piece of a file."""
    listed = plain(piece.encode())
    return (
        frozenset(pid for pid in listed if isinstance(pid, int | str | float))
        if isinstance(listed, list)
        else frozenset()
    )


_TIME = re.compile(rb'"ts"\s*:\s*"?(\d{1,18})(?:\.(\d{1,9}))?')
_BASE = re.compile(rb'"baseTimeNanoseconds"\s*:\s*(\d{1,19})')


def recognise(head: Head) -> Sequence[Part]:
    """Return the rank in a trace's head, or a part for each rank of a merged file."""
    if head.opens not in ("{", "["):
        return ()
    looked = peek(head.path)
    if not looked["is_trace"]:
        return ()
    began = _began(head.first)
    if is_rewritten(head.first) and (ranks := ranks_of_processes(head.path)):
        return [Part(rank, piece, began) for rank, piece in ranks]
    return (Part(looked.get("rank"), "", began, looked.get("host", ""), looked.get("world_size")),)


def _began(first: bytes) -> int | None:
    """Return the time of the first event that has one, in ns; Unix time if the head has the base."""
    found = next((one for one in _TIME.finditer(first) if int(one[1])), None)
    if found is None:
        return None
    base = _BASE.search(first)
    return int(found[1]) * 1000 + int((found[2] or b"0").ljust(3, b"0")[:3]) + (int(base[1]) if base else 0)


def read(path: Path, piece: str = "") -> Reading:
    """Return the tables of a trace, see torch_trace.py; of a merged one, those of the processes that `piece` names."""
    from dlprof.read.kineto import torch_trace

    return torch_trace.read(path, pids(piece) if piece else None)


FORMAT = Format(
    name="torch_trace",
    title="torch.profiler trace",
    recognised="JSON with `traceEvents`, or a list of events with `ph`",
    recognise=recognise,
    read=read,
    tables=("spans", "traced_steps"),
    brings="kernels, copies, collectives, operators and calls of a few steps; the steps, where it marks them. Ranks"
    " of one merged file, and windows of one rank, are told apart",
    record="torch.profiler.profile(...) with prof.step(), and prof.export_chrome_trace(file)",
    precedence=1,
)
