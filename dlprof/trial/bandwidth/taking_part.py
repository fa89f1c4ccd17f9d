"""One rank's part: joins the others, measures with them, and on rank 0 hands over what was measured.

`main` is a rank that starting.py has started.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch

from dlprof.errors import DlprofError
from dlprof.files import write
from dlprof.plain import tell, words_of
from dlprof.record.ranks import find_rank
from dlprof.trial.bandwidth import joining
from dlprof.trial.bandwidth.measuring import Tell, measure
from dlprof.trial.bandwidth.plan import Plan, from_text
from dlprof.trial.bandwidth.results import RESULT, Raw
from dlprof.trial.bandwidth.watching import Watch

# So much later than a store, or a backend, gives up with an error that says more.
_LATER_S = 5.0


def in_launcher(plan: Plan, progress: Tell) -> Raw | None:
    """Take part as the launcher's environment says; return what was measured on rank 0, None elsewhere.

    Where it fails, all ranks end with exit code 1: rank 0 says why, and another one only what is its own fault.
    """
    rank = find_rank()
    say: Callable[[str], None] = tell if rank == 0 else lambda _: None
    with Watch(plan.timeout_s + _LATER_S, say) as watch:
        watch.at("the ranks of this launcher have not met")
        try:
            rank, ranks, store = joining.of_launcher(plan.timeout_s)
            return _take_part(plan, rank, ranks, store, watch, progress)
        except DlprofError as e:
            say(str(e))
        except RuntimeError as e:  # of this rank's GPU
            tell(f"rank {rank} on {os.uname().nodename}: {joining.first_line(e)}")
        _leave()
    return None


def _take_part(plan: Plan, rank: int, ranks: int, store: Any, watch: Watch, progress: Tell) -> Raw | None:
    start_ns, begun = time.time_ns(), time.monotonic()
    with joining.joined(rank, ranks, store, plan.backend, plan.timeout_s, watch) as (here, device, who, backend):
        hosts = joining.hosts_of(who)
        rows, pairs = measure(plan, here, device, hosts, progress)
    if rank:
        return None
    return Raw(
        rows=tuple(rows),
        pairs=tuple(pairs),
        hosts=tuple(hosts),
        device=" and ".join(dict.fromkeys(one["device"] for one in who)) if device.type == "cuda" else "",
        backend=backend,
        start_ns=start_ns,
        seconds=time.monotonic() - begun,
        versions=_versions(backend),
    )


def _versions(backend: str) -> dict[str, str]:
    found: dict[str, str | None] = {"torch": torch.__version__}
    if backend == "nccl":
        nccl: Any = torch.cuda.nccl
        found |= {"nccl": ".".join(map(str, nccl.version())), "cuda": torch.version.cuda, "hip": torch.version.hip}
    return {name: str(version) for name, version in found.items() if version}


def _leave() -> None:
    """End at once: what is left of a backend may wait for ranks that are gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def main(words: list[str]) -> None:
    """Be one of the ranks that were started here: PLAN RANK RANKS FOLDER; rank 0 leaves RESULT in the folder."""
    plan, rank, ranks, folder = from_text(words[0]), int(words[1]), int(words[2]), Path(words[3])
    try:
        with Watch(plan.timeout_s + _LATER_S) as watch:
            watch.at(f"rank {rank} has not met the others")
            store = joining.of_started(rank, ranks, folder, plan.timeout_s)
            raw = _take_part(plan, rank, ranks, store, watch, _print)
        if raw is not None:
            write(folder / RESULT, msgspec.json.encode(raw).decode())
    except (DlprofError, OSError) as e:
        tell(words_of(e))
        _leave()
    except RuntimeError as e:
        tell(f"rank {rank}: {joining.first_line(e)}")
        _leave()


def _print(line: str) -> None:
    """Print on stdout, which is the terminal's stderr; whoever read there may be gone."""
    with contextlib.suppress(OSError):
        os.write(1, f"dlprof: {line}\n".encode())
