"""Two ranks that share a GPU and exchange a known number of collectives, one of them always late."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu import judges, timing
from benchmarks.gpu.bench import SCRIPTS, Bench
from benchmarks.gpu.jobs import Ended, last_words, must, python
from benchmarks.gpu.judges import Recording
from benchmarks.gpu.outcome import named, near, skipped

SCRIPT = SCRIPTS / "ranks.py"
COLLECTIVES = 4
LATE_MS = 20.0

# What NCCL says where two ranks are on one GPU and it does not let them (NCCL's src/init.cc): the first up to 2.29.
_REFUSALS = ("Duplicate GPU detected", "Multiple Ranks are using the same GPU")

# With it, NCCL lets several ranks share a GPU, from 2.30 on (src/init.cc).
ALLOWED = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_DEBUG": "WARN"}


def late(bench: Bench) -> None:
    """Record two ranks with gloo, and with NCCL where it lets two ranks share a GPU."""
    backends = bench.pick(("gloo", "nccl"), ("gloo",))
    for backend in backends:
        out = bench.work / backend
        out.mkdir()
        folder, ended = bench.record(
            f"{backend}-run", words(bench, backend, out), limit_s=bench.pick(60.0, 90.0), changes=ALLOWED
        )
        if backend == "nccl" and ended.code != 0 and is_refused(ended):
            version = bench.machine["torch"].get("nccl")
            bench.add(skipped("nccl", f"NCCL {version} lets no two ranks share a GPU: {_why(ended)}"))
            continue
        must(f"two ranks with {backend}", ended)
        arrived = {rank: json.loads((out / f"arrived-{rank}.json").read_text()) for rank in (0, 1)}
        came = timing.lateness_ms(arrived, late=1, skip=10)
        oracle = {"collectives": COLLECTIVES, "late_ms": came, "planted_ms": LATE_MS}
        print(f"  {backend}: {oracle}", flush=True)
        # The oracle itself: it must have seen what was planted.
        bench.add(
            near(
                f"{backend}: what was planted",
                came if math.isfinite(came) else None,
                LATE_MS,
                share=0.25,
                unit="ms",
                how="--late-ms, and the ranks' own clocks",
            )
        )
        bench.add(*named(backend, judges.late_rank(Recording(folder, bench.report(folder), oracle))))
        bench.keep(f"ranks-{backend}", folder, "late_rank", oracle)


def words(bench: Bench, backend: str, out: Path) -> list[str]:
    """Return the command that starts the two ranks."""
    steps = str(bench.pick(80, 30))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    args = ["--device", bench.device, "--backend", backend, "--steps", steps, "--late-ms", str(LATE_MS)]
    return python(*launcher, SCRIPT, *args, "--collectives", str(COLLECTIVES), "--out", out)


def is_refused(ended: Ended) -> bool:
    """Whether NCCL said that it lets no two ranks share a GPU."""
    return any(text in ended.errors or text in ended.out for text in _REFUSALS)


def _why(ended: Ended) -> str:
    lines: Sequence[str] = (ended.out + "\n" + ended.errors).splitlines()
    return next((text.strip()[:200] for text in lines if any(r in text for r in _REFUSALS)), last_words(ended))
