"""The collectives of a trace: the verb, the group, how many bytes, in which order, and between whom."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from dlprof.read.kineto.events import Args, Event, integer, numbers_in, numbers_of, tensors
from dlprof.read.kineto.headers import groups_in
from dlprof.read.kineto.json_stream import plain
from dlprof.read.kineto.patterns import collective_of, element_type

# How torch names what NCCL sends from one rank of a group to another: nccl:send 0->1, nccl:recv 1<-0.
_PAIR = re.compile(r"^nccl:(?:send|recv) \d{1,6}(?:->|<-)(\d{1,6})$")

# No rank sends so many rows, nor elements.
_MOST_ROWS = 1 << 48


class Collectives:
    """The collectives of a trace by the numbers of their rows, and the groups that they name.

    `bytes_of`: bytes by row, to which those of the collectives are added.
    """

    def __init__(self, bytes_of: dict[int, int]) -> None:
        self._bytes = bytes_of
        self.groups: dict[str, dict[str, Any]] = {}
        self.collectives: dict[int, tuple[str, str, str]] = {}  # verb, group, element type
        self.sequences: dict[int, tuple[int, str]] = {}  # number, communicator ("": unknown)
        self.peers: dict[int, tuple[int, str | None]] = {}  # the rank, and in which group it has that number
        self.pieces: dict[int, str] = {}  # of all-to-alls: what goes to each rank and comes from each, see schema.SPANS
        self.gathered: dict[
            int, tuple[int, str]
        ] = {}  # of all_gathers counted by their input: its bytes, and the group

    def add(self, row: int, e: Event, args: Args, verb: str, device: bool) -> None:
        """Take the row of a collective, `verb` by its name, on a device or its host."""
        collective = (collective_of(args.collective) if isinstance(args.collective, str) else "") or verb
        group = self._group(args)
        dtype, width = element_type(args.dtype) if isinstance(args.dtype, str) else ("", 0)
        elements = [integer(args.elements_in), integer(args.elements_out)]
        if collective in ("all_gather", "recv"):
            elements.reverse()
        count = next((n for n in elements if n > 0), max(elements))
        size = count * width if width and count >= 0 else -1
        # torch's marks (gloo:all_reduce) carry the tensor they send; the arguments of c10d's calls have no fixed order.
        if size < 0 and not device and not e.name.startswith(("c10d", "_c10d", "record_param_comms")):
            size, dtype = _input(args)
            if collective == "all_gather" and size >= 0:  # counted by its output: what every rank of the group gives
                self.gathered[row] = (size, group)
                size = -1
        if 0 <= size < 2**62:
            self._bytes[row] = size
        if collective or group or dtype:
            self.collectives[row] = (collective, group, dtype)
        sequence = integer(args.sequence)
        if sequence >= 0 or args.communicator is not None:
            self.sequences[row] = (sequence, "" if args.communicator is None else str(args.communicator))
        if collective in ("send", "recv"):
            self._peer(row, e, args, collective, group)
        elif collective == "all_to_all" and (pieces := _pieces(e, args)):
            self.pieces[row] = pieces

    def _peer(self, row: int, e: Event, args: Args, collective: str, group: str) -> None:
        """Note whom an event sends to or receives from, where it is known."""
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
        """Return a group's name (else its description or a name made of its ranks) and note what is known of it."""
        ranks = numbers_in(bytes(args.group_ranks))
        text = "" if args.group_text is None else str(args.group_text)
        name = ("" if args.group is None else str(args.group)) or text
        if not name and ranks:
            import hashlib  # loads OpenSSL, while another core waits for the first trace

            name = "ranks-" + hashlib.sha1(repr(ranks).encode(), usedforsecurity=False).hexdigest()[:8]
        if name and name not in self.groups:
            size = integer(args.group_size)
            told = {"desc": text, "size": size if size > 0 else len(ranks), "ranks": ranks}
            self.groups[name] = {k: v for k, v in told.items() if v}
        return name

    def settle(self, keys: Mapping[str, Any]) -> None:
        """Count what waited for the size of a group; `keys`: what stands next to the events."""
        known = {**groups_in(keys), **self.groups}
        only = next(iter(known.values())) if len(known) == 1 else {}
        for row, (size, group) in self.gathered.items():
            ranks = known.get(group, only).get("size", 0)
            if ranks and size * ranks < 2**62:
                self._bytes[row] = size * ranks


def _pieces(e: Event, args: Args) -> str:
    """Return what an all-to-all gives each rank and takes from each: "3,5>4,1" in rows, "640>400" in elements of all.

    "": not known. torch's profiler abridges lists of more than 30 ranks, which are then known in all alone.
    """
    give, take = numbers_in(bytes(args.split_in)), numbers_in(bytes(args.split_out))
    if not give and e.name == "c10d::alltoall_base_":  # output, input, group, what is taken, what is given, ...
        inputs = plain(args.inputs)
        if isinstance(inputs, list) and len(inputs) > 4:
            take, give = numbers_of(inputs[3]), numbers_of(inputs[4])
    if not give or len(give) != len(take):
        give, take = [integer(args.elements_in)], [integer(args.elements_out)]
    if not all(0 <= n < _MOST_ROWS for n in (*give, *take)):
        return ""
    return f"{','.join(map(str, give))}>{','.join(map(str, take))}"


def _input(args: Args) -> tuple[int, str]:
    """Return the bytes and the element type of a collective by its input tensors; -1 where they are unknown."""
    inputs = tensors(bytes(args.dims), bytes(args.types))
    if not inputs:
        return -1, ""
    return sum(math.prod(shape) * width for shape, _, width in inputs), inputs[0][1]
