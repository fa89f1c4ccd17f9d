"""The ranks of a large run: where each stands, and which are unlike the others."""

from __future__ import annotations

import msgspec

# Of a run of so many ranks nobody compares each with each.
MANY = 16


class Member(msgspec.Struct, frozen=True):
    """One rank of MANY or more: its host, the group of ranks that do the same, and what it does unlike them.

    `category`: the part of the mean step in which it differs most, "" where it is like its group; of that it spends
    `ns`, and the median of its group `usual_ns`, without waiting for others.
    """

    rank: int
    host: str
    group: str
    category: str = ""
    ns: float = 0.0
    usual_ns: float = 0.0
