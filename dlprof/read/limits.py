"""How much is read of files that may come from a stranger: every limit, in one place.

What exceeds one is named in one line of the report, and the rest is read. `--no-limits` lifts all that `limit` is asked
for; the others are of what no file can mean, such as a rank of a billion.
"""

from __future__ import annotations

import os
from pathlib import Path

NO_LIMITS = "DLPROF_NO_LIMITS"  # in the environment, so that the processes that read have it too

# Bytes of a file that is read at once (facts, run.json, warnings), and of one line of a log; dlprof writes far less.
MOST_TEXT = 64 << 20
MOST_LINE = 16 << 20

# Bytes of a dump or a JSON file that is held in memory as a whole, unpacked; and lists, dicts, tuples of a dump, each
# of which takes about 100 bytes. A snapshot of a million events of the allocator has 200 MB and 2 million of these.
MOST_WHOLE = 1 << 30
MOST_CONTAINERS = 20_000_000
MOST_MARKS = 200  # of these, that are open within each other; dumps have 8
MOST_INTEGER = 9  # bytes of an integer of a dump: 64 bits with a sign
MOST_MEMO = 1 << 24  # what can be referred to again in a dump
MOST_ENTRIES = 1_000_000  # of the flight recorder, whose ring has 2,000 by default

# Rows of what a rank's memory holds, of which each part of each module of a large model makes some ten thousand, and
# lines of timed functions; settings of `--set`, of which a command line holds fewer.
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

# Files of one archive, and the bytes that all of them together unpack to.
MOST_MEMBERS = 20_000
MOST_OF_ARCHIVE = 4 << 30

# Seconds that the ranks of one run are read for: those begun by then are the last. A thousand ranks take minutes.
MOST_SECONDS = 3_600

# Traces of one job began within an hour of each other; clocks of hosts are seconds apart.
MOST_APART_NS = 3_600 * 10**9


def limited() -> bool:
    """Return whether limits hold; `--no-limits` lifts them."""
    return not os.environ.get(NO_LIMITS)


def limit(most: int) -> int:
    """Return this number where limits hold, else one that nothing reaches."""
    return most if limited() else 1 << 62


def too_many(path: Path, what: str, most: int) -> str:
    """Return the warning that a file holds more than is read."""
    return f"{path.name}: holds more than {most:,} {what}: what comes before is used (--no-limits reads all)"


def most_unpacked(packed: int) -> int:
    """Return how many bytes a file of that many packed bytes may unpack to."""
    return limit(max(MOST_UNPACKED * packed, LEAST_UNPACKED))
