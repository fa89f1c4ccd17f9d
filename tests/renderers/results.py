"""Results made by hand, for the tests of the renderers: healthy, faulty, large, empty, and one of attacks."""

from __future__ import annotations

import math

from msgspec.structs import replace

from dlprof.estimate import change
from dlprof.result import Blame, Change, DeviceTime, Fact, Outcome, Panel, Result, RunInfo, TimePart, Together, Window

MS = 1e6

MANUAL = """The loader delivers a batch later than the training thread asks for it.

Needs the light layer, or a trace with the loader's `enumerate(DataLoader)` ranges.

Change one of
- `num_workers`, as long as there are free cores
- what a worker does for one sample

    DataLoader(train, num_workers=6, persistent_workers=True)

Saving: the wait, as far as the workers can be sped up."""


def time_of(rank: int, step_ms: float, **shares: float) -> tuple[TimePart, ...]:
    return tuple(TimePart(rank, c, share * step_ms * MS, share) for c, share in shares.items())


def device_of(rank: int, computation: float, communication: float, copy: float, steps: int = 5) -> DeviceTime:
    span = int(214.6 * MS * steps)
    comp, comm, cop = int(span * computation), int(span * communication), int(span * copy)
    return DeviceTime(rank, span, comp, int(comm * 1.3), comm, int(cop * 2), cop, span - comp - comm - cop)


def advised(*texts: str) -> tuple[Change, ...]:
    return tuple(map(Change, texts))


def outcome(name: str, state: str, title: str, why: str = "", summary: str = "") -> Outcome:
    return Outcome(id=name, state=state, title=title, why=why, summary=summary, manual=MANUAL)  # type: ignore[arg-type]


CLEAR = (
    outcome("pageable_copy", "clear", "Copies from pageable memory", summary="All 60 copies came from pinned memory."),
    outcome("pipeline_bubble", "clear", "Pipeline bubbles", summary="No pipeline in this run."),
    outcome("throttled_clock", "clear", "Throttled clocks", summary="1,980 MHz throughout."),
    outcome("gc_pauses", "clear", "Pauses for garbage collection", summary="0.2 ms a step."),
    outcome("memory_growth", "clear", "Memory that grows", summary="Flat after step 12."),
)
NOT_MEASURED = (
    outcome("slow_link", "not_measured", "Slow links", why="the peak of this link is not known"),
    outcome(
        "misaligned_shapes", "not_measured", "Misaligned shapes", why="the trace has no shapes; record with `--shapes`"
    ),
)
FACTS = (
    Fact("Model", "parameters", "25,557,032"),
    Fact("Model", "precision", "bfloat16 autocast"),
    Fact("Model", "optimizer", "AdamW(fused=False)"),
    Fact("Loader", "batch_size", "64"),
    Fact("Loader", "num_workers", "2"),
    Fact("Loader", "pin_memory", "True"),
    Fact("Versions", "torch", "2.13.0"),
    Fact("Versions", "CUDA", "13.0"),
    Fact("Environment", "OMP_NUM_THREADS", "1"),
    Fact("Environment", "NCCL_DEBUG", "WARN"),
    Fact("Clocks", "hosts", "one host, one clock"),
)


def steps_panel(count: int = 412) -> Panel:
    rows = tuple((i, (391.0 if i % 70 == 69 else 214.0 + 3 * math.sin(i * 1.7)) * MS) for i in range(count))
    return Panel("lines", "Steps over the run", rows, ("step", "rank 0"), "ns", "Every 70th step saves a checkpoint.")


def timeline_panel() -> Panel:
    def row(lane: str, start: float, end: float, what: str, category: str) -> tuple[object, ...]:
        return (lane, int(start * MS), int((end - start) * MS), what, category)

    rows: list[tuple[object, ...]] = []
    for rank, wait in ((0, 4.0), (1, 66.5)):
        rows += [
            row(f"{rank} · thread", 0, wait, "next(loader)", "input_wait"),
            row(f"{rank} · thread", wait, wait + 15, "launching forward and backward", "host"),
            row(f"{rank} · thread", 205, 214, "optimizer", "optimizer_host"),
            row(f"{rank} · device", wait + 2, wait + 72, "forward", "computation"),
            row(f"{rank} · device", wait + 72, wait + 126, "backward", "computation"),
            row(f"{rank} · device", wait + 126, 200, "ncclDevKernel_AllReduce_Sum_bf16", "communication"),
            row(f"{rank} · device", 200, 214, "AdamW", "computation"),
        ]
    arrows = ((192.5 * MS, "1 · device", "0 · device", "rank 0 had waited 62.5 ms for rank 1"),)
    return Panel("timeline", "One step", tuple(rows), note="Step 142, the median one.", arrows=arrows)


