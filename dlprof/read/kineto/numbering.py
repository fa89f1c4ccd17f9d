"""Numbers in the place of what many events repeat: names, threads, groups and shapes, each understood once."""

from __future__ import annotations

from typing import Any

from dlprof.read.kineto.events import Scalar, plain, ranks_of
from dlprof.read.kineto.patterns import MULTIPLIES, collective_of, copy_of, element_type, kind_of


class Names(dict[tuple[str, str], int]):
    """Numbers every (category, name) and decides once for each what it is."""

    def __init__(self) -> None:
        super().__init__()
        self.name: list[str] = []
        self.kind: list[str] = []
        self.device: list[bool] = []
        self.direction: list[tuple[str, str]] = []
        self.collective: list[str] = []
        self.multiplies: list[bool] = []

    def __missing__(self, key: tuple[str, str]) -> int:
        category, name = key
        side, kind = kind_of(category, name) or ("host", "")
        self.name.append(name)
        self.kind.append(kind)
        self.device.append(side == "device")
        self.direction.append(copy_of(name) if kind == "copy" else ("", ""))
        self.collective.append(collective_of(name) if kind == "communication" else "")
        self.multiplies.append(kind == "op" and MULTIPLIES.search(name) is not None)
        self[key] = code = len(self)
        return code


class Codes(dict[Any, int]):
    """Numbers every distinct key in order of appearance."""

    def __missing__(self, key: Any) -> int:
        self[key] = code = len(self)
        return code


class Places(dict[tuple[str, str, Scalar, Scalar], int]):
    """Numbers every (category, name, pid, tid): one look-up an event tells what it is and on which thread."""

    def __init__(self, names: Names, lanes: Codes) -> None:
        super().__init__()
        self.names = names
        self.lanes = lanes
        self.what: list[int] = []
        self.lane: list[int] = []  # of a host event; a device's depends on its args too

    def __missing__(self, key: tuple[str, str, Scalar, Scalar]) -> int:
        category, name, pid, tid = key
        what = self.names[category, name]
        self.what.append(what)
        self.lane.append(self.lanes[False, pid, tid] if self.names.kind[what] and not self.names.device[what] else -1)
        self[key] = code = len(self)
        return code


class DeviceLanes(dict[tuple[Scalar, Scalar, Scalar, Scalar], int]):
    """Gives the lane of a (pid, tid, device, stream)."""

    def __init__(self, lanes: Codes) -> None:
        super().__init__()
        self.lanes = lanes

    def __missing__(self, key: tuple[Scalar, Scalar, Scalar, Scalar]) -> int:
        self[key] = lane = self.lanes[(True, *key)]
        return lane


class Ranks(dict[bytes, list[int]]):
    """Gives the ranks that a piece of JSON lists; a job has few groups and many collectives."""

    def __missing__(self, key: bytes) -> list[int]:
        self[key] = ranks = ranks_of(plain(key))
        return ranks


class Shapes(dict[tuple[bytes, bytes], tuple[str, str]]):
    """Gives the shapes of the tensors that pieces of JSON list, as text, and their element type; "" where not said."""

    def __missing__(self, key: tuple[bytes, bytes]) -> tuple[str, str]:
        dims, types = plain(key[0]), plain(key[1])
        shapes, dtype = [], ""
        for shape, text in zip(dims or [], types or [], strict=False):
            name, width = element_type(text) if isinstance(text, str) else ("", 0)
            if width and isinstance(shape, list) and shape and all(isinstance(n, int) for n in shape):
                shapes.append("x".join(map(str, shape)))
                dtype = dtype or name
        self[key] = told = (" ".join(shapes), dtype)
        return told
