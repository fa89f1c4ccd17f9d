"""Which spans a finding is about, and the time of each: these determine the finding's modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof import schema
from dlprof.analysis import intervals as iv
from dlprof.analysis.chains.calls import Calls, calls
from dlprof.analysis.chains.gelus import gelu_chains
from dlprof.analysis.chains.growing import growing_chains
from dlprof.analysis.chains.losses import loss_chains
from dlprof.analysis.chains.norms import norm_chains
from dlprof.analysis.chains.one_hot import one_hot_chains
from dlprof.analysis.chains.work import Chain
from dlprof.analysis.compute.attention import Found, attention_blocks
from dlprof.analysis.compute.cpu_work import is_product
from dlprof.analysis.compute.kernels import kernels
from dlprof.analysis.compute.operators import operator_work
from dlprof.analysis.compute.products import misaligned_sizes
from dlprof.analysis.engine import Frame, Maybe, maybe, needs, within_rank
from dlprof.analysis.host.gaps import host_gaps
from dlprof.analysis.host.syncs import sync_waits
from dlprof.analysis.modules.work import traced_exchanges
from dlprof.analysis.step.partition import exposed_communication
from dlprof.analysis.timeline import host
from dlprof.analysis.timeline.device import DeviceSets, device_sets, device_work, has_device
from dlprof.analysis.timeline.host import training_lane
from dlprof.analysis.timeline.idle import Idle, first_after, idle
from dlprof.analysis.timeline.steps import Timing, launched_within, timing

# What a finding of each rule is about, as `concerned_rows` names it.
CONCERNED: Mapping[str, str] = {
    "blocking_copy": "waits pinned",
    "data_parallel": "exchanges",
    "exposed_communication": "exchanges",
    "exposed_copy": "copies",
    "fp32_matmul": "float32",
    "growing_cat": "growing",
    "host_bound": "late",
    "host_sync": "waits",
    "misaligned_shapes": "misaligned",
    "one_hot_input": "one-hot",
    "pageable_copy": "copies pageable",
    "queued_wait": "queued",
    "slow_link": "exchanges",
    "small_collectives": "exchanges",
    "unfused_activation": "activations",
    "unfused_attention": "attention",
    "unfused_loss": "losses",
    "unfused_norm": "norms",
}

Rows = tuple[NDArray[np.int64], NDArray[np.float64]]  # of the spans, and ns of each


@within_rank
def of_chains(
    calls: Calls = needs(calls),
    norm_chains: list[Chain] = needs(norm_chains),
    gelu_chains: list[Chain] = needs(gelu_chains),
    loss_chains: list[Chain] = needs(loss_chains),
    one_hot_chains: list[Chain] = needs(one_hot_chains),
    growing_chains: list[Chain] = needs(growing_chains),
) -> dict[str, Rows]:
    """Return the operators of unfused chains."""
    found = {
        "norms": norm_chains,
        "activations": gelu_chains,
        "losses": loss_chains,
        "one-hot": one_hot_chains,
        "growing": growing_chains,
    }
    return {name: _operators(calls, chains) for name, chains in found.items()}


@within_rank
def of_computation(
    spans: Frame = needs(schema.SPANS),
    kernels: Maybe[Frame] = maybe(kernels),
    operator_work: Maybe[Frame] = maybe(operator_work),
    attention_blocks: Maybe[list[Found]] = maybe(attention_blocks),
    has_device: bool = needs(has_device),
) -> dict[str, Rows]:
    """Return what computes in float32, in sizes that do not suit tensor cores, and in attention that is not fused."""
    if not has_device:
        work = operator_work.or_none()
        multiplies = np.array([is_product(str(name)) for name in spans["name"].cat.categories], dtype=bool)
        within = [block.before + block.after for block, _, _, ns in attention_blocks.or_none() or () if ns]
        rows = np.array([row for block in within for row in block], dtype=np.int64)
        found = {"attention": (rows, spans["dur_ns"].to_numpy(dtype=float)[rows])}
        if work is not None:
            found["float32"] = _taken(work, multiplies[spans["name"].cat.codes[work.index]])
        return found
    work = kernels.or_none()
    if work is None:
        return {}
    fusable = np.zeros(len(work), dtype=bool)
    for _, places, _, _ in attention_blocks.or_none() or ():
        fusable[places] = True
    return {
        "float32": _taken(work, host.is_one_of(work["unit"], "float32")),
        "misaligned": _taken(work, _misaligned(spans, work)),
        "attention": _taken(work, fusable),
    }


@within_rank
def of_waiting(
    spans: Frame = needs(schema.SPANS),
    host_gaps: Maybe[iv.Intervals] = maybe(host_gaps),
    idle: Maybe[Idle] = maybe(idle),
    sync_waits: Maybe[Frame] = maybe(sync_waits),
    device_work: Maybe[Frame] = maybe(device_work),
    has_device: bool = needs(has_device),
    timing: Timing = needs(timing),
    training_lane: str = needs(training_lane),
) -> dict[str, Rows]:
    """Return what the device, or on a CPU the training thread, waited for: launches, and queued work."""
    late = host_gaps.or_none()
    if late is None:
        return {}
    if not has_device:
        ops = np.flatnonzero(host.is_one_of(spans["lane"], training_lane) & host.is_kind(spans, "op"))
        at = np.searchsorted(spans["start_ns"].to_numpy()[ops], late[:, 1])
        return {"late": _lengths(ops[at[at < len(ops)]], late[at < len(ops)])}
    work, gaps = device_work.get(), idle.get()
    windows = iv.merge(timing.windows)
    found = {"late": _ended(work, late), "queued": _ended(work, iv.intersect(gaps.queued, windows))}
    for memory, mine in sync_waits.get().groupby("copied"):
        found[f"waits {memory}".strip()] = _lengths(mine["row"].to_numpy(), mine[["start_ns", "end_ns"]].to_numpy())
    return found


@within_rank
def of_transfers(
    spans: Frame = needs(schema.SPANS),
    exposed_communication: Maybe[iv.Intervals] = maybe(exposed_communication),
    device_sets: Maybe[DeviceSets] = maybe(device_sets),
    traced_exchanges: NDArray[np.int64] = needs(traced_exchanges),
    device_work: Frame = needs(device_work),
    launched_within: NDArray[np.int64] = needs(launched_within),
) -> dict[str, Rows]:
    """Return exchanges and copies, each as long as nothing is computed beside it."""
    start, end = spans["start_ns"].to_numpy(), (spans["start_ns"] + spans["dur_ns"]).to_numpy()
    bare = exposed_communication.or_none()
    found = {}
    if bare is not None:
        took = iv.within(bare, start[traced_exchanges], end[traced_exchanges])
        found["exchanges"] = traced_exchanges, took.astype(float)
    sets = device_sets.or_none()
    if sets is not None:
        copies = host.is_kind(device_work, "copy") & (launched_within >= 0)
        pageable = host.is_one_of(device_work["copy"], "HtoD") & host.is_one_of(device_work["memory"], "pageable")
        for name, chosen in (("copies", copies & ~pageable), ("copies pageable", copies & pageable)):
            rows = device_work.index.to_numpy()[chosen]
            found[name] = rows, iv.within(sets.exposed_copy, start[rows], end[rows]).astype(float)
    return found


@within_rank
def concerned_rows(
    of_computation: dict[str, Rows] = needs(of_computation),
    of_chains: Maybe[dict[str, Rows]] = maybe(of_chains),
    of_waiting: dict[str, Rows] = needs(of_waiting),
    of_transfers: dict[str, Rows] = needs(of_transfers),
) -> dict[str, Rows]:
    """Return the rows of the spans that findings are about, with the ns that each costs the steady traced steps."""
    return of_computation | (of_chains.or_none() or {}) | of_waiting | of_transfers


def _operators(calls: Calls, chains: Sequence[Chain]) -> Rows:
    places = np.concatenate([np.empty(0, dtype=np.int64), *(chain.places for chain in chains)])
    return calls.rows[places], calls.ns[places]


def _taken(work: pd.DataFrame, chosen: NDArray[np.bool_]) -> Rows:
    """Return the rows of some work that are chosen and in a steady step, with their time."""
    chosen = chosen & (work["step"].to_numpy() >= 0)
    return work.index.to_numpy()[chosen], work["dur_ns"].to_numpy(dtype=float)[chosen]


def _misaligned(spans: pd.DataFrame, kernels: pd.DataFrame) -> NDArray[np.bool_]:
    """Return which kernels were launched by products of sizes that do not suit tensor cores, where shapes are known."""
    owner = kernels["owner"].to_numpy()
    known = np.flatnonzero(owner >= 0)
    known = known[~host.is_one_of(spans["shape"], "")[owner[known]]]
    columns = [spans[column] for column in ("name", "shape", "dtype")]
    codes = tuple(column.cat.codes.to_numpy()[owner[known]].astype(np.int64) for column in columns)
    sizes = tuple(len(column.cat.categories) for column in columns)
    of, each = pd.factorize(np.ravel_multi_index(codes, sizes))
    texts = [column.cat.categories for column in columns]
    told = [
        [str(text[int(code)]) for text, code in zip(texts, np.unravel_index(one, sizes), strict=True)] for one in each
    ]
    odd = np.zeros(len(owner), dtype=bool)
    odd[known] = np.array([bool(misaligned_sizes(*one)) for one in told], dtype=bool)[of]
    return odd


def _ended(device_work: pd.DataFrame, gaps: iv.Intervals) -> Rows:
    """Return the work that ended each gap, with the gap's length."""
    row = first_after(device_work, gaps)
    known = row >= 0
    return _lengths(device_work.index.to_numpy()[row[known]], gaps[known])


def _lengths(rows: NDArray[np.int64], gaps: iv.Intervals) -> Rows:
    return rows, (gaps[:, 1] - gaps[:, 0]).astype(float)