def ddp() -> Result:
    """Four ranks, two findings, every shape of evidence."""
    waits = Panel(
        "bars",
        "Wait for each batch on rank 1",
        tuple((f"batch {i}", (60 + 9 * math.sin(i * 2.3)) * MS, "input_wait") for i in range(60)),
        unit="ns",
    )
    stages = Panel(
        "table",
        "Where a worker's time goes",
        (
            ("read", 2.1 * MS, 0.07, 120_000),
            ("decode", 27.2 * MS, 0.9, 602_112),
            ("collate", 0.7 * MS, 0.03, 38_535_168),
        ),
        ("stage", "mean_ns", "time_share", "out_bytes"),
    )
    copies = Panel(
        "bars",
        "Longest saves",
        (
            ("torch.save /data/model.pt", 182.1 * MS, "checkpoint"),
            ("torch.save /data/optimizer.pt", 61 * MS, "checkpoint"),
        ),
        unit="ns",
    )
    found = (
        Outcome(
            "input_wait",
            "found",
            "Rank 1 waits for its loader, and everybody waits for rank 1",
            summary="In 58 of 60 batches the queue was empty when rank 1 asked. Its two workers take 30 ms a batch, of "
            "which 27 ms is `JPEG` decoding; ranks 0, 2 and 3 read as many batches from a faster disk.",
            saving_ns=66 * MS,
            share=66 / 214.6,
            speedup=1 / (1 - 66 / 214.6),
            ranks=(1,),
            changes=(
                change(
                    "`DataLoader(train, batch_size=64, num_workers=6, persistent_workers=True, pin_memory=True)`",
                    num_workers=(2, 6),
                    persistent_workers=(False, True),
                ),
                *advised("or decode less: `torchvision.io.decode_jpeg` on the device"),
            ),
            evidence=waits,
            sure="Predicted from the measured fetch time, 6 free cores and the loader's depth. "
            "Not an upper bound of all waiting.",
            verdict="31 % of each step waits for data on rank 1.",
            manual=MANUAL,
        ),
        Outcome(
            "checkpoint_stall",
            "found",
            "Checkpoints stop training for 180 ms every 7 steps",
            summary="`torch.save` of 1.2 GB on the training thread of rank 0, at steps 46, 53, 60.",
            saving_ns=25.7 * MS,
            share=25.7 / 214.6,
            speedup=1 / (1 - 25.7 / 214.6),
            ranks=(0,),
            changes=advised("Save less often, or with `torch.distributed.checkpoint.async_save`."),
            evidence=copies,
            sure="The measured stall, spread over the steps between saves.",
            manual=MANUAL,
        ),
        Outcome(
            "slow_worker_batches",
            "found",
            "Decoding takes nine tenths of a worker's time",
            summary="One stage of three holds up the loader.",
            saving_ns=3.1 * MS,
            share=3.1 / 214.6,
            speedup=1 / (1 - 3.1 / 214.6),
            changes=advised("Store the images smaller."),
            evidence=stages,
        ),
    )
    parts = (
        time_of(0, 214.6, computation=0.58, communication=0.31, copy=0.03, input_wait=0.02, host=0.05, other=0.01),
        time_of(1, 214.6, computation=0.57, communication=0.04, copy=0.03, input_wait=0.31, host=0.05),
        time_of(2, 214.6, computation=0.58, communication=0.30, copy=0.03, input_wait=0.03, host=0.06),
        time_of(3, 214.6, computation=0.59, communication=0.29, copy=0.03, input_wait=0.03, host=0.04, checkpoint=0.02),
    )
    return Result(
        run=RunInfo(
            path="runs/ddp_resnet",
            command=("torchrun", "--nproc-per-node=4", "workloads/ddp_resnet.py", "--epochs", "2"),
            world_size=4,
            ranks=(0, 1, 2, 3),
            hosts=("node-7",),
            device="NVIDIA H200",
            torch="2.13.0",
            exit={"code": 0, "signal": None},
            warnings=("rank 2: the trace was cut short; its last 3 events are missing.",),
        ),
        window=Window(412, "steps", 214.6 * MS, 1.04, traced_steps=5),
        device=tuple(device_of(r, 0.58, (0.31, 0.04, 0.30, 0.29)[r], 0.03) for r in range(4)),
        time=tuple(p for rank in parts for p in rank),
        outcomes=found
        + CLEAR
        + NOT_MEASURED
        + (outcome("slow_link2", "error", "A rule that broke", why="KeyError: 'dur_ns'"),),
        panels=(steps_panel(), timeline_panel()),
        facts=FACTS,
        dlprof="0.1.0",
        blame=tuple(
            Blame(rank, 1, category, share * 214.6 * MS, share)
            for rank in (0, 2, 3)
            for category, share in (("input_wait", 0.26), ("computation", 0.02))
        ),
        together=Together(94.8 * MS, 94.8 / 214.6, 214.6 / (214.6 - 94.8)),
    )


