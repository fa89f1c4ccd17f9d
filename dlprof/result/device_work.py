"""Where the device's own time goes, and the least that its limits allow: structs of the result."""

from __future__ import annotations

import msgspec


class WorkKind(msgspec.Struct, frozen=True):
    """One kind of a device's work in a mean traced step, mean of the ranks; None: not known.

    `floor_ns`: the least that the device needs for it, as far as that is known of the kind alone: of `shared_ns` of
    its time it is known only together with other kinds. `flops`, `bytes`: what it computes, and reads and writes.
    """

    kind: str
    kernels: float
    ns: float
    floor_ns: float | None = None
    shared_ns: float = 0.0
    flops: float | None = None
    bytes: float | None = None


class DeviceWork(msgspec.Struct, frozen=True):
    """What a device's kernels, fills and copies within its memory take of a mean traced step, by kind, longest first.

    `floor_ns` is a bound and no prediction: the sum over operators of FLOPs ÷ peak or bytes ÷ bandwidth, whichever is
    longer, at the rates of the data sheet; what is not known counts as long as it takes. `shared_floor_ns` of it is
    for all `shared_ns` together. `fused_floor_ns`: the same if each chain of elementwise operators were one kernel
    that reads and writes once. None: not known, for the floor with `why`.
    """

    rows: tuple[WorkKind, ...]
    floor_ns: float | None = None
    shared_floor_ns: float = 0.0
    fused_floor_ns: float | None = None
    why: str = ""

    @property
    def ns(self) -> float:
        """The time of all kinds."""
        return sum(row.ns for row in self.rows)

    def above_ns(self, row: WorkKind) -> float:
        """Return how far a kind is above its floor; at the least, where it shares one."""
        return row.ns - (row.floor_ns or 0.0) - min(row.shared_ns, self.shared_floor_ns)
