"""Finds which processes of a merged trace file belong to which rank.

Kineto writes one process a file. Tools that merge files give the processes names with their ranks, or distinct numbers.
A file in Kineto's own layout was not merged, and is not searched.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Union

import msgspec

from dlprof.errors import DlprofError
from dlprof.read import limits
from dlprof.read.kineto.events import Scalar
from dlprof.read.kineto.json_stream import TraceFile, plain

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
