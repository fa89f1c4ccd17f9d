"""Reads the keys at a trace's head, next to its events: its rank, devices and process groups."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dlprof.cupti import short
from dlprof.errors import DlprofError
from dlprof.read.kineto.events import decoder, integer, numbers_of
from dlprof.read.kineto.json_stream import TraceFile
from dlprof.read.kineto.patterns import rank_in
from dlprof.read.opening import open_file

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
