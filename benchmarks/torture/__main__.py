"""Runs all of benchmarks/torture: `python -m benchmarks.torture --seed 1`, or a tenth of it with --quick.

Exits with 1 where any of them does not hold.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

# Each part with its options, for all of it and for a tenth.
PARTS = (
    ("signals", ("--count", "10000"), ("--count", "1000")),
    ("jobs", ("--number", "33"), ("--number", "11")),
    ("secrets", ("--shapes", "300"), ("--shapes", "100")),
    ("inputs", ("--number", "300"), ("--number", "30")),
)


def main() -> int:
    """Run the parts one after the other; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", default="0")
    parser.add_argument("--quick", action="store_true", help="a tenth of it")
    args = parser.parse_args()
    failed = 0
    for name, all_of_it, tenth in PARTS:
        print(f"# {name}", flush=True)
        words = [sys.executable, "-m", f"benchmarks.torture.{name}", "--seed", args.seed]
        failed += subprocess.run([*words, *(tenth if args.quick else all_of_it)]).returncode != 0
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
