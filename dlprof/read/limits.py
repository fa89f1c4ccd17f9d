"""Every limit on what is read from files, which may come from untrusted sources.

If a file exceeds one, the report has one line about it, and the rest is read. `--no-limits` lifts the limits that are
read through `limit`. The others exclude impossible values, such as rank 1,000,000,000.
"""

from __future__ import annotations

import os
from pathlib import Path

NO_LIMITS = "DLPROF_NO_LIMITS"  # in the environment, so that the reading processes inherit it

# Bytes of a file that is read in one piece (facts, run.json, warnings), and of a log's line. dlprof writes far less.
MOST_TEXT = 64 << 20
MOST_LINE = 16 << 20

# Unpacked bytes of a dump or a JSON file that is held in memory as a whole; and lists, dicts and tuples of a dump, of
# about 100 bytes each. A snapshot of a million events of the allocator has 200 MB and 2 million of these.
MOST_WHOLE = 1 << 30
MOST_CONTAINERS = 20_000_000
MOST_MARKS = 200  # nested lists, dicts and tuples of a dump; real dumps have 8
MOST_INTEGER = 9  # bytes of an integer of a dump: 64 bits with a sign
MOST_MEMO = 1 << 24  # objects of a dump that it can refer to again
MOST_ENTRIES = 1_000_000  # of the flight recorder; its ring has 2,000 by default

# Rows of the log `held` (a large model has some ten thousand), lines of timed functions, and settings of `--set` (a
# command line holds fewer).
MOST_LISTED = 200_000
MOST_SETTINGS = 1_000

# Rows of a trace or a log: 10 million events are about 2 GB of JSON and take as much memory. Unpacked bytes for each
# packed one: real traces have 10 to 20.
MOST_ROWS = 10_000_000
MOST_NAMES = 500_000  # different names and threads of a trace's events; real traces have some thousands
MOST_UNPACKED, LEAST_UNPACKED = 100, 256 << 20

# Threads and streams of one rank that are looked at, those with the most spans: many measures go through them one by
# one. A real trace has some tens, with a pool on each core some hundreds.
MOST_LANES = 1_000

# Ranks of a job, and of one file. The largest jobs known have some hundred thousand; a larger number is damage.
MOST_RANKS = 1 << 20
MOST_RANKS_OF_FILE = 4_096

# Files below a folder that are looked into: of JSON files before the folder is taken for something else than a folder
# of traces, of others before the rest is left; and how deep (profiles/iteration_100/rank0.json).
DEPTH = 3
MOST_FILES = 20_000
MOST_OTHERS = 5_000

# Files of one archive, and the total bytes that they unpack to.
MOST_MEMBERS = 20_000
MOST_OF_ARCHIVE = 4 << 30

# Seconds after which reading of no further rank of a run begins. A thousand ranks take minutes.
MOST_SECONDS = 3_600

# A span of ten years is a broken clock.
LONGEST_NS = 10 * 366 * 86_400 * 10**9

# Traces of one job began within an hour of each other; clocks of hosts are seconds apart.
MOST_APART_NS = 3_600 * 10**9


def limited() -> bool:
    """Return whether limits apply; `--no-limits` lifts them."""
    return not os.environ.get(NO_LIMITS)


def limit(most: int) -> int:
    """Return this number if limits apply, else one that nothing reaches."""
    return most if limited() else 1 << 62


def too_many(path: Path, what: str, most: int) -> str:
    """Return the warning that a file holds more than is read."""
    return f"{path.name}: holds more than {most:,} {what}: what comes before is used (--no-limits reads all)"


def most_unpacked(packed: int) -> int:
    """Return how many bytes a file of this packed size may unpack to."""
    return limit(max(MOST_UNPACKED * packed, LEAST_UNPACKED))
