"""What the readers of GPU logs share: numbers with units, times of every kind, and the table that they end in.

Also reads what dlprof sampled outside its run: samples.jsonl of a host, of an older one gpu.jsonl, host.jsonl or
processes.jsonl.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from dlprof import run_folder
from dlprof.errors import DlprofError
from dlprof.read.formats import Format, beginning
from dlprof.read.limits import MOST_LINE, MOST_ROWS, limit, too_many
from dlprof.read.opening import NO_LINE, UTF16, lines_of, open_file
from dlprof.read.sources import Reading

if TYPE_CHECKING:
    from dlprof.read.logs import Series

# Where the times of a log come from. zone: they say their zone, or count from 1970. local: they have a date and no
# zone. day: they have neither. none: the log has no times.
ZONE, LOCAL, DAY, NONE = "zone", "local", "day", "none"

SECOND = 1_000_000_000
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d{1,3})?")
_LATEST_S = 1 << 33  # a Unix time in seconds; larger ones are milliseconds or nanoseconds
_FORMATS = (
    *("%Y/%m/%d %H:%M:%S.%f", "%Y/%m/%d %H:%M:%S", "%Y-%m-%d %H:%M:%S.%f", "%Y-%m-%d %H:%M:%S"),
    *("%Y%m%d %H:%M:%S", "%a %b %d %H:%M:%S %Y", "%m/%d/%Y %H:%M:%S"),
)
_CLOCK = re.compile(r"(\d{1,2}):(\d{2}):(\d{2})(\.\d{1,9})?")


def lines_in(path: Path) -> Iterator[str]:
    """Yield the lines of a log as text, but for empty ones. PowerShell writes UTF-16."""
    with open_file(path) as file:
        if file.read(2) in UTF16:
            file.seek(0)
            text = io.TextIOWrapper(file, encoding="utf-16", errors="replace")
            while wide := text.readline(limit(MOST_LINE)):
                if wide.strip():
                    yield wide.strip()
            return
        file.seek(0)
        for lines in lines_of(file):
            for line in lines:
                if line is not NO_LINE and line.strip():
                    yield line.decode("utf-8-sig", errors="replace").strip()


def number(text: str) -> float | None:
    """Return the number that a text begins with, as 87 of "87 %" or 4 of "0x04"; None if a GPU reports none."""
    word = text.strip().strip("()").strip()
    if word[:2].lower() == "0x":
        try:
            return float(int(word.split()[0], 16))
        except (ValueError, OverflowError):
            return None
    found = _NUMBER.match(word)
    value = float(found[0]) if found else math.nan
    return value if math.isfinite(value) else None


def scaled(words: Iterable[tuple[str, str]], metrics: Mapping[str, tuple[str, float]]) -> Iterator[tuple[str, float]]:
    """Yield metric and value of each named word that is a number; of several of one metric, the first.

    `metrics`: name → metric of the table "samples", and its scale.
    """
    done: set[str] = set()
    for name, word in words:
        metric, scale = metrics.get(name, ("", 0.0))
        value = number(word) if metric and metric not in done else None
        if value is not None:
            done.add(metric)
            yield metric, value * scale


def time_of(text: str) -> tuple[int, str] | None:
    """Return a time in ns and which of ZONE, LOCAL and DAY it is; DAY: since midnight. None: it is no time."""
    text = text.strip()
    if found := _CLOCK.fullmatch(text):
        hours, minutes, seconds = (int(n) for n in found.groups()[:3])
        whole = (hours * 60 + minutes) * 60 + seconds
        return whole * SECOND + round(float(found[4] or 0) * 1e9), DAY
    if re.fullmatch(r"\d{9,19}(\.\d{1,9})?", text):
        value = float(text)
        if "." not in text and value > _LATEST_S:
            digits = len(text)
            return int(text) * 10 ** max(0, 19 - digits), ZONE
        return (int(value * 1e3) * 1_000_000, ZONE) if value < _LATEST_S else None
    for form in _FORMATS:
        try:
            at = datetime.strptime(text, form)
        except ValueError:
            continue
        return _ns(at), LOCAL
    if "-" not in text:
        return None
    try:
        # `date --iso-8601=ns` writes nanoseconds after a comma; Python reads six digits.
        text = re.sub(r"[.,](\d{1,6})\d*", lambda found: f".{found[1]:0<6}", text, count=1)
        at = datetime.fromisoformat(text.replace("Z", "+00:00") if text.endswith("Z") else text)
    except ValueError:
        return None
    return _ns(at), LOCAL if at.tzinfo is None else ZONE


def _ns(at: datetime) -> int:
    """Return a time as ns since 1970; one without a zone as if its clock showed UTC, which `placed` corrects."""
    whole = at if at.tzinfo else at.replace(tzinfo=timezone.utc)
    try:
        return int(whole.timestamp() * 1e6) * 1000
    except (OverflowError, OSError):
        return 0


class Readings:
    """The readings of a log while it is read. A reading without a time is numbered: one a second from 0."""

    def __init__(self, path: Path, tool: str, *, timed: bool) -> None:
        self.path, self.tool = path, tool
        self.bad = 0
        self._timed = timed
        self._found: Series = {}
        self._kinds: set[str] = set()
        self._count: dict[str, int] = {}
        self._last = 0
        self._days = 0
        self._rows = 0
        self._full = False

    def add(self, gpu: str, at: str, values: Iterable[tuple[str, float]]) -> None:
        """Take the readings of one GPU at one time; a time that is none makes them bad."""
        if self._timed:
            when = time_of(at)
            if when is None or when[0] < 0:
                self.bad += 1
                return
            at_ns = self._of_day(when[0]) if when[1] == DAY else when[0]
            self._kinds.add(when[1])
        else:
            at_ns = self._count[gpu] = self._count.get(gpu, -1) + 1
            at_ns *= SECOND
        if self._rows >= limit(MOST_ROWS):
            self._full = True
            return
        for metric, value in values:
            times, found = self._found.setdefault((f"{self.tool} {gpu}".strip(), metric), ([], []))
            times.append(at_ns)
            found.append(value)
            self._rows += 1

    def _of_day(self, at: int) -> int:
        """Return a time of day with the midnights that the log has passed."""
        if at + 12 * 3600 * SECOND < self._last:
            self._days += 1
        self._last = at
        return at + self._days * 86_400 * SECOND

    def reading(self) -> Reading:
        """Return the table; raise DlprofError if nothing was a reading."""
        from dlprof.read.logs import samples_frame  # with pandas, which opening a run does not wait for

        if not self._found:
            raise DlprofError(f"{self.path}: no reading of {self.tool} in it")
        warnings = []
        # The last line of a log that still grew is cut.
        if self.bad > 1:
            warnings.append(f"{self.path.name}: {self.bad:,} malformed lines are left out")
        if self._full:
            warnings.append(too_many(self.path, "readings", MOST_ROWS))
        frame = samples_frame(self._found).sort_values(["source", "metric", "at_ns"], kind="stable", ignore_index=True)
        kind = next((k for k in (DAY, LOCAL, ZONE) if k in self._kinds), NONE if not self._timed else LOCAL)
        names = sorted({source for source, _ in self._found})
        return Reading(
            {"samples": frame},
            {f"log {self.path.name}": {"sources": names, "times": kind}},
            tuple(warnings),
        )


# A host's samples; those of its ranks in the same file are read with their run.
_HOSTS = run_folder.begins("boot").encode()

# A line of a sampler of an older run begins with its clock; what else is in it says which sampler it is.
_LINE = re.compile(rb'\s*\{\s*"at_ns"\s*:\s*\d{15,19}\s*,[^\n]*"(busy_share|power_w|core_percent|rss_bytes)"')
_SOURCES = {b"busy_share": "gpu", b"power_w": "gpu", b"core_percent": "host", b"rss_bytes": "processes"}


def begins(head: bytes) -> bool:
    """Return whether a file begins with a line of such a log."""
    return head.startswith(_HOSTS) or _LINE.match(head) is not None


def read(path: Path, piece: str = "") -> Reading:  # noqa: ARG001 - one piece is all of it
    """Return rows of the table "samples"; raises DlprofError if the file cannot be read or is no such log."""
    from dlprof.read.logs import samples

    with open_file(path) as file:
        head = file.read(1 << 16)
    found = _LINE.match(head)
    source = "host" if head.startswith(_HOSTS) else _SOURCES[found[1]] if found else "gpu"
    reading = samples(path, source, run_folder.begins(source) if head.startswith(_HOSTS) else "")
    facts = {f"log {path.name}": {"sources": [source], "times": ZONE}}
    return Reading(reading.tables, facts, reading.warnings)


FORMAT = Format(
    name="sampled",
    title="samples of dlprof",
    recognised="lines of JSON with at_ns and a metric of a sampler",
    recognise=beginning(begins),
    read=read,
    tables=("samples",),
    brings="what dlprof sampled of GPUs, host or processes, outside its run",
    record="dlprof wrap train.py",
    of_host=True,
)
