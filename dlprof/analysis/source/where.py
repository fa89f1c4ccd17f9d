"""Where a finding stands in the user's files: the calls that concern it, and the lines seen in its phases; and in which
modules of the model.

Which these are is data: CONCERNS by rule, and _PHASES by the category that the rule's saving comes out of, for a rule
that is not listed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd
from msgspec.structs import replace

from dlprof.analysis.engine import Frame, Maybe, maybe
from dlprof.analysis.host.stacks import DOING, LEAST_SAMPLES
from dlprof.analysis.source.calls import call_sites
from dlprof.analysis.source.in_modules import found_in_modules, in_modules
from dlprof.analysis.source.line_shares import line_shares, over_ranks
from dlprof.analysis.source.patches import Call, Wanted, kind_of, patch, sites
from dlprof.overrides import changes_numbers as numeric
from dlprof.overrides import named
from dlprof.result import Change, Outcome, Place

# A finding names so many calls of a kind, and so many lines, each with at least this share of the stacks: the sampling
# error of a share of a twentieth is a third of it at LEAST_SAMPLES × 8 stacks.
MOST_CALLS = 3
MOST_LINES = 3
LEAST_SHARE = 0.05


@dataclass(frozen=True)
class Concern:
    """What a finding is about: kinds of calls (record/calls/seen.py), phases, and what a loader's batches are for.

    `called`: of a phase's lines only those that were seen in a library's function of such a name.
    """

    calls: tuple[str, ...] = ()
    phases: tuple[str, ...] = ()
    role: str = "train"
    called: str = ""


# Rules that see the Python between the phases.
_SAME_LINES = ("host_bound", "host_sync", "parameter_loop", "step_python")

# Calls that are looked at each time (up to a limit): those that were seen a few times are not of every step.
_EACH_TIME, _FEW = ("synchronize", "empty_cache"), 4

_LOADER = ("loader", "iteration")
_GRADIENTS = Concern(("ddp", "fsdp"), ("backward",))
CONCERNS: Mapping[str, Concern] = {
    "anomaly_mode": Concern(("anomaly", "backward")),
    "blocking_copy": Concern(("copy",)),
    "checkpoint_stall": Concern(("save",)),
    "data_parallel": Concern(("data_parallel",), ("forward",)),
    "expert_imbalance": Concern(("forward",)),
    "device_allocations": Concern(("empty_cache",), ("rest",), called="empty_cache"),
    "exposed_communication": _GRADIENTS,
    "exposed_copy": Concern(("copy", "loader")),
    "fp32_matmul": Concern(("autocast", "forward"), ("forward",)),
    "gc_pauses": Concern(),
    "growing_cat": Concern(("cat",)),
    "host_bound": Concern(("compile", "forward"), ("forward", "rest")),
    "host_embedding": Concern(("embedding", "copy")),
    "host_sync": Concern(("synchronize", "sync"), ("rest",), called="synchronize"),
    "idle_cores": Concern(),
    "input_wait": Concern(_LOADER, ("worker", "fetch")),
    "memory_format": Concern(("model", "forward")),
    "memory_growth": Concern((), ()),
    "memory_headroom": Concern(("loader", "forward")),
    "needless_workers": Concern(("loader",)),
    "parameter_loop": Concern((), ("rest",)),
    "padding": Concern(("loader",)),
    "pageable_copy": Concern(("copy", "loader")),
    "needless_recompute": Concern(("forward", "backward")),
    "one_hot_input": Concern(("one_hot",)),
    "periodic_work": Concern((), ("rest",)),
    "pipeline_bubble": Concern(("forward",)),
    "queued_wait": Concern(("sync",)),
    "recompilation": Concern(("compile", "forward")),
    "recurrent_loop": Concern(("forward",), ("forward",)),
    "skipped_steps": Concern(("grad_scaler",)),
    "slow_link": _GRADIENTS,
    "slow_worker_batches": Concern(("loader",), ("worker",)),
    "small_collectives": _GRADIENTS,
    "step_python": Concern((), ("rest",)),
    "straggler": Concern((), ("worker", "fetch", "rest", "forward")),
    "thread_oversubscription": Concern(),
    "throttled_clock": Concern(),
    "unfused_activation": Concern(("forward",), ("forward",)),
    "unfused_attention": Concern(("softmax", "forward"), ("forward",)),
    "unfused_loss": Concern(("loss",)),
    "unfused_norm": Concern(("norm",)),
    "unfused_optimizer": Concern(("optimizer", "optimizer_step"), ("optimizer",)),
    "unused_forward": Concern(("forward",)),
    "unused_parameters": Concern(("ddp",)),
    "validation_share": Concern(("iteration",), (), "validation"),
    "worker_restart": Concern(_LOADER, ("fetch",)),
}
_PHASES: Mapping[str, Concern] = {
    "checkpoint": Concern(("save",)),
    "communication": _GRADIENTS,
    "compilation": Concern(("compile",)),
    "computation": Concern(("forward",), ("forward", "backward")),
    "copy": Concern(("copy",)),
    "host": Concern((), ("rest", "forward", "optimizer")),
    "input_wait": Concern(_LOADER, ("worker", "fetch")),
    "optimizer_host": Concern(("optimizer",), ("optimizer",)),
    "validation": Concern(("iteration",), (), "validation"),
}


@dataclass(frozen=True)
class Source:
    """What is known of the user's lines and modules. Its fields are needs: the engine fills them."""

    call_sites: Maybe[list[Call]] = maybe(call_sites)
    line_shares: Maybe[Frame] = maybe(line_shares)
    found_in_modules: Maybe[Frame] = maybe(found_in_modules)


