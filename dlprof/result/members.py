"""The ranks of a large run: where each stands, and which are unlike the others."""

from __future__ import annotations

import msgspec

# Of a run of more ranks than this nobody looks at each.
MANY = 128


class Member(msgspec.Struct, frozen=True):
    """One rank of more than MANY: its host, the group of ranks that do the same, and what it does unlike them.

    `category`: the part of the mean step in which it differs most, "" where it is like its group; of that it spends
    `ns`, and the median of its group `usual_ns`, without waiting for others.
    """

    rank: int
    host: str
    group: str
    category: str = ""
    ns: float = 0.0
    usual_ns: float = 0.0
