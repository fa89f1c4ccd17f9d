"""What sampling costs beside a job: the CPU time of the one process a host that reads what its ranks do, and of py-spy.

Runs it beside ranks and loader workers that sleep, so that the cores have their time, and is told in shares of a core.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

import dlprof

# A rank with as many loader workers as it is told to have; all of them sleep.
RANK = """
import subprocess, sys, time
for _ in range(int(sys.argv[1])):
    subprocess.Popen(["sleep", "3600"])
time.sleep(3600)
"""

# What the samplers' own start takes is none of it.
SETTLE_S = 3.0


def shares(ranks: int, workers: int, seconds: float) -> tuple[float, float]:
    """Return the share of a core that the samplers' process takes, and that which py-spy does."""
    main = Path(dlprof.__file__).parent / "record" / "samplers" / "__main__.py"
    started = [subprocess.Popen([sys.executable, "-c", RANK, str(workers)]) for _ in range(ranks)]
    try:
        with tempfile.TemporaryDirectory() as folder:
            for n, rank in enumerate(started):
                at = Path(folder, "ranks", f"{n:05d}")
                at.mkdir(parents=True)
                (at / "facts.json").write_text(json.dumps({"rank": n, "host": os.uname().nodename, "pid": rank.pid}))
            env = os.environ | {"DLPROF_SAMPLE": "auto", "DLPROF_STACKS": "47"}
            beside = subprocess.Popen([sys.executable, main, folder], stdin=subprocess.PIPE, env=env)
            time.sleep(SETTLE_S)
            before = psutil.Process(beside.pid).cpu_times()
            time.sleep(seconds)
            # What children took is known once they have ended: of bursts that are over.
            after = psutil.Process(beside.pid).cpu_times()
            beside.communicate()
    finally:
        for rank in started:
            for child in psutil.Process(rank.pid).children():
                child.kill()
            rank.kill()
            rank.wait()
    own = after.user + after.system - before.user - before.system
    spies = after.children_user + after.children_system - before.children_user - before.children_system
    return own / seconds, spies / seconds


def main() -> None:
    """Print the shares for a rank with two workers, and for eight with eight each."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seconds", type=float, default=60)
    seconds = options.parse_args().seconds
    for ranks, workers in ((1, 2), (8, 8)):
        own, spies = shares(ranks, workers, seconds)
        print(
            f"{ranks} × {workers} workers: {own:.2%} of a core, and py-spy {spies:.2%}, over {seconds:g} s", flush=True
        )


if __name__ == "__main__":
    main()
