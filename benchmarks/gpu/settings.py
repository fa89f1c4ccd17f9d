"""Settings that are easily seen wrong: precision by PyTorch's newer API, the scaler, the allocator, the device."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu import judges, machine, reading
from benchmarks.gpu.bench import SCRIPTS, Bench
from benchmarks.gpu.jobs import Ended, must, python
from benchmarks.gpu.judges import Recording, bare
from benchmarks.gpu.outcome import Part, holds, same, skipped

SCRIPT = SCRIPTS / "settings.py"
ALLOC = "max_split_size_mb:256,garbage_collection_threshold:0.8"
JUDGED = {"tf32": "tf32", "ieee": "tf32", "fp16": "fp16", "alloc": "allocator"}

# How long the job on the last GPU stays after its last step, for nvidia-smi to be asked who is where.
LINGER_S = 4.0


def seen(bench: Bench) -> None:
    """Record a job with each setting, all at once, and hold the facts against what the script knows."""
    made = bench.together(*(partial(_record, bench, what) for what in JUDGED))
    results = bench.reports([folder for folder, _ in made])
    for (what, judge), (folder, oracle), said in zip(JUDGED.items(), made, results, strict=True):
        bench.add(*judges.JUDGES[judge](Recording(folder, said, oracle)), anywhere=True)
        warned = [w for w in reading.facts(folder).get("warnings") or () if "no answer" in w]
        bench.add(holds(f"{what}: every question of the facts answered", not warned, "; ".join(warned)), anywhere=True)
        bench.keep(f"setting-{what}", folder, judge, oracle)


def placed(bench: Bench) -> None:
    """Train on the last GPU without ever naming it by set_device: its UUID is told, and no other GPU gets a context."""
    linger = str(bench.pick(LINGER_S, 0.0))
    args = (*_args(bench, "last"), "--linger-s", linger)
    plain_apps, plain = _beside(bench, partial(bench.plain, SCRIPT, *args))
    apps, (folder, ended) = _beside(bench, partial(bench.record, "last", python(SCRIPT, *args)))
    must("the job under dlprof", ended)
    told = json.loads(ended.lines[-1][1])
    rows = reading.samples(folder)
    listed = bench.machine.get("driver")
    uuids = [str(gpu["uuid"]) for gpu in listed] if isinstance(listed, list) else []
    bench.add(
        *judges.device(Recording(folder, {}, told)),
        holds("nvidia-smi knows it", bare(told.get("uuid")) in [bare(u) for u in uuids], f"it lists {uuids}"),
        holds("its GPU is sampled", bool(rows), "its log holds no line"),
    )
    bench.add(of_contexts(plain_apps, apps, json.loads(plain.lines[-1][1])["pid"], told["pid"], len(bench.gpus)))
    bench.keep("setting-last", folder, "device", told)


def of_contexts(
    plain: Sequence[Mapping[str, str | None]],
    apps: Sequence[Mapping[str, str | None]],
    pid: int,
    with_us: int,
    gpus: int,
) -> Part:
    """Judge on which GPUs a process has a context, by nvidia-smi's list of processes: on as many as without dlprof.

    `plain` and `apps` are its rows while the plain job (`pid`) and the recorded one (`with_us`) held still.
    """
    name = "no context on another GPU"
    if gpus < 2:
        return skipped(name, "needs two GPUs, and there is one")
    before = {row["gpu_uuid"] for row in plain if row["pid"] == str(pid)}
    after = {row["gpu_uuid"] for row in apps if row["pid"] == str(with_us)}
    if not before:
        return skipped(name, "nvidia-smi does not list the job's process, as in a container with pids of its own")
    return same(name, len(after), len(before), how="nvidia-smi's processes, without dlprof", unit="GPUs")


def _args(bench: Bench, what: str) -> tuple[str, ...]:
    return ("--device", bench.device, "--what", what, "--width", str(bench.pick(1024, 32)))


def _record(bench: Bench, what: str) -> tuple[Path, dict[str, Any]]:
    changes = {"PYTORCH_ALLOC_CONF": ALLOC} if what == "alloc" else {}
    folder, ended = bench.record(what, python(SCRIPT, *_args(bench, what)), changes=changes)
    must(f"{what} under dlprof", ended)
    told: dict[str, Any] = json.loads(ended.lines[-1][1])
    return folder, told


def _beside(bench: Bench, job: Any) -> tuple[list[dict[str, str | None]], Any]:
    """Run a job, and ask nvidia-smi meanwhile who has a context on which GPU; return its last answer with anybody."""
    fields = ("pid", "gpu_uuid")
    seen: list[dict[str, str | None]] = []
    done: list[Ended] = []

    def ask() -> None:
        words = ["nvidia-smi", f"--query-compute-apps={','.join(fields)}", "--format=csv,noheader,nounits"]
        while not done:
            ended = bench.run(words, 10.0)
            if ended.code != 0:
                return
            rows = machine.parse(ended.out, fields)
            seen[:] = rows or seen

    def work() -> Any:
        try:
            return job()
        finally:
            done.append(Ended((), 0, 0.0, (), ""))

    _, came = bench.together(ask, work)
    return seen, came
