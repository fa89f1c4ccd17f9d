"""The places of a finding: the related calls and the lines seen in its phases, in the user's files, the modules of the
model, and the script's own options that do what a change does: a better remedy than an edit.

Calls and phases come from tables: CONCERNS by rule; for other rules _PHASES, by the category of the rule's saving. The
modules are those of the spans that the finding is about (CONCERNED).
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from dlprof import schema
from dlprof.analysis import idioms
from dlprof.analysis import intervals as iv
from dlprof.analysis.chains.calls import Calls, Chain, calls
from dlprof.analysis.chains.written_out import gelu_chains, growing_chains, loss_chains, norm_chains, one_hot_chains
from dlprof.analysis.compute.attention import Found, attention_blocks
from dlprof.analysis.compute.cpu_work import is_product
from dlprof.analysis.compute.kernels import kernels
from dlprof.analysis.compute.operators import operator_work
from dlprof.analysis.compute.products import misaligned_sizes
from dlprof.analysis.engine import JOB, Frame, Job, Maybe, across_ranks, maybe, needs, per_rank, within_rank
from dlprof.analysis.host.gaps import host_gaps
from dlprof.analysis.host.stacks import DOING, LEAST_SAMPLES, own_lines, shown
from dlprof.analysis.host.waiting import sync_waits
from dlprof.analysis.idioms import IDIOMS
from dlprof.analysis.modules.frames import Frames, module_frames, module_rows
from dlprof.analysis.modules.tree import around_of, built, inclusive
from dlprof.analysis.modules.work import OUTSIDE, traced_exchanges
from dlprof.analysis.source.edits import nodes_of_line
from dlprof.analysis.source.line_shares import call_sites, costly_lines, line_shares, over_ranks
from dlprof.analysis.source.patches import Call, Wanted, kind_of, patch, sites
from dlprof.analysis.source.rewrites import KEEP, KEPT, REWRITES
from dlprof.analysis.source.statements import Trees, statements, telling
from dlprof.analysis.step.partition import exposed_communication
from dlprof.analysis.timeline import host
from dlprof.analysis.timeline.device import DeviceSets, Idle, device_sets, device_work, first_after, has_device, idle
from dlprof.analysis.timeline.host import training_lane
from dlprof.analysis.timeline.paths import folded
from dlprof.analysis.timeline.steps import Timing, launched_within, timing
from dlprof.overrides import changes_numbers as numeric
from dlprof.overrides import named
from dlprof.result import Change, Outcome, Place, Setting
from dlprof.result.figures import InModule

# What options are called, without dashes and underscores, besides the setting's own name if that has several words.
_NAMES: Mapping[str, str] = {
    "autocast_enabled": "amp autocast mixedprecision automixedprecision fp16 bf16 half",
    "compile": "compile torchcompile compilemodel",
    "mode": "compilemode torchcompilemode compile torchcompile compilemodel",
    "memory_format": "channelslast nhwc",
    "num_workers": "workers nworkers ncpu dataworkers loaderworkers workerspergpu dataloadernumworkers",
    "persistent_workers": "dataloaderpersistentworkers",
    "pin_memory": "pinmem dataloaderpinmemory",
    "prefetch_factor": "prefetch dataloaderprefetchfactor",
    "fused": "fused fusedadam fusedoptimizer fusedoptim",
}
_OF_TYPE = {"fp16": "float16", "half": "float16", "bf16": "bfloat16"}


class Option(Struct, frozen=True):
    """An option of the script's command line; `switch`: it takes no value; `on`: it is given, or so by default."""

    name: str
    dest: str
    switch: bool = False
    on: bool = False


@across_ranks
def options(job: Job = needs(JOB)) -> list[Option]:
    """Return the options that the script of the first rank has; none where argparse did not read its command line."""
    rows = (job.facts[job.ranks[0]].get("options") or ()) if job.ranks else ()
    known = (row for row in rows if row.get("name") and row.get("dest"))
    return [Option(row["name"], row["dest"], bool(row.get("switch")), bool(row.get("on"))) for row in known]


