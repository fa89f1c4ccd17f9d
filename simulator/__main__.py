"""Writes the recording of one simulated job, and prints what is true of it as JSON.

python -m simulator item_every_step --out /tmp/job            a job with a fault
python -m simulator item_every_step --out /tmp/job --fixed    the same job without it
python -m simulator --healthy --out /tmp/job --seed 3         a random healthy job
python -m simulator                                           the faults that there are
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from simulator import folder, play, script
from simulator.faults import FAULTS
from simulator.healthy import healthy


def main(argv: Sequence[str] | None = None) -> None:
    """Write what the command line asks for."""
    how_shown = argparse.RawDescriptionHelpFormatter
    options = argparse.ArgumentParser(prog="python -m simulator", description=__doc__, formatter_class=how_shown)
    faults = {fault.name: fault for fault in FAULTS}
    options.add_argument("fault", nargs="?", choices=faults, metavar="FAULT", help="that the job has")
    options.add_argument("--out", type=Path, help="the recording's folder, which is not there yet")
    options.add_argument("--seed", type=int, default=0, help="of what is drawn (default: %(default)s)")
    options.add_argument("--fixed", action="store_true", help="record the job without the fault")
    options.add_argument("--healthy", action="store_true", help="record a random healthy job")
    asked = options.parse_args(argv)
    if asked.fault is None and not asked.healthy:
        print("\n".join(f"{fault.name:<24}{fault.rule:<24}{fault.what}" for fault in FAULTS))
        return
    if asked.out is None or asked.out.exists() or (asked.fault and asked.healthy):
        options.error("say a fault or --healthy, and with --out a folder that is not there yet")
    if asked.healthy:
        job, how, true = healthy(asked.seed)
        said: dict[str, Any] = {}
    else:
        fault = faults[asked.fault]
        if asked.fixed and fault.advised:
            options.error(f"{fault.name} has no one fix: it depends on the batch that is advised")
        planted = fault.make(asked.seed)
        how, fixed = fault.record(planted), play.true(fault.fix(planted), fault.warm, fault.steps)
        job = fault.fix(planted) if asked.fixed else planted
        true = fixed if asked.fixed else play.true(job, fault.warm, fault.steps)
        line = f"{script.FILE}:{script.number(planted, fault.line)}" if fault.line else None
        fixed_ns = None if fault.advised else fixed.loop_ns if fault.scope == "loop" else fixed.period_ns
        said = {"fault": fault.name, "rule": fault.rule, "line": line, "scope": fault.scope, "fixed_ns": fixed_ns}
    folder.write(asked.out, job, how)
    print(json.dumps({**said, "seed": asked.seed, **asdict(true)}))


if __name__ == "__main__":
    main()
