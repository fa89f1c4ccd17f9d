"""The effect of each change of a training script on a rank's memory and step, from the counted memory.

Memory comes from footprint.py. The step's time is known where another measure predicts it: a larger batch by the replay
of the step, 16 bits by the products that run in float32, checkpointing by the forward pass of the modules, another
schedule by the pipeline's replay. Otherwise it is bounded or not known, and the row says so.

Then the largest batch that fits on the GPU, and memory as the result has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from math import isnan, nan
from typing import Any

import numpy as np
import pandas as pd

from dlprof import schema
from dlprof.analysis import settings
from dlprof.analysis.compute.attention import attention
from dlprof.analysis.compute.kernels import FORWARD_SHARE, TIMES, larger_batches
from dlprof.analysis.compute.operators import tensor_cores
from dlprof.analysis.compute.peaks import PCIE_REACHED, device_of, host_link
from dlprof.analysis.compute.products import WIDTH, sizes
from dlprof.analysis.engine import (
    JOB,
    RANK,
    Frame,
    Job,
    Maybe,
    RankFacts,
    across_ranks,
    by_rank,
    maybe,
    needs,
    per_rank,
)
from dlprof.analysis.memory import footprint as fp
from dlprof.analysis.memory.footprint import (
    PARTS,
    Footprint,
    growth,
    largest_unit,
    main_device,
    of_device,
    units,
    with_modules_inside,
)
from dlprof.analysis.memory.memory import (
    around,
    held_by_module,
    held_names,
    memory_composition,
    memory_use,
    total_bytes,
)
from dlprof.analysis.modules.tree import module_means
from dlprof.analysis.pipeline.pipeline_plans import Model, most_held, pipeline_models
from dlprof.analysis.pipeline.schedules import GPIPE, ONE_F_ONE_B, grid, runs, short
from dlprof.analysis.step.breakdown import breakdown, part
from dlprof.analysis.step.savings import own_time, saving
from dlprof.analysis.timeline.steps import mean_step_ns
from dlprof.errors import NotMeasured
from dlprof.result import MOST_RANKS, figures

# Multiples of the batch that are listed, besides the largest that fits.
MULTIPLES = (0.5, 2.0, 4.0, 8.0)


@per_rank
def memory_changes(
    held: Frame = needs(schema.HELD),
    held_names: Frame = needs(held_names),
    memory_composition: Frame = needs(memory_composition),
    attention: Maybe[Frame] = maybe(attention),
    rank: RankFacts = needs(RANK),
) -> pd.DataFrame:
    """Return the rank's peak with each change, a row each: change, value, device, now_bytes, then_bytes (of all memory
    held there), least_bytes and most_bytes (for any cache of the allocator), total_bytes (of the device; NaN: unknown),
    times (how many times as large a batch then fits, without a cache; NaN: unknown), moved_bytes (additional, between
    host and device in a step).

    Changes: batch (value: times the present one), autocast, 16_bits, checkpoint (value: the modules, folded),
    checkpoint_only (one of several lists of modules), fused_attention, shard (ZeRO's stage / the ranks), 8_bit,
    offload, microbatches (their number), schedule (its name). The first row is the present state: change "".
    """
    device = main_device(memory_composition)
    now = of_device(held, memory_composition, device, rank.facts)
    total = total_bytes(rank) if device != "cpu" else nan
    names = dict(zip(held_names["module"], held_names["name"], strict=True))
    # Gradients go to the host, and parameters back (Ren et al., ZeRO-Offload, 2021).
    moved = now.moments["update"]["gradient"] + fp.trained(now.held)
    rows = [
        (change, value, device, now.peak_bytes, *with_cache(now, then), total, _times(then, total))
        for change, value, then in [("", "", now), *_changes(now, rank.facts, total, _scores(attention), names)]
    ]
    columns = ["change", "value", "device", "now_bytes", "then_bytes", "least_bytes", "most_bytes", "total_bytes"]
    frame = pd.DataFrame(rows, columns=[*columns, "times"])
    return frame.assign(moved_bytes=moved * (frame["change"] == "offload"))


def with_cache(now: Footprint, then: Footprint) -> tuple[float, float, float]:
    """Return the held memory with a change: with the present share of the allocator's cache, with none, and with the
    largest assumed cache.

    In the largest, no part reuses memory that another has freed: each is cached at its own peak. Free blocks are split
    for smaller tensors, and then do not fit larger ones, so temporary memory counts twice: it comes in all sizes. The
    activations that a checkpoint recomputes also exist in the forward pass.
    """
    cache, then_bytes = now.always["cache"], then.peak_bytes
    beside = cache + now.always["libraries"] + now.always["process"]
    tensors = now.peak_bytes - beside
    if then is now or not cache or tensors <= 0:
        return then_bytes, then_bytes, then_bytes
    same = then_bytes + cache * ((then_bytes - beside) / tensors - 1)
    each = {part: max(parts[part] for parts in then.moments.values()) for part in fp.PARTS}
    again = float(then.places.groupby("unit")["again"].sum().max())
    apart = sum(each.values()) - cache + each["temporary"] + again
    return same, then_bytes - cache, max(same, apart)


def _times(then: Footprint, total: float) -> float:
    return nan if isnan(total) else min(fp.most_times(then.scaled({"cache": 0.0}), HIGH * total), MOST_TIMES)


def _scores(attention: Maybe[pd.DataFrame]) -> dict[int, float]:
    """Return elements of one call's scores, of unfused attention → bytes of one copy of those of a step."""
    frame = attention.or_none()
    found: dict[int, float] = {}
    for row in () if frame is None else frame[frame["passes"] == "forward"].to_dict("records"):
        tensors = sizes(row["shape"])
        if [len(tensor) for tensor in tensors] == [3, 3] and row["dtype"] in WIDTH:
            (batch, queries, _), (_, keys, _) = tensors
            elements = batch * queries * keys
            found[elements] = found.get(elements, 0.0) + float(row["calls"]) * elements * WIDTH[row["dtype"]]
    return found


def _changes(
    now: Footprint, facts: Mapping[str, object], total: float, scores: Mapping[int, float], names: Mapping[str, str]
) -> Iterator[tuple[str, str, Footprint]]:
    held = now.held
    largest = 0.0 if isnan(total) else even(_times(now, total), settings.batch_of(facts))
    for times in sorted({*MULTIPLES, largest} if largest > 1 else MULTIPLES):
        yield "batch", f"{times:g}", fp.larger_batch(now, times)
    floats, on_gpu = held["dtype"].astype(str), bool((held["device"].astype(str) != "cpu").any())
    if (floats[held["part"] == "activation"] == "float32").any() and not now.moments["forward"]["cast"]:
        yield "autocast", "", fp.autocast(now, scores if on_gpu else {})  # a CPU computes softmax in 16 bits
    if (floats[held["part"] == "parameter"] == "float32").any():
        yield "16_bits", "", fp.in_16_bits(now)
    modules = units(held)
    yield from _checkpoints(now, with_modules_inside(held, modules), names)
    if scores:
        yield "fused_attention", "", fp.fused_attention(now, scores)
    world = facts.get("world_size")
    if isinstance(world, int) and world > 1 and _replicated(held) and not facts.get("pipeline"):
        for stage in (1, 2, 3):
            yield "shard", f"{stage}/{world}", fp.sharded(now, stage, world, largest_unit(held, modules))
    if now.parts["optimizer"] or now.moments["update"]["optimizer"]:
        yield "8_bit", "", fp.eight_bit(now)
        if not isnan(total):  # on a CPU the state is on the host already
            yield "offload", "", fp.offloaded(now)
    yield from _of_pipeline(now, facts.get("pipeline"))


def _checkpoints(now: Footprint, modules: list[str], names: Mapping[str, str]) -> Iterator[tuple[str, str, Footprint]]:
    """Return checkpoints around modules, and around each list of them alone: those that leave less at the peak."""
    if len(modules) < 2:
        return
    alike: dict[str, list[str]] = {}
    for module in modules:
        alike.setdefault(names.get(module, module), []).append(module)
    lists = [("checkpoint_only", name, mine) for name, mine in alike.items() if len(alike) > 1]
    for change, name, mine in [("checkpoint", ", ".join(alike), modules), *lists]:
        then = fp.checkpointed(now, mine)
        if then.peak_bytes < now.peak_bytes:
            yield change, name, then


def _replicated(held: pd.DataFrame) -> bool:
    """Return whether the rank holds all parameters whole: nothing shards them."""
    parameters = held[held["part"] == "parameter"]
    return bool(len(parameters)) and bool((parameters["bytes"] >= parameters["full_bytes"]).all())


def _of_pipeline(now: Footprint, pipeline: object) -> Iterator[tuple[str, str, Footprint]]:
    if not isinstance(pipeline, dict):
        return
    schedule, m, ranks = pipeline.get("schedule"), pipeline.get("microbatches"), pipeline.get("ranks")
    stages = pipeline.get("stages")
    if not (isinstance(schedule, str) and isinstance(m, int) and isinstance(ranks, list) and isinstance(stages, list)):
        return
    place, p = min(stages, default=0) % max(len(ranks), 1), len(ranks)
    chunks = max(len(stages), 1)
    held_now = held_share(schedule, p, m, chunks, place)
    if held_now is None:
        return
    for more in (2 * m, 4 * m):
        if then := held_share(schedule, p, more, chunks, place):
            yield "microbatches", str(more), fp.other_microbatches(now, held_now, then)
    if schedule == GPIPE and (then := held_share(ONE_F_ONE_B, p, m, chunks, place)):
        yield "schedule", short(ONE_F_ONE_B), fp.other_microbatches(now, held_now, then)


def held_share(schedule: str, ranks: int, microbatches: int, chunks: int, place: int) -> float | None:
    """Return the most micro-batches that a pipeline rank holds at a time ÷ those of a step; None: not known.

    m of m under GPipe, min(p − place, m) under 1F1B (Narayanan et al., Megatron-LM, 2021); others by their grid.
    """
    if not runs(schedule, ranks, microbatches, chunks):
        return None
    return most_held(grid(schedule, ranks, microbatches, chunks).rows[place]) / chunks / microbatches


def forward_of(module_means: pd.DataFrame | None, names: Sequence[str]) -> tuple[float, float, bool] | None:
    """Return the forward pass of modules, by their folded names, as a share of the traced step, and of the whole
    model's forward pass, and whether a device computes it; None: it is not known for all of them.
    """
    if module_means is None:
        return None
    rows = module_means.drop_duplicates("path").set_index("path")
    whole = float(rows["forward_ns"].get("", 0.0))
    total = float(rows["total_ns"].iloc[0])
    if not whole or not total or not all(name in rows.index for name in names):
        return None
    mine = float(rows.loc[list(names), "forward_ns"].sum())
    return mine / total, mine / whole, bool(rows["on_device"].iloc[0])


@across_ranks
def same_for_any_batch(breakdown: Frame = needs(breakdown), own_time: Frame = needs(own_time)) -> dict[int, float]:
    """Return each rank's time of the mean step that is the same for any batch, ns.

    That is host work and the exchange of gradients, without waiting for other ranks.
    """
    exchanged, waits = part(breakdown, "communication"), by_rank(own_time, "wait_ns")
    return {r: ns + max(0.0, exchanged[r] - waits.get(r, 0.0)) for r, ns in part(breakdown, *HOST).items()}


@across_ranks
def larger_batch_steps(
    same_for_any_batch: dict[int, float] = needs(same_for_any_batch),
    larger_batches: Maybe[Frame] = maybe(larger_batches),
    own_time: Frame = needs(own_time),
    breakdown: Frame = needs(breakdown),
) -> pd.DataFrame:
    """Return the time that larger batches save, per present number of samples, a row for 1 and for each of TIMES.

    Columns: times, gain_ns, again_ns (the gain if the forward pass is recomputed). From a replay of the traced steps;
    without one, the time that is the same for any batch is divided by the multiple, and recomputation is added.
    """
    rows = []
    forward = {r: FORWARD_SHARE * ns for r, ns in part(breakdown, "computation").items()}
    for times in (1.0, *TIMES):
        gone = {r: ns * (1 - 1 / times) for r, ns in same_for_any_batch.items()}
        again = {r: ns - forward.get(r, 0.0) for r, ns in gone.items()}
        with suppress(NotMeasured):
            frame = larger_batches.get()
            mine = frame[frame["times"] == times]
            gone, again = gone | by_rank(mine, "gain_ns"), again | by_rank(mine, "again_ns")
        longer = min(again.values(), default=0.0)
        rows.append((times, saving(own_time, gone), saving(own_time, again) if longer >= 0 else longer))
    return pd.DataFrame(rows, columns=["times", "gain_ns", "again_ns"])


@across_ranks
def memory_what_if(
    memory_changes: Frame = needs(memory_changes),
    mean_step_ns: Maybe[float] = maybe(mean_step_ns),
    larger_batch_steps: Maybe[Frame] = maybe(larger_batch_steps),
    tensor_cores: Maybe[Frame] = maybe(tensor_cores),
    attention: Maybe[Frame] = maybe(attention),
    pipeline_models: Maybe[list[Model]] = maybe(pipeline_models),
    module_means: Maybe[Frame] = maybe(module_means),
    job: Job = needs(JOB),
) -> pd.DataFrame:
    """Return `memory_changes` of the rank with the highest peak, with the step's time.

    More columns: now_ns, then_ns (the mean steady step for the present number of samples; NaN: not known), bound
    (then_ns is at "most" or at "least" that; "": neither), why (then_ns is not known, or bounded).
    """
    worst = int(memory_changes["rank"].to_numpy()[memory_changes["now_bytes"].to_numpy().argmax()])
    rows = memory_changes[memory_changes["rank"] == worst].reset_index(drop=True)
    now = mean_step_ns.or_none()
    if now is None:
        return rows.assign(now_ns=nan, then_ns=nan, bound="", why="no steady step was measured")
    facts = job.facts[worst]

    def of_batch(value: str) -> tuple[float, str, str]:
        frame = larger_batch_steps.or_none()
        if frame is None:
            return nan, "", larger_batch_steps.why()
        if float(value) < 1:
            return now, "least", "host work and communication do not shrink with the batch"
        return now - gain_at(frame, float(value)), "", ""

    def of_bits(_: str) -> tuple[float, str, str]:
        frame = tensor_cores.or_none()
        saved = by_rank(frame, "fp32_saved_ns").get(worst, nan) if frame is not None else nan
        return (now - saved, "", "") if not isnan(saved) else (nan, "", "speed in 16 bits is not known")

    def of_checkpoint(value: str) -> tuple[float, str, str]:
        frame, again = larger_batch_steps.or_none(), forward_of(module_means.or_none(), value.split(", "))
        of_step, share, on_device = again or (nan, nan, True)
        if not on_device:
            return now * (1 + of_step), "", ""
        if frame is None:
            return nan, "", larger_batch_steps.why()
        whole = -gain_at(frame, 1.0, "again_ns")
        if again is None:
            return now + whole, "most", "assumes that the whole forward pass is recomputed"
        return now + whole * share, "", ""

    def of_attention(_: str) -> tuple[float, str, str]:
        frame = attention.get()
        return now - float(frame.loc[frame["rank"] == worst, "most_ns"].max()), "", ""

    def of_shards(value: str) -> tuple[float, str, str]:
        if value[0] in "12":
            return now, "", "communicates as many bytes as now"
        return nan, "", "communicates 1.5 × the bytes; how much of it overlaps is not known"

    def of_offload(_: str) -> tuple[float, str, str]:
        rate = (host_link(device_of(facts, job.trace_facts[worst])[0]) or 0.0) * PCIE_REACHED
        moved = float(rows["moved_bytes"].max())
        if not rate:
            return nan, "", "the bandwidth between host and device is not known"
        return now + moved / rate * 1e9, "least", "the optimizer's time on the host is not included"

    def of_pipeline(value: str) -> tuple[float, str, str]:
        with suppress(NotMeasured):
            for model in pipeline_models.get():
                setting = {"microbatches": int(value)} if value.isdecimal() else {"schedule": value}
                gain = (model.pipe.step_ns - model.step_with(**setting)) * model.pipe.calls_a_step
                return now - gain, "", ""
        return nan, "", "the pipeline cannot be replayed"

    times: Mapping[str, Callable[[str], tuple[float, str, str]]] = {
        "": lambda _: (now, "", ""),
        "batch": of_batch,
        "fused_attention": of_attention,
        "autocast": of_bits,
        "16_bits": of_bits,
        "checkpoint": of_checkpoint,
        "checkpoint_only": of_checkpoint,
        "shard": of_shards,
        "8_bit": lambda _: (nan, "", "speed of 8-bit optimizer kernels is not known"),
        "offload": of_offload,
        "microbatches": of_pipeline,
        "schedule": of_pipeline,
    }
    results = [times[str(c)](str(v)) for c, v in zip(rows["change"], rows["value"], strict=True)]
    then = pd.DataFrame(results, columns=["then_ns", "bound", "why"], index=rows.index)
    return rows.assign(now_ns=now).join(then)


# Memory monitors warn above 92 %. A larger batch may use up to that.
HIGH = 0.92

# Categories of the step that take the same time for any batch: host work.
HOST = ("host", "optimizer_host", "launch_latency")

# Advised batches of 16 or more are multiples of this: matrix products in 16 bits want 8.
_EVEN = 8

MOST_TIMES = 64.0  # no step is extrapolated further


@per_rank
def batch_memory(
    memory_use: Maybe[Frame] = maybe(memory_use),
    held: Maybe[Frame] = maybe(schema.HELD),
    memory_composition: Maybe[Frame] = maybe(memory_composition),
    rank: RankFacts = needs(RANK),
) -> pd.DataFrame:
    """Return how much of the memory of the rank's GPU grows with the batch, one row.

    Columns: stays_bytes, grows_bytes, floor_bytes (needed in the optimizer's step for any batch), total_bytes, counted
    (1: counted by part; 0: all memory that a step frees is assumed to grow). The allocator's cache is left out: a
    larger batch would use it. Raises NotMeasured where the rank uses no GPU, or its memory was not read.
    """
    columns = ["stays_bytes", "grows_bytes", "floor_bytes", "total_bytes", "counted"]
    total, composition, table = total_bytes(rank), memory_composition.or_none(), held.or_none()
    if composition is not None and table is not None and (device := main_device(composition)) != "cpu":
        now = of_device(table, composition, device, rank.facts).scaled({"cache": 0.0})
        if "temporary" in set(composition.loc[composition["device"] == device, "part"]):
            moments = dict(growth(now))
            floor = sum(moments.pop("update"))
            # The other moment that fills the memory with the smallest batch.
            stays, grows = min(moments.values(), key=lambda m: (HIGH * total - m[0]) / max(m[1], 1.0))
            return pd.DataFrame([(stays, grows, floor, total, 1)], columns=columns)
    use = memory_use.get().iloc[0]
    kept = float(use["kept_bytes"])
    return pd.DataFrame([(kept, float(use["peak_allocated_bytes"]) - kept, 0.0, total, 0)], columns=columns)


def batch_need(batch_memory: pd.DataFrame, times: float) -> float:
    """Return the largest share of memory that a batch `times` as large needs on any rank."""
    grown = batch_memory["stays_bytes"] + batch_memory["grows_bytes"] * times
    return float((np.maximum(grown, batch_memory["floor_bytes"]) / batch_memory["total_bytes"]).max())


def most_times(batch_memory: pd.DataFrame) -> float:
    """Return the largest batch that fits on every rank below HIGH, as a multiple of the present one; 0: none does."""
    free = HIGH * batch_memory["total_bytes"] - batch_memory["stays_bytes"]
    fits = batch_memory["floor_bytes"] <= HIGH * batch_memory["total_bytes"]
    times = (free / batch_memory["grows_bytes"].clip(lower=1.0)).where(fits, 0.0)
    return float(times.clip(lower=0.0, upper=MOST_TIMES).min())


def even(times: float, batch: object) -> float:
    """Return a multiple rounded down so that the batch size is one that a user would type.

    That is a whole number, from 16 on a multiple of 8. Where the batch is not known, the multiple is in quarters.
    """
    if not isinstance(batch, int) or isinstance(batch, bool) or batch < 1:
        return float(np.floor(4 * times) / 4)
    size = int(batch * times)
    return (size - size % _EVEN if size >= 2 * _EVEN else size) / batch


def gain_at(larger_batch_steps: pd.DataFrame, times: float, column: str = "gain_ns") -> float:
    """Return the gain of a multiple between those of `larger_batch_steps`.

    Interpolated over 1 / times, in which the gain is concave: the true gain is rather more. Beyond the largest known
    multiple the gain stays the same.
    """
    left = 1 / larger_batch_steps["times"].to_numpy(dtype=float)
    order = np.argsort(left)
    return float(np.interp(1 / times, left[order], larger_batch_steps[column].to_numpy(dtype=float)[order]))


def up_to(steps: pd.DataFrame, batch_memory: pd.DataFrame, step_ns: float, times: float) -> pd.DataFrame:
    """Return time and memory with larger batches: the rows of `larger_batch_steps` below a multiple, and that one.

    Columns: times, step_ns, speed (× present), need (see `batch_need`).
    """
    rows = [
        (t, step_ns - gain_at(steps, t), batch_need(batch_memory, t)) for t in (*steps["times"], times) if t <= times
    ]
    frame = pd.DataFrame(rows, columns=["times", "step_ns", "need"]).drop_duplicates()
    return frame.assign(speed=step_ns / frame["step_ns"])


MOST_MODULES = 60  # rows

_SHOWN = ("parameter", "gradient", "optimizer", "activation")  # parts; all others are one

OUTSIDE = "(the model itself)"  # outside its submodules, and the loss
OF_NONE = "(no module)"  # the same where there are several models


@across_ranks
def memory_footprint(
    memory_composition: Frame = needs(memory_composition),
    held_by_module: Maybe[Frame] = maybe(held_by_module),
    held_names: Maybe[Frame] = maybe(held_names),
    memory_what_if: Maybe[Frame] = maybe(memory_what_if),
    job: Job = needs(JOB),
) -> figures.Footprint:
    """Return each rank's memory by part, and of the rank with the highest peak its modules and predicted peaks."""
    sums = memory_composition.groupby(["rank", "device"], sort=False)["bytes"].sum().sort_values(ascending=False)
    order = {part: place for place, part in enumerate(PARTS)}
    devices = []
    for rank, device in sums.index[:MOST_RANKS]:
        mine = memory_composition[(memory_composition["rank"] == rank) & (memory_composition["device"] == device)]
        rows = mine.iloc[mine["part"].map(order).fillna(len(order)).argsort(kind="stable")]
        parts = tuple(
            figures.MemoryPart(str(p), float(n), str(k))
            for p, n, k in zip(rows["part"], rows["bytes"], rows["known"], strict=True)
        )
        total = (job.facts[rank].get("device") or {}).get("memory_bytes") if device != "cpu" else None
        total = None if total is None else float(total)
        devices.append(figures.DeviceMemory(int(rank), str(device), parts, str(mine["moment"].iloc[0]), total))
    rank, device = sums.index[0]
    now_ns: float | None = None
    changed: tuple[figures.MemoryChange, ...] = ()
    inside: tuple[figures.ModuleMemory, ...] = ()
    if (changes := memory_what_if.or_none()) is not None:
        rank, device = int(changes["rank"].iloc[0]), str(changes["device"].iloc[0])
        changed = tuple(_change(row) for row in changes[changes["change"] != ""].to_dict("records"))
        now_ns = _known(changes["now_ns"].iloc[0])
    by_module, names = held_by_module.or_none(), held_names.or_none()
    if by_module is not None and names is not None:
        mine = by_module[(by_module["rank"] == rank) & (by_module["device"] == device)]
        inside = modules(mine, names[names["rank"] == rank])
    return figures.Footprint(tuple(devices), int(rank), inside, changed, now_ns)


def _change(row: Mapping[Any, Any]) -> figures.MemoryChange:
    least, most = (
        None if row["least_bytes"] == row["most_bytes"] else _known(row[f"{of}_bytes"]) for of in ("least", "most")
    )
    times, then_ns = _known(row["times"]), _known(row["then_ns"])
    what, value, then_bytes = str(row["change"]), str(row["value"]), float(row["then_bytes"])
    return figures.MemoryChange(what, value, then_bytes, times, then_ns, row["bound"], str(row["why"]), least, most)


def _known(value: float) -> float | None:
    return None if pd.isna(value) else float(value)


def modules(held_by_module: pd.DataFrame, held_names: pd.DataFrame) -> tuple[figures.ModuleMemory, ...]:
    """Return the memory of one rank's modules on one device, each with the modules inside it, the largest first.

    Identical modules are one row. A module with the same memory as one inside it is left out.
    """
    part = held_by_module["part"].astype(str).where(held_by_module["part"].isin(_SHOWN), "other")
    own = held_by_module.assign(part=part).pivot_table("bytes", "module", "part", "sum", fill_value=0.0)
    own = own.reindex(columns=[*_SHOWN, "other"], fill_value=0.0)
    named = held_names.set_index("module")
    inside = [(path, m, named["name"].get(m, m)) for path in map(str, own.index) for m in around(path) if m or not path]
    pairs = pd.DataFrame(inside, columns=["module", "around", "path"])
    whole = pairs.merge(own, left_on="module", right_index=True).groupby("path")[[*_SHOWN, "other"]].sum()
    counts = pairs.groupby("path")["around"].nunique().to_dict()
    kind_of = {str(name): str(kind) for name, kind in zip(named["name"], named["kind"], strict=True)}
    rows = [
        figures.ModuleMemory(
            str(name) or (OUTSIDE if kind_of.get("") else OF_NONE),
            kind_of.get(str(name), ""),
            counts.get(str(name), 1),
            float(sum(sizes)),
            *sizes,
        )
        for name, *sizes in whole.astype(float).itertuples(name=None)
    ]
    largest = {(row.bytes, row.activation): row.module for row in sorted(rows, key=lambda r: len(r.module))}
    kept = [row for row in rows if row.bytes and largest[row.bytes, row.activation] == row.module]
    return tuple(sorted(kept, key=lambda row: -row.bytes)[:MOST_MODULES])