def healthy() -> Result:
    """Two ranks on the CPU and nothing found."""
    return Result(
        run=RunInfo("runs/healthy", ("train.py",), 2, (0, 1), hosts=("here",), device="CPU", torch="2.13.0"),
        window=Window(120, "steps", 42.15 * MS, 1.3, traced_steps=4),
        time=(
            *time_of(0, 42.15, computation=0.9, communication=0.06, input_wait=0.01, optimizer_host=0.02, other=0.01),
            *time_of(1, 42.15, computation=0.88, communication=0.08, input_wait=0.01, optimizer_host=0.02, other=0.01),
        ),
        outcomes=CLEAR + NOT_MEASURED,
        panels=(steps_panel(120),),
        facts=FACTS[:4],
        dlprof="0.1.0",
    )


def many(ranks: int = 64) -> Result:
    """A large job in which one rank is slow and all others wait for it."""
    slow = min(37, ranks - 1)
    parts: list[TimePart] = []
    for rank in range(ranks):
        wobble = 0.01 * math.sin(rank)
        if rank == slow:
            parts += time_of(rank, 512.0, computation=0.9, communication=0.04, copy=0.02, host=0.04)
        else:
            parts += time_of(
                rank,
                512.0,
                computation=0.6 + wobble,
                communication=0.3 - wobble,
                copy=0.02,
                pipeline_bubble=0.04,
                host=0.04,
            )
    finding = Outcome(
        "straggler",
        "found",
        f"Rank {slow} computes half as long again as the others",
        summary=f"Every collective waits for rank {slow}.",
        saving_ns=0.3 * 512 * MS,
        share=0.3,
        speedup=1 / 0.7,
        ranks=(slow,),
        changes=advised("Look at that device's clock and at what else runs on it."),
        evidence=Panel(
            "lines",
            "Computation a step",
            tuple((i, *(300.0 * MS + 1e5 * ((i * r) % 17) for r in range(6))) for i in range(5000)),
            ("step", *(f"rank {r}" for r in range(6))),
            "ns",
        ),
        verdict=f"All ranks wait 30 % of each step for rank {slow}.",
    )
    return Result(
        run=RunInfo(
            "runs/many", ("train.py",), ranks, tuple(range(ranks)), (), tuple(f"n{i}" for i in range(8)), "NVIDIA H100"
        ),
        window=Window(90, "trace", 512 * MS),
        device=tuple(device_of(r, 0.6, 0.3, 0.02) for r in range(ranks)),
        time=tuple(parts),
        outcomes=(finding, *CLEAR),
        panels=(
            Panel(
                "timeline",
                "A crowded step",
                tuple(
                    (f"device:{i % 9}", i * 30_000, 1000 + (i * 7919) % 50_000, f"kernel {i}", "computation")
                    for i in range(9000)
                ),
            ),
        ),
        dlprof="0.1.0",
    )


def empty() -> Result:
    """A run that was killed before its first step."""
    return Result(
        run=RunInfo(
            "runs/dead",
            ("train.py",),
            4,
            (0,),
            (1, 2, 3),
            exit={"code": None, "signal": 9},
            warnings=("3 of 4 ranks are not here: 1, 2, 3",),
        ),
        window=None,
        outcomes=NOT_MEASURED,
    )


ATTACKS = (
    "<script>alert(1)</script>",
    "</script><script>window.hit=1</script>",
    "<img src=x onerror=window.hit=1>",
    "<a href='javascript:window.hit=1'>click</a>",
    "\"'><svg onload=window.hit=1>",
    "javascript:window.hit=1",
    "<!--<script>",
    "{{ 7 * 7 }}{% raw %}",
    "%{customdata} ${window.hit=1}",
    "\u202eevil\u202c \u200f\x1b[31mred\x07\x00 \u2028\u2029 \ud800",
    "`<b>code</b>`",
    "x" * 10_000,
    "漢字" * 200,
)