def with_option(change: Change, calls: Sequence[Call], options: Sequence[Option], *settings: Setting) -> Change:
    """Return a change with the options of the script that do the same named first.

    `calls`: those that take its settings; `settings`: what it does, if it does not say so itself.
    """
    kind = next((str(s.to) for s in change.settings if s.name == "autocast_dtype"), "")
    sure: list[str] = []
    looks: list[str] = []
    for setting in settings or change.settings:
        known = _known(setting.name, calls, options)
        option = known or _alike(setting.name, options, kind)
        if option is not None and not option.on and not (option.switch and setting.to in (False, 0)):
            is_number = type(setting.to) in (int, float)
            value = "" if option.switch else f" {setting.to}" if is_number else " …"
            (sure if known else looks).append(f"`{option.name}{value}`")
    has = [f"for it: {' '.join(sure)}"] if sure else []
    has += [f"that looks like it: {' '.join(looks)}"] if looks else []
    said = f"the script has an option {', and one '.join(has)}; else "
    return replace(change, text=said + change.text) if has else change


def _known(setting: str, calls: Sequence[Call], options: Sequence[Option]) -> Option | None:
    """Return the option whose value is the setting's in all of the calls: `num_workers=args.workers`."""
    of_calls = {_given(call.source, setting) for call in calls}
    return next((option for option in options if of_calls == {option.dest}), None)


def _given(source: str, setting: str) -> str:
    """Return the attribute that is given as a keyword in a line; "": none is."""
    given = [n.value for n in nodes_of_line(source) if isinstance(n, ast.keyword) and n.arg == setting]
    return given[0].attr if len(given) == 1 and isinstance(given[0], ast.Attribute) else ""


def _alike(setting: str, options: Sequence[Option], kind: str) -> Option | None:
    words = [*([setting.replace("_", "")] if "_" in setting else []), *_NAMES.get(setting, "").split()]
    of = {_bare(option.name): option for option in reversed(options)}
    return next((of[word] for word in words if word in of and _OF_TYPE.get(word, kind) == kind), None)


def _bare(name: str) -> str:
    return name.strip("-").replace("-", "").replace("_", "").lower().removeprefix("use").removeprefix("enable")


# The most calls of a kind and the most lines that a finding names, and the least share of the stacks of such a line.
# With LEAST_SAMPLES × 8 stacks, the sampling error of a share of a twentieth is a third of it.
MOST_CALLS = 3
MOST_LINES = 3
LEAST_SHARE = 0.05


class Concern(Struct, frozen=True):
    """What a finding is about: kinds of calls (record/calls.py), phases, and the loader's role.

    `called`: only the phase's lines that were seen in a library's function of this name. `tells`: functions and
    keywords by which a script tells a library to do so (`statements.telling`).
    """

    calls: tuple[str, ...] = ()
    phases: tuple[str, ...] = ()
    role: str = "train"
    called: str = ""
    tells: tuple[str, ...] = ()


# Rules that see the Python between the phases.
_SAME_LINES = ("host_bound", "host_sync", "parameter_loop", "step_python")

# Calls that are recorded each time (up to a limit). If one was seen only _FEW times or less, it is not in every step.
_EACH_TIME, _FEW = ("synchronize", "empty_cache"), 4

