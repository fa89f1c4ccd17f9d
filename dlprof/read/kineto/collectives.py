"""What events tell of collectives: the verb, the group, how many bytes, in which order, and between whom."""

from __future__ import annotations

import math
import re
from typing import Any

from dlprof.read.kineto.events import Args, Event, integer, plain
from dlprof.read.kineto.headers import groups_in
from dlprof.read.kineto.numbering import Ranks
from dlprof.read.kineto.patterns import collective_of, element_type

# How torch names what NCCL sends from one rank of a group to another: nccl:send 0->1, nccl:recv 1<-0.
_PAIR = re.compile(r"^nccl:(?:send|recv) \d{1,6}(?:->|<-)(\d{1,6})$")


class Collectives:
    """The collectives of a trace by the numbers of their rows, and the groups that they name.

    `keys`: what stands beside the events; `bytes`: of all rows, to which the collectives' are added.
    """

    def __init__(self, keys: dict[str, Any], bytes_of: dict[int, int]) -> None:
        self._keys = keys
        self._ranks_of = Ranks()
        self.bytes = bytes_of
        self.groups: dict[str, dict[str, Any]] = {}
        self.collectives: dict[int, tuple[str, str, str]] = {}
        self.sequences: dict[int, tuple[int, str]] = {}
        self.peers: dict[int, tuple[int, str | None]] = {}

    def add(self, row: int, e: Event, args: Args, verb: str, device: bool) -> None:
        """Take the row of a collective, `verb` by its name, on a device or its host."""
        collective = collective_of(args.collective) if isinstance(args.collective, str) else ""
        collective = collective or verb
        group = self._group(args)
        dtype, width = element_type(args.dtype) if isinstance(args.dtype, str) else ("", 0)
        elements = [integer(args.elements_in), integer(args.elements_out)]
        if collective in ("all_gather", "recv"):
            elements.reverse()
        count = next((n for n in elements if n > 0), max(elements))
        size = count * width if width and count >= 0 else -1
        # torch's marks (gloo:all_reduce) carry the tensor they send; the arguments of c10d's calls have no fixed order.
        if size < 0 and not device and not e.name.startswith(("c10d", "_c10d", "record_param_comms")):
            size, dtype = self._input(args, collective, group)
        if 0 <= size < 2**62:
            self.bytes[row] = size
        if collective or group or dtype:
            self.collectives[row] = (collective, group, dtype)
        sequence = integer(args.sequence)
        if sequence >= 0 or args.communicator is not None:
            self.sequences[row] = (sequence, "" if args.communicator is None else str(args.communicator))
        if collective in ("send", "recv"):
            self._peer(row, e, args, collective, group)

    def _peer(self, row: int, e: Event, args: Args, collective: str, group: str) -> None:
        """Note whom an event sends to or receives from, where it tells."""
        peer = integer(args.destination if collective == "send" else args.source)
        if peer >= 0:
            self.peers[row] = (peer, None)
            return
        if e.name in ("c10d::send", "c10d::recv_"):  # tensors, group, rank, tag
            inputs = plain(args.inputs)
            peer = integer(inputs[2]) if isinstance(inputs, list) and len(inputs) > 2 else -1
        elif named := _PAIR.search(e.name):
            peer = int(named[1])
        if peer >= 0:
            self.peers[row] = (peer, group)

    def _group(self, args: Args) -> str:
        """Return a group's name (if it has none, its description or a name made of its ranks) and note what is told."""
        ranks = self._ranks_of[bytes(args.group_ranks)]
        text = "" if args.group_text is None else str(args.group_text)
        name = "" if args.group is None else str(args.group)
        if not name:
            name = text
        if not name and ranks:
            import hashlib  # loads OpenSSL, while another core waits for the first trace

            name = "ranks-" + hashlib.sha1(repr(ranks).encode(), usedforsecurity=False).hexdigest()[:8]
        if name and name not in self.groups:
            size = integer(args.group_size)
            told = {"desc": text, "size": size if size > 0 else len(ranks), "ranks": ranks}
            self.groups[name] = {k: v for k, v in told.items() if v}
        return name

    def _input(self, args: Args, collective: str, group: str) -> tuple[int, str]:
        """Return the bytes and the element type of a collective by its input tensors; -1 where they do not tell."""
        dims, types = plain(args.dims), plain(args.types)
        if not isinstance(dims, list) or not isinstance(types, list):
            return -1, ""
        total, dtype = 0, ""
        for shape, text in zip(dims, types, strict=False):
            name, width = element_type(text) if isinstance(text, str) else ("", 0)
            if width and isinstance(shape, list) and shape and all(isinstance(n, int) for n in shape):
                total, dtype = total + math.prod(shape) * width, dtype or name
        if not dtype:
            return -1, ""
        if collective == "all_gather":  # counted by its output: what every rank of the group gives
            known = {**groups_in(self._keys), **self.groups}
            size = known.get(group, next(iter(known.values())) if len(known) == 1 else {}).get("size", 0)
            return (total * size if size else -1), dtype
        return total, dtype