def hostile() -> Result:
    """Every text that a trace may supply is an attack on the page or on the terminal."""
    everything = " ".join(ATTACKS)
    n = len(ATTACKS)
    evidence = (
        Panel("table", everything, tuple((a, i) for i, a in enumerate(ATTACKS)), ("name", ATTACKS[0]), note=everything),
        Panel("bars", everything, tuple((a, float(i), a) for i, a in enumerate(ATTACKS)), unit=ATTACKS[2]),
        Panel(
            "lines",
            everything,
            tuple((a, 1.0, math.nan, math.inf, None) for a in ATTACKS),
            ATTACKS[:5],
            ATTACKS[3],
            marks=((1.0, ATTACKS[0], ATTACKS[1]),),
        ),
        Panel(
            "timeline",
            everything,
            tuple((a, i, 5, a, a) for i, a in enumerate(ATTACKS)),
            arrows=((3.0, ATTACKS[0], ATTACKS[1], everything),),
        ),
        Panel("flame", everything, tuple((i, 0, 50 - i, a, a) for i, a in enumerate(ATTACKS)), unit=ATTACKS[2]),
    )
    found = tuple(
        Outcome(
            ATTACKS[i],
            "found",
            everything,
            summary=everything,
            saving_ns=(1e6, 1e6, math.inf, math.nan)[i % 4],
            share=(0.1, 1.0, math.inf, math.nan)[i % 4],
            speedup=(1.1, math.inf, math.nan, -1.0)[i % 4],
            ranks=(0,),
            changes=advised(*ATTACKS),
            evidence=panel,
            sure=everything,
            verdict=everything if i else "10 % of " + everything,
            manual="\n\n".join(ATTACKS),
        )
        for i, panel in enumerate(evidence)
    )
    rest = tuple(Outcome(a, "not_measured", a, why=everything, manual=everything) for a in ATTACKS)
    return Result(
        run=RunInfo(
            ATTACKS[1], ATTACKS, 2, (0, 1), (), ATTACKS, everything, ATTACKS[0], {"code": 3, "signal": None}, ATTACKS
        ),
        window=Window(3, "trace", 10 * MS, 1.5, "trace", 3),
        device=(device_of(0, 0.5, 0.1, 0.1), DeviceTime(1, 0, 0, 0, 0, 0, 0, 0)),
        time=tuple(TimePart(r, c, 1e6, 1 / n) for r in (0, 1) for c in ATTACKS),
        outcomes=found + rest,
        panels=evidence,
        facts=tuple(Fact(a, a, everything) for a in ATTACKS),
        dlprof=ATTACKS[0],
        together=Together(math.nan, math.inf, math.nan),
    )


def over_time() -> tuple[Panel, ...]:
    """Two panels on the run's time, of different lengths."""
    steps = tuple((n * 1e9, 2e8, 3e8) for n in range(10))
    parts = tuple((n * 1e9, 1e8, 1e8) for n in range(8))
    marks = ((4e9, "step 4: checkpoint, 1.00 s", "checkpoint"), (6e9, "step 6: an epoch begins or ends", "epoch"))
    return (
        Panel(
            "lines",
            "Steps over the run",
            steps,
            ("time_ns", "rank 0", "rank 1"),
            "ns",
            marks=marks,
            steps=tuple(range(40, 50)),
        ),
        Panel("areas", "Parts", parts, ("time_ns", "input_wait", "forward"), "ns"),
    )


def tables() -> Result:
    """A table with figures of several units, in no order."""
    times = (1e9, 2e7, 999e3, 3e6, 4e3, None, 5e6, 6e6, 7e6, 8e6, 9e6, 1e7)
    rows = tuple((f"op {i}", ns, f"{i} of 12") for i, ns in enumerate(times))
    panel = Panel("table", "Operators", rows, ("operator", "time_ns", "calls"))
    calls = (
        (0, 0, 900, "waiting for the loader", "input_wait"),
        (1, 0, 870, "main (train.py)", "own"),
        (2, 0, 500, "decode (data.py)", "own"),
        (3, 0, 480, "open (PIL/Image.py)", "library"),
        (0, 900, 300, "between the phases", "host"),
        (1, 900, 290, "log (train.py)", "own"),
    )
    return replace(
        healthy(), panels=(panel, Panel("flame", "Where Python was seen", calls, unit="samples"), *over_time())
    )


ALL = {"ddp": ddp, "healthy": healthy, "many": many, "empty": empty, "hostile": hostile, "tables": tables}
