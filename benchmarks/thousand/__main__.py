"""`dlprof report` on up to 1,024 ranks of 100,000 events with planted faults: time, memory, page, and what it names.

    python -m benchmarks.thousand                             # 8, 64, 256 and 1,024 ranks with all four faults
    python -m benchmarks.thousand --ranks 64 --each           # each fault in a job of its own, and a healthy job
    python -m benchmarks.thousand --keep /tmp/jobs --doc docs/thousand_ranks.md

The jobs are made first, which takes about a gigabyte of memory for every 15 ranks that are simulated, and is not
counted; `--keep` leaves them for the next time. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from benchmarks.thousand import stamp
from benchmarks.thousand.jobs import JOBS, RECORDING, job
from benchmarks.thousand.measure import HEAD, measured

BEGIN, END = "<!-- measured -->", "<!-- until here -->"


def main() -> None:
    """Make the jobs, report on each, and print the table."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 256, 1024], help="multiples of 8")
    options.add_argument("--each", action="store_true", help="each fault in a job of its own, and a healthy one")
    options.add_argument("--keep", type=Path, help="make the jobs here, and leave them")
    options.add_argument("--doc", type=Path, help="write the table into this page")
    args = options.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        for ranks in args.ranks:
            for name in [n for n in JOBS if n != "all four"] if args.each else ["all four"]:
                at = (args.keep or Path(temporary)) / f"{name.replace(' ', '_')}-{ranks}"
                many = job(ranks, JOBS[name])
                if not at.exists():
                    begin = time.perf_counter()
                    stamp.write(at, many, RECORDING)
                    print(f"{name}, {ranks} ranks: made in {time.perf_counter() - begin:.0f} s", flush=True)
                rows.append(measured(name, at, many, JOBS[name], Path(temporary) / "out").row)
                print(rows[-1], flush=True)
    if args.doc is not None:
        text = args.doc.read_text()
        before, after = text.split(BEGIN)[0], text.split(END)[1]
        args.doc.write_text("\n".join((before + BEGIN, "", HEAD, *rows, "", END)) + after)


if __name__ == "__main__":
    main()