_LOADER = ("loader", "iteration")
_GRADIENTS = Concern(("ddp", "fsdp"), ("backward",))
# Rules that name their lines themselves, or are of no line.
_OF_NO_LINE = """busy_thread costly_line gc_pauses idle_cores job_failed memory_growth slow_start stalled_steps
thread_oversubscription throttled_clock"""
CONCERNS: Mapping[str, Concern] = {
    **dict.fromkeys(_OF_NO_LINE.split(), Concern()),
    "anomaly_mode": Concern(("anomaly", "backward")),
    "blocking_copy": Concern(("copy",)),
    "checkpoint_stall": Concern(("save",)),
    "copied_memory": Concern(("loader",)),
    "data_parallel": Concern(("data_parallel",), ("forward",)),
    "expert_imbalance": Concern(("forward",)),
    "deterministic": Concern(("deterministic",)),
    "device_allocations": Concern(("empty_cache",), ("rest",), called="empty_cache"),
    "duplicate_batches": Concern(("loader",)),
    "exposed_communication": _GRADIENTS,
    "exposed_copy": Concern(("copy", "loader")),
    "fp32_matmul": Concern(("autocast", "forward"), ("forward",)),
    "frozen_forward": Concern(("frozen_forward",)),
    "growing_cat": Concern(("cat",)),
    "growing_steps": Concern((), ("rest", "backward", "forward")),
    "host_bound": Concern(("compile", "forward"), ("forward", "rest")),
    "host_embedding": Concern(("embedding", "copy")),
    "host_sync": Concern(("synchronize", "sync"), ("rest",), called="synchronize"),
    "dense_gradient": Concern(("embedding", "backward"), ("backward",)),
    "unused_gradients": Concern(("backward", "optimizer"), ("backward",)),
    "input_wait": Concern(_LOADER, ("worker", "fetch")),
    "masked_attention": Concern(),
    "memory_format": Concern(("model", "forward")),
    "memory_headroom": Concern(("loader", "forward")),
    "needless_workers": Concern(("loader",)),
    "parameter_loop": Concern((), ("rest",)),
    "padding": Concern(("loader",), tells=("padding='…'",)),
    "pageable_copy": Concern(("copy", "loader")),
    "needless_recompute": Concern(("forward", "backward")),
    "own_profiler": Concern(("profiler",)),
    "one_hot_input": Concern(("one_hot",)),
    "periodic_work": Concern(("unused_forward",), ("rest",)),
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
    "unequal_lengths": Concern(("loader",)),
    "unfused_activation": Concern(("forward",), ("forward",)),
    "unfused_attention": Concern(("softmax", "forward"), ("forward",)),
    "unfused_loss": Concern(("loss",)),
    "unfused_norm": Concern(("norm",)),
    "unfused_optimizer": Concern(("optimizer", "optimizer_step"), ("optimizer",)),
    "unused_batches": Concern(("iteration",)),
    "unused_forward": Concern(("unused_forward", "forward")),
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


@per_rank
def found_in_modules(
    module_rows: Frame = needs(module_rows),
    module_frames: Frames = needs(module_frames),
    modules: Maybe[Frame] = maybe(schema.MODULES),
    concerned_rows: dict[str, Rows] = needs(concerned_rows),
) -> pd.DataFrame:
    """Return in which modules the rows are that findings are about: about (as CONCERNED names it), path (folded; of
    what is in none, OUTSIDE), kind, ns (with what is inside the module), total_ns (of all those rows).

    Raises NotMeasured where the trace names no module: `module_rows` stands first, and nothing is computed then.
    """
    called = dict(zip(module_frames.paths, module_frames.classes, strict=True))
    names = folded({**built(modules.or_none()), **called})
    of_place = np.array([*(names[path] for path in module_frames.paths), OUTSIDE], dtype=object)  # −1: the last
    kind_of = {names[path]: kind for path, kind in zip(module_frames.paths, module_frames.classes, strict=True)}
    module = module_rows["module"].to_numpy()
    found = []
    for about, (rows, ns) in concerned_rows.items():
        if not ns.sum() > 0:
            continue
        own = pd.Series(ns).groupby(of_place[module[rows]]).sum()
        inside = own.drop(OUTSIDE, errors="ignore")
        tree = inclusive(inside.to_frame("ns"))["ns"].fillna(0.0).nlargest(MOST_OF_RANK)
        tree = pd.concat([tree, own[own.index == OUTSIDE]])
        kinds = [kind_of.get(str(path), "") for path in tree.index]
        of = {"about": about, "path": tree.index, "kind": kinds, "ns": tree.to_numpy(), "total_ns": ns.sum()}
        found.append(pd.DataFrame(of))
    columns = ["about", "path", "kind", "ns", "total_ns"]
    frame = pd.concat(found, ignore_index=True) if found else pd.DataFrame(columns=columns)
    return frame.astype(dict.fromkeys(columns[:3], object) | dict.fromkeys(columns[3:], float))


class Source(Struct, frozen=True):
    """What is known of the user's lines and modules. Its fields are needs: the engine fills them."""

    call_sites: Maybe[list[Call]] = maybe(call_sites)
    line_shares: Maybe[Frame] = maybe(line_shares)
    costly_lines: Maybe[Frame] = maybe(costly_lines)
    own_lines: Maybe[Frame] = maybe(own_lines)
    found_in_modules: Maybe[Frame] = maybe(found_in_modules)
    options: Maybe[list[Option]] = maybe(options)
    statements: Trees = needs(statements)


def placed(outcome: Outcome, saves_from: Sequence[str], source: Source) -> Outcome:
    """Return a finding with its places, and each of its changes with its place."""
    concern = CONCERNS.get(outcome.id) or next((_PHASES[c] for c in saves_from if c in _PHASES), Concern())
    calls, shares = source.call_sites.or_none() or [], source.line_shares.or_none()
    shown = {(place.file, place.line) for place in outcome.where}
    concerned = [call for call in _concerned(calls, concern) if (call.file, call.line) not in shown]
    does = idioms.BY_NAME.get(idioms.of_advice(outcome.changes[0].text) if outcome.changes else "")
    told = telling(source.statements, (*concern.tells, *(does.at if does is not None else ())))
    where = [*told, *outcome.where, *map(_of_call, concerned)]
    if shares is not None and concern.phases and not outcome.where:
        lines = over_ranks(shares)
        where += _of_lines(lines[lines["library"].str.startswith(concern.called)], concern.phases)
    where = _with_callers(where, source)
    of_script = source.options.or_none() or []
    changes = tuple(
        _located(_in_code(change, outcome.id, where, calls), calls, concern.role, of_script)
        for change in outcome.changes
    )
    modules = in_modules(outcome.id, source.found_in_modules.or_none())
    return replace(outcome, where=tuple(where), changes=changes, modules=modules)


def each_line_once(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Return the outcomes, the largest first. If several name the same line, only the largest keeps it."""
    shown: set[tuple[str, int, str]] = set()
    found = []
    for one in outcomes:
        if one.id in _SAME_LINES:
            one = replace(one, where=tuple(p for p in one.where if (p.file, p.line, p.function) not in shown))
            shown.update((place.file, place.line, place.function) for place in one.where)
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
    looked_up = {(c.file, c.line) for c in calls if c.kind == "embedding"}
    for kind in concern.calls:
        of_kind = [c for c in calls if c.kind == kind]
        if kind in _LOADER:
            of_kind = [c for c in of_kind if concern.role in c.roles] or [c for c in of_kind if not c.roles]
        if kind in _EACH_TIME:
            of_kind = [c for c in of_kind if c.count > _FEW]
        if kind == "forward":  # what only looks up an embedding is named where there is no other
            of_kind = [c for c in of_kind if (c.file, c.line) not in looked_up] or of_kind
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


def _with_callers(where: list[Place], source: Source) -> list[Place]:
    """Return the places with the lines that call the first one's function, if stacks were seen in the first."""
    if not where:
        return where
    first = where[0]
    # A call, as of the model, is seen in the stacks of what it begins.
    seen = (source.own_lines if first.share is None else source.costly_lines).or_none()
    if seen is None:
        return where
    rows = seen[(seen["file"] == first.file) & (seen["line"] == first.line)]
    callers = next(iter(rows["callers"]), ())
    if not callers:
        return where
    known = {(place.file, place.line) for place in where}
    does = (f"calls {first.function}", "leads there")
    calls = [Place(file, line, f, what=what) for (f, file, line), what in zip(callers, does, strict=False)]
    what = ", ".join(filter(None, (first.what, f"called by {shown(*callers[0])}")))
    return [replace(first, what=what), *(c for c in calls if (c.file, c.line) not in known), *where[1:]]


# The rules whose change an edit of code makes, what the change then says, and the name of the edit.
EDITED = (
    ("anomaly_mode", "set_detect_anomaly", "anomaly_mode"),
    ("growing_steps", "set_flush_denormal", "denormals"),
    ("growing_steps memory_growth", "loss.detach()", "growing_steps"),
    ("masked_attention", "is_causal=True", "masked_attention"),
    ("needless_workers input_wait", "with `.clone()`", "copied_storages"),
    ("one_hot_input needless_products", "functional.embedding(index", "one_hot_input"),
    ("unfused_activation", "functional.gelu(", "unfused_activation"),
    ("unfused_attention", "functional.scaled_dot_product_attention(", "unfused_attention"),
    ("unfused_loss", "functional.cross_entropy(", "unfused_loss"),
    ("unfused_norm", "_norm(", "unfused_norm"),
    ("validation_share", "no_grad", "validation_share"),
)


def _in_code(change: Change, rule: str, where: Sequence[Place], calls: Sequence[Call]) -> Change:
    """Return a change that no setting makes with the edit of code that does, where one is known for its idiom."""
    keeps = change.text.startswith(KEEP)  # with its workers, which a setting keeps
    if (change.settings and not keeps) or change.training or change.informs:
        return change
    of_rule = next((name for rules, words, name in EDITED if rule in rules.split() and words in change.text), "")
    of_rule = KEPT if keeps else of_rule
    name = next((one.name for one in IDIOMS if one.remedy in change.text), of_rule)
    for place in (*filter(None, (change.at,)), *where) if name in REWRITES else ():
        setting = Setting(f"{place.file}:{place.line}", to=name)
        if place.line and patch(calls, [Wanted("code", {setting.name: name})]).text:
            return replace(change, settings=(setting, *change.settings))
    return change


def _located(change: Change, calls: Sequence[Call], role: str, options: Sequence[Option]) -> Change:
    """Return a change with the place of the first argument that it sets, and its diff, or why there is none.

    An option of the script that does the same is named first.
    """
    requests = wanted(change, role)
    there = [call for one in requests for call in sites(calls, one)]
    change = with_option(change, there, options)
    if not there or change.no_diff:
        return change
    made = patch(calls, requests)
    why = "; ".join(dict.fromkeys(f"{at}: {why}" for _, at, why in made.left_out if at))
    # An edit of code may begin with an import; its place is that of the line that it is asked for.
    asked = next((int(line) for s in change.settings if (line := s.name.rpartition(":")[2]).isdigit()), 0)
    elsewhere = sorted(made.elsewhere, key=lambda one: abs(one[1] - asked) if asked else 0)
    at = next((Place(file, line, what=text) for file, line, text in elsewhere), _of_call(there[0]))
    return replace(change, at=at, diff=made.shown, no_diff="" if made.text else why)


# The most modules of a finding that a rank passes on, and the most that are named.
MOST_OF_RANK, MOST_NAMED = 60, 6

# A module is replaced by its inner modules if those with at least LEAST_MODULE_SHARE of the finding add up to this
# share of the module's part.
LEAST_MODULE_SHARE, INSIDE_SHARE = 0.1, 0.8


def in_modules(rule: str, found: pd.DataFrame | None) -> tuple[InModule, ...]:
    """Return the modules of a rule's finding, over all ranks, none inside another, the largest share first.

    () if none is known. Work outside all modules has no path and no class.
    """
    mine = found[found["about"] == CONCERNED.get(rule, "")] if found is not None else None
    if mine is None or not len(mine):
        return ()
    total = float(mine.drop_duplicates("rank")["total_ns"].sum())
    sums = mine.groupby("path", sort=False).agg(ns=("ns", "sum"), kind=("kind", "max"))
    outside = float(sums["ns"].get(OUTSIDE, 0.0))
    tree = sums.drop(OUTSIDE, errors="ignore").sort_values("ns", ascending=False, kind="stable")
    around = around_of([str(path) for path in tree.index])
    took = (tree["ns"] / total).tolist()
    inside: dict[int, list[int]] = {}
    for n, outer in enumerate(around):
        inside.setdefault(outer, []).append(n)
    chosen, todo = [], list(inside.get(-1, ()))
    while todo:
        n = todo.pop()
        large = [i for i in inside.get(n, ()) if took[i] >= LEAST_MODULE_SHARE]
        if sum(took[i] for i in large) >= INSIDE_SHARE * took[n]:
            todo += large
        else:
            chosen.append(n)
    rows = [InModule(str(tree.index[n]), str(tree["kind"].iloc[n]), took[n]) for n in chosen]
    rows += [InModule("", "", outside / total)] if outside and rows else []
    return tuple(sorted((row for row in rows if row.share > 0), key=lambda row: -row.share)[:MOST_NAMED])


# The spans that a finding of each rule is about, by their name in `concerned_rows`.
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
    shapes = [
        [str(text[int(code)]) for text, code in zip(texts, np.unravel_index(one, sizes), strict=True)] for one in each
    ]
    odd = np.zeros(len(owner), dtype=bool)
    odd[known] = np.array([bool(misaligned_sizes(*one)) for one in shapes], dtype=bool)[of]
    return odd


def _ended(device_work: pd.DataFrame, gaps: iv.Intervals) -> Rows:
    """Return the work that ended each gap, with the gap's length."""
    row = first_after(device_work, gaps)
    known = row >= 0
    return _lengths(device_work.index.to_numpy()[row[known]], gaps[known])


def _lengths(rows: NDArray[np.int64], gaps: iv.Intervals) -> Rows:
    return rows, (gaps[:, 1] - gaps[:, 0]).astype(float)
