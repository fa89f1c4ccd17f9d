"""Runs `dlprof report` on a job of many ranks: what it takes, and which of the planted faults it names."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.processes import Ran, run
from benchmarks.thousand.jobs import RANKS_A_HOST, SLOW_HOST, Many, Planted


@dataclass(frozen=True)
class Measured:
    """One report: the job, what it took, and where each planted fault is named ("": nowhere)."""

    job: str
    ranks: int
    read_bytes: int
    seconds: float
    across_seconds: float  # from when the last rank was read to the end: across ranks, the result, the page
    largest: int  # bytes of the largest process
    together: int
    page_bytes: int
    named: Mapping[str, str]
    also_found: tuple[str, ...]

    @property
    def row(self) -> str:
        """The row of the table."""
        mb = 1e6
        said = (
            "; ".join(f"{fault}: {where or '**not named**'}" for fault, where in self.named.items()) or "none planted"
        )
        also = f"; also: {', '.join(self.also_found)}" if self.also_found else ""
        cells = [
            self.job,
            f"{self.ranks:,}",
            f"{self.read_bytes / mb:,.0f} MB",
            f"{self.seconds:.1f} s",
            f"{self.across_seconds:.1f} s ({self.across_seconds / self.seconds:.1%})",
            f"{self.largest / mb:.0f} MB",
            f"{self.together / mb:.0f} MB",
            f"{self.page_bytes / mb:.2f} MB",
            said + also,
        ]
        return f"| {' | '.join(cells)} |"


HEAD = (
    "| job | ranks | packed | report | of it across ranks | largest process | all processes | page | planted faults |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


def measured(name: str, at: Path, many: Many, planted: Planted, out: Path) -> Measured:
    """Report on a job in a folder."""
    took = run([sys.executable, "-P", "-m", "dlprof", "report", str(at), "-o", str(out)])
    result = json.loads((out / "result.json").read_text())
    found = named(result, many, planted)
    expected = {"straggler", "slow_link", "pipeline_bubble"}
    return Measured(
        name,
        many.whole.ranks,
        sum(p.stat().st_size for p in at.rglob("*") if p.is_file()),
        took.seconds,
        took.seconds - _read_all(took),
        took.largest,
        took.together,
        (out / "report.html").stat().st_size,
        found,
        tuple(o["id"] for o in result["outcomes"] if o["state"] == "found" and o["id"] not in expected),
    )


def _read_all(took: Ran) -> float:
    """Return when the last rank had been read."""
    return max(at for at, line in took.lines if line.startswith("read "))


def named(result: Mapping[str, Any], many: Many, planted: Planted) -> dict[str, str]:
    """Return of each planted fault where a result names it: by a rule, or as ranks unlike the others."""
    outcomes = {o["id"]: o for o in result["outcomes"] if o["state"] == "found"}
    ranks = {rule: set(o.get("ranks", ())) for rule, o in outcomes.items()}
    unlike = {m["rank"]: m for m in result.get("members", ()) if m["category"]}
    host = many.copied.index(SLOW_HOST) if len(many.copied) > 1 else -1  # of one host none is slow beside others
    on_host = set(range(host * RANKS_A_HOST, (host + 1) * RANKS_A_HOST))
    found = {}
    if planted.rank > 1:
        found["slow rank"] = _where({many.slow_rank}, ranks.get("straggler", set()), unlike, "straggler")
    if planted.host > 1 and host >= 0:
        found["slow host"] = _where(on_host, ranks.get("straggler", set()), unlike, "straggler")
    if planted.link < 1:
        found["slow link"] = "slow_link" if ranks.get("slow_link") == set(many.slow_link) else ""
    if planted.bubble:
        found["bubble"] = "pipeline_bubble" if "pipeline_bubble" in outcomes else ""
    return found


def _where(planted: set[int], by_rule: set[int], unlike: Mapping[int, Any], rule: str) -> str:
    if by_rule == planted:
        return rule
    computes = all(unlike.get(rank, {}).get("category") == "computation" for rank in planted)
    return "unlike the others" if computes else ""
