"""`dlprof report` against Holistic Trace Analysis (the package traceinsight), each from process start to its end.

Eight ranks of about 50 MB JSON, made from one real trace by repeating its events with shifted times and other ranks.
HTA does its load, temporal breakdown and overlap; dlprof its whole report. Both may use all cores of the machine.
"""

from __future__ import annotations

import argparse
import compileall
import gzip
import json
import os
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import dlprof
from benchmarks.processes import in_turn, peak_bytes, ratio

TRACE = Path("../shared/traces/ddp_a100_rank0_of_2/nccl_data.json.gz")
PEER = Path(".bench/bin/python")
RANKS = 8
MEGABYTES = 50

HTA = """
import sys
from hta.trace_analysis import TraceAnalysis
analysis = TraceAnalysis(trace_dir=sys.argv[1])
print(analysis.get_temporal_breakdown(visualize=False))
print(analysis.get_comm_comp_overlap(visualize=False))
"""


def make(source: Path, folder: Path, ranks: int = RANKS, megabytes: int = MEGABYTES) -> int:
    """Write one trace a rank into the folder, the source's events repeated until each has its size; give the events."""
    count = 0
    for rank in range(ranks):
        count = write(source, folder / f"rank{rank}.json", megabytes, rank, ranks)
    return count


def write(source: Path, path: Path, megabytes: int, rank: int = 0, ranks: int = 1) -> int:
    """Write the trace of one rank, a repetition of the source's events at a time; give the number of events."""
    raw = source.read_bytes()
    trace = json.loads(gzip.decompress(raw) if source.suffix == ".gz" else raw)
    events = trace.pop("traceEvents")
    timed = [e for e in events if isinstance(e.get("ts"), (int, float)) and e.get("ph") == "X"]
    span = max(e["ts"] + e["dur"] for e in timed) - min(e["ts"] for e in timed)
    copies = max(1, round(megabytes * 1e6 / len(_text(events))))
    header = {**trace, "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": ranks}}
    with path.open("w") as file:
        file.write(json.dumps(header, indent=2)[:-2] + ',\n  "traceEvents": [\n')
        for n in range(copies):
            file.write((",\n" if n else "") + _text([_moved(e, n, span) for e in events]))
        file.write("\n]}\n")
    return copies * len(events)


def _moved(event: dict[str, Any], n: int, span: float) -> dict[str, Any]:
    """Return the n-th repetition of an event: later, and with launches, flows and steps of its own."""
    moved = dict(event)
    if isinstance(moved.get("ts"), (int, float)):
        moved["ts"] = round(moved["ts"] + n * (span + 10), 3)
    if isinstance(moved.get("id"), int):
        moved["id"] += n * 10_000_000
    name = str(moved.get("name"))
    if name.startswith("ProfilerStep#"):
        moved["name"] = f"ProfilerStep#{int(name[13:]) + 100 * n}"
    args = moved.get("args")
    if isinstance(args, dict):
        moved["args"] = {k: v + n * 10_000_000 if k in ("correlation", "External id") else v for k, v in args.items()}
    return moved


def _text(events: list[dict[str, Any]]) -> str:
    """Lay events out as Kineto does."""
    return ",\n".join(
        "  {\n    "
        + json.dumps({k: v for k, v in e.items() if k != "args"})[1:-1]
        + (',\n    "args": {\n      ' + json.dumps(e["args"])[1:-1] + "\n    }" if e.get("args") else "")
        + "\n  }"
        for e in events
    )


def main() -> None:
    """Make the traces, time both in turn, and print the ratios."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--trace", type=Path, default=TRACE, help="a real torch-profiler trace to repeat")
    options.add_argument("--peer", type=Path, default=PEER, help="a Python that has traceinsight installed")
    options.add_argument("--rounds", type=int, default=3)
    args = options.parse_args()
    if not args.trace.exists() or not args.peer.exists():
        print(f"report: left out, needs {args.trace} and {args.peer} (--trace, --peer)")
        return
    # pip compiles what it installs, the peer included, and leaves an editable package to whoever runs it first.
    compileall.compile_dir(Path(dlprof.__file__).parent, quiet=1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "traces"
        folder.mkdir()
        events = make(args.trace, folder)
        size = sum(f.stat().st_size for f in folder.iterdir()) / RANKS / 1e6
        print(f"{RANKS} ranks of {size:.0f} MB and {events:,} events, {os.cpu_count()} cores")
        ours = [sys.executable, "-m", "dlprof", "report", str(folder), "--quiet", "-o", f"{temporary}/out"]
        theirs = [str(args.peer), "-c", HTA, str(folder)]
        mine, other = in_turn(args.rounds, (ours, None), (theirs, None))
        faster, least, most = ratio(other, mine)
        print(f"dlprof report   {median(mine):6.2f} s")
        print(f"HTA             {median(other):6.2f} s   {faster:.1f} × as long ({least:.1f} to {most:.1f})")
        memory, peer = peak_bytes(ours), peak_bytes(theirs)
        print(f"peak memory     {memory / 1e6:.0f} MB against {peer / 1e6:.0f} MB: {memory / peer:.2f} of it")


if __name__ == "__main__":
    main()