def placed(outcome: Outcome, saves_from: Sequence[str], source: Source) -> Outcome:
    """Return a finding with where it stands, and where each of its changes does."""
    concern = CONCERNS.get(outcome.id) or next((_PHASES[c] for c in saves_from if c in _PHASES), Concern())
    calls, shares = source.call_sites.or_none() or [], source.line_shares.or_none()
    told = {(place.file, place.line) for place in outcome.where}
    concerned = [call for call in _concerned(calls, concern) if (call.file, call.line) not in told]
    where = [*outcome.where, *map(_of_call, concerned)]
    if shares is not None and concern.phases and not outcome.where:
        lines = over_ranks(shares)
        where += _of_lines(lines[lines["library"].str.startswith(concern.called)], concern.phases)
    changes = tuple(_located(change, calls, concern.role) for change in outcome.changes)
    modules = in_modules(outcome.id, source.found_in_modules.or_none())
    return replace(outcome, where=tuple(where), changes=changes, modules=modules)


def told_once(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Return outcomes, the largest first, where of those that see the same lines only the largest names each."""
    told: set[tuple[str, int, str]] = set()
    found = []
    for one in outcomes:
        if one.id in _SAME_LINES:
            one = replace(one, where=tuple(p for p in one.where if (p.file, p.line, p.function) not in told))
            told.update((place.file, place.line, place.function) for place in one.where)
        found.append(one)
    return found


def wanted(change: Change, role: str = "train") -> list[Wanted]:
    """Return what a change wants of the script's calls, by their kind: none where it sets no keyword."""
    by_kind: dict[str, dict[str, str | int | float | bool | None]] = {}
    for setting in change.settings:
        if (kind := kind_of(setting.name)) and setting.to is not None:
            by_kind.setdefault(kind, {})[setting.name] = setting.to
    return [Wanted(kind, settings, role) for kind, settings in by_kind.items()]


def changes_numbers(change: Change) -> bool:
    """Return whether the job computes other numbers with a change."""
    names = filter(None, (named(setting.name) for setting in change.settings))
    return change.numerics or bool(numeric(dict.fromkeys(names, "")))


def role_of(rule: str) -> str:
    """Return what the batches of the loader that a rule's changes are about are for."""
    return CONCERNS.get(rule, Concern()).role


def _concerned(calls: Sequence[Call], concern: Concern) -> list[Call]:
    found: list[Call] = []
    for kind in concern.calls:
        of_kind = [c for c in calls if c.kind == kind]
        if kind in _LOADER:
            of_kind = [c for c in of_kind if concern.role in c.roles] or [c for c in of_kind if not c.roles]
        if kind in _EACH_TIME:
            of_kind = [c for c in of_kind if c.count > _FEW]
        of_kind.sort(key=lambda call: (bool(call.via), -call.count))
        found += of_kind[:MOST_CALLS]
    return found


def _of_call(call: Call) -> Place:
    return Place(call.file, call.line, call.function, what=call.source + (f", by {call.via}" if call.via else ""))


def _of_lines(shares: pd.DataFrame, phases: Sequence[str]) -> list[Place]:
    """Return the lines seen most in some phases: the user's, else the libraries' functions."""
    seen = shares[shares["doing"].isin(phases)]
    found: list[Place] = []
    for phase in phases:
        mine = seen[(seen["doing"] == phase) & (seen["of"] >= LEAST_SAMPLES) & (seen["share"] >= LEAST_SHARE)]
        own = mine[mine["own"].astype(bool)]
        for row in (own if len(own) else mine).head(MOST_LINES).to_dict("records"):
            what = DOING.get(phase, phase) + (f", in {row['library']}" if row["library"] else "")
            found.append(Place(row["file"], row["line"], row["function"], row["share"], what))
    return found


def _located(change: Change, calls: Sequence[Call], role: str) -> Change:
    """Return a change with where the first argument that it sets belongs, and its diff, or why there is none."""
    asked = wanted(change, role)
    there = [call for one in asked for call in sites(calls, one)]
    if not there:
        return change
    made = patch(calls, asked)
    why = "; ".join(dict.fromkeys(f"{at}: {why}" for _, at, why in made.left_out if at))
    return replace(change, at=_of_call(there[0]), diff=made.shown, no_diff="" if made.text else why)
