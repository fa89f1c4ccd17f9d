"""What a recording says of somebody's advice: would it help this job, what does it change, how is it measured?

Advice is free text: "num_workers 8", "use fused adam, but no torch.compile". Its words lead to settings, rules and
known ways of writing a line. What is not known is said to be unknown.
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from typing import Literal

import msgspec
from msgspec import Struct

from dlprof.analysis.idioms import DATA, IDIOMS, START
from dlprof.overrides import OVERRIDES, Override, Value, changes_numbers
from dlprof.plain import NBSP, command_line, plain
from dlprof.report import formatting, tried
from dlprof.result import Change, Outcome, Result

Helps = Literal["yes", "no", "perhaps", "already", "unknown"]


class Judged(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer of a rule that judges the advice."""

    rule: str
    state: str
    says: str
    speedup: float = 1.0
    at_most: bool = False


class Item(msgspec.Struct, frozen=True, omit_defaults=True):
    """One thing that was advised. `what`: a setting, a rule, a way of writing, or words; `now`: the run's value.

    `helps`: as a trial measured it, else as the recording predicts; `why` has the figure.
    `numerics`, `training`: the job then computes other numbers, or trains otherwise. `measure`: the command that tells.
    """

    what: str
    helps: Helps
    why: str
    value: Value | None = None
    now: str = ""
    judged: tuple[Judged, ...] = ()
    numerics: bool = False
    training: bool = False
    risk: str = ""
    at: str = ""
    diff: str = ""
    measure: str = ""


class Advice(msgspec.Struct, frozen=True):
    """All that was advised. `unknown`: the words that lead nowhere; `near`: names that are like them."""

    format: int
    run: str
    items: tuple[Item, ...]
    unknown: tuple[str, ...] = ()
    near: tuple[str, ...] = ()


class Recorded(Struct, frozen=True):
    """A run. `named`: the settings that make a change; `placed`: where settings go in the script, and the edit."""

    result: Result
    path: str
    named: Callable[[Change], Mapping[str, str] | None]
    placed: Callable[[Mapping[str, Value]], tuple[str, str]]


class _Topic(Struct, frozen=True):
    """What words are about: a setting, or a change of the script in words.

    `rules`: that judge it, the first counts most; `fewer`: that judge less of it, or none. `words`: how it is written,
    beside a setting's own name. `value`: where the words give none. `partly`: it may help although the rules are clear.
    """

    what: str
    rules: str = ""
    words: str = ""
    value: str = ""
    fewer: str = ""
    numerics: bool = False
    training: bool = False
    partly: bool = False


_LOADING = "input_wait slow_worker_batches"
_EXCHANGE = "small_collectives exposed_communication"
_MEMORY = "activation_memory out_of_memory"
_CHAINS = "unfused_norm unfused_loss unfused_activation"

# The first to match takes the words: what is more special comes first.
_TOPICS = (
    _Topic("recomputation", _MEMORY, r"(activation|gradient) checkpoint\w*|recomput\w+", fewer="needless_recompute"),
    _Topic("fused attention", "unfused_attention", "flash( ?attention)?|sdpa|scaled dot product", numerics=True),
    _Topic("fused kernels", _CHAINS, r"fused (\w+ ){0,2}(norm|loss|gelu|kernel)\w*"),
    _Topic("gradient accumulation", "exposed_communication", r"accumulat\w*( (of )?gradients)?|no sync", training=True),
    _Topic("ddp.comm_hook", "exposed_communication", r"(b?fp?16 )?(\w+ )?compress\w*( \w+){0,2}( b?fp?16)?", "bf16"),
    _Topic("ddp.bucket_cap_mb", _EXCHANGE, r"buckets?( size)?"),
    _Topic("ddp.find_unused_parameters", "unused_parameters", "unused parameters", fewer="unused_parameters"),
    _Topic("DistributedDataParallel", "data_parallel", r"ddp|(distributed ?)?data ?parallel"),
    _Topic("loader.persistent_workers", "worker_restart", r"keep \w* ?workers"),
    _Topic("loader.prefetch_factor", "input_wait", r"prefetch\w*"),
    _Topic("loader.pin_memory", "pageable_copy exposed_copy", r"pin(ned|ning)?( memory)?|page locked"),
    _Topic("loader.multiprocessing_context", "copied_memory worker_restart", r"(spawn|fork ?server)( \w+)?", "spawn"),
    _Topic("loader.num_workers", _LOADING, r"(?<!per )(?<!each )workers?( process\w*)?", fewer="needless_workers"),
    _Topic("optimizer.foreach", "unfused_optimizer", "for each"),
    _Topic("optimizer.fused", "unfused_optimizer", r"fused (optimi[sz]er|adam\w*|sgd)"),
    _Topic("torch.float32_matmul_precision", "fp32_matmul", "tf32|tensor ?cores?|float32 precision", "high"),
    _Topic("torch.num_threads", "idle_cores", "threads?", fewer="thread_oversubscription"),
    _Topic("torch.autocast", "fp32_matmul", r"amp|(mixed|half) precision|b?f(p|loat)?16", "bf16"),
    _Topic("torch.compile", f"host_bound {_CHAINS}", r"compil\w*", "default", "recompilation", partly=True),
    _Topic("torch.compile", "host_bound", r"cuda ?graphs?", "reduce-overhead"),
    _Topic("model.memory_format", "memory_format", "channels last|nhwc", "channels_last"),
    _Topic("gc.enabled", "", r"(disable|without|no|turn off) (the )?(gc|garbage)", fewer="gc_pauses"),
    _Topic("gc.freeze", "gc_pauses", r"gc|garbage \w+"),
    _Topic("copy.non_blocking", "blocking_copy pageable_copy", r"async\w* cop\w+"),
    _Topic("env.PYTORCH_CUDA_ALLOC_CONF", "fragmentation", "expandable segments", "expandable_segments:True"),
    _Topic("batch size", "memory_headroom", "batch(es)?( ?size)?", "", "out_of_memory allocator_retries", True, True),
    _Topic("checkpoints", "checkpoint_stall", r"checkpoint\w*|sav(e|ing)", fewer="checkpoint_stall", training=True),
    _Topic("validation", "validation_share", r"validat\w+|evaluat\w+", fewer="validation_share", training=True),
    _Topic("waits for the device", "host_sync", r"item|synchroni\w+|log(ging)?", fewer="host_sync"),
    _Topic("padding", "padding unequal_lengths", r"pad(ding|ded)?|by length", fewer="padding"),
    _Topic("sizes of products", "misaligned_shapes", r"multiples? of \d+"),
)
_SETTINGS = {o.name: o for o in OVERRIDES}
_ALL = (*_TOPICS, *(_Topic(name) for name in _SETTINGS if name not in {topic.what for topic in _TOPICS}))

_NOT = re.compile(r"\b(no|not|don t|without|disabl\w+|off|avoid|stop|remove|drop|false|never)\b")
_LESS = re.compile(r"\b(fewer|less|reduc\w+|lower|smaller|decreas\w+)\b")
_VARIABLE = re.compile(r"\b(?:env\.)?([A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+)=(\S+)")
_CLAUSE = re.compile(r"[,;\n]|\.\s|\band\b|\bbut\b|\bthen\b")
_GAIN = 1.02  # as `dlprof try` calls a gain
_MEASURED = ("gain", "no_gain", "slower")

# Values as advice and facts write them, and the facts that say what a job has where these have another name.
_SAME = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "nhwc": "channels_last"}
_FACTS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "model.memory_format": ("channels last", {"True": "channels_last", "False": "contiguous_format"}),
    "torch.autocast": ("autocast enabled", {"True": "", "False": "off"}),
    "torch.compile": ("compiled", {"True": "", "False": "off"}),
    "torch.float32_matmul_precision": ("float32 precision", {}),
    "torch.num_threads": ("cpu torch threads", {}),
}
# Beginnings of words that say nothing of what is advised.
_COMMON = {"the", "use", "for", "not", "with", "more", "less", "try", "shou", "each", "step", "time", "data", "you"}


def judge(text: str, run: Recorded) -> Advice:
    """Return what a run says of advice, clause by clause."""
    items: dict[str, Item] = {}
    unknown = []
    for clause in map(str.strip, _CLAUSE.split(plain(text, 2_000))):
        found = {item.what: item for item in _items(clause, run)}
        items = items | {what: item for what, item in found.items() if what not in items}
        unknown += [clause] if not found and _stems(clause) else []
    names = [*(o.setting for o in OVERRIDES), *(o.id for o in run.result.outcomes), *(one.name for one in IDIOMS)]
    words = [word for clause in unknown for word in (re.sub(r"\W+", "_", clause), *clause.split()) if len(word) > 3]
    near = dict.fromkeys(name for w in words for name in difflib.get_close_matches(w.lower(), names, 2, 0.7))
    return Advice(1, run.path, tuple(items.values()), tuple(unknown), tuple(near)[:6])


def _items(clause: str, run: Recorded) -> Iterator[Item]:
    variables = _VARIABLE.findall(clause)
    for name, value in variables:
        yield _item(_Topic(f"env.{name}"), value, "", run)
    said = " ".join(re.sub(r"[^a-z0-9.]|(?<!\d)\.|\.(?!\d)", " ", _VARIABLE.sub(" ", clause).lower()).split())
    left, known = said, bool(variables)
    for topic in _ALL:
        setting = _SETTINGS.get(topic.what)
        own = [re.sub("[_.]", " ", name) for name in (topic.what, setting.setting if setting else topic.what)]
        if at := re.search(rf"\b({'|'.join(filter(None, (*own, topic.words)))})\b", left):
            known, left = True, left[: at.start()] + "|" * len(at[0]) + left[at.end() :]
            value = _value(setting, topic.value, said, at.start()) if setting else topic.value or None
            yield _item(topic, value, said, run)
    if not known:
        yield from _by_words(said, run)


def _value(setting: Override, usual: str, said: str, at: int) -> Value | None:
    """Return the value that words give a setting that is named at a place in them; None: they give none."""
    options, negated = setting.values.split(", "), bool(_NOT.search(said))
    if "True" in options:
        text = str(not negated)
    elif usual:
        spoken = " ".join(_SAME.get(word, word) for word in said.split()).replace("_", " ")
        off = next((o for o in options if negated and o in ("off", "contiguous_format")), "")
        spoken_of = [o for o in options if re.search(rf"\b{re.sub('[_-]', ' ', o)}\b", spoken)]
        text = off or max(spoken_of, key=len, default=usual)
    else:
        numbers = re.findall(r"\b\d+(?:\.\d+)?", said[at:]) or re.findall(r"\b\d+(?:\.\d+)?", said[:at])[::-1]
        text = numbers[0] if numbers else "0" if negated else ""
    try:
        return setting.parse(text)
    except ValueError:
        return None


def _now(what: str, result: Result) -> str:
    """Return the value that a run has for a setting; "": not known."""
    name, values = _FACTS.get(what, (what.partition(".")[2].replace("_", " "), {}))
    facts = {fact.name.replace("_", " ").rpartition(".")[2]: fact.value for fact in result.facts}
    if what == "torch.autocast" and facts.get(name) == "True":
        return _SAME.get(facts.get("autocast dtype", ""), "")
    return values.get(facts.get(name, ""), facts.get(name, ""))


def _item(topic: _Topic, value: Value | None, said: str, run: Recorded) -> Item:
    what, result = topic.what, run.result
    setting, known = what.partition(".")[2], what in _SETTINGS or what.startswith("env.")
    now = _now(what, result) if known else ""
    said_less = bool(_LESS.search(said) or _NOT.search(said))
    less = bool(_is_less(str(value), now)) if _is_number(value) else said_less
    rules = (topic.fewer if less and topic.fewer else topic.rules).split()
    rules = rules or [o.id for o in result.outcomes if known and setting in o.manual]
    judging = sorted((o for o in result.outcomes if o.id in rules), key=lambda o: rules.index(o.id))
    settings: dict[str, Value] = {} if value is None or not known else {what: value}
    # Workers are tried together with keeping them.
    tries = [a for a in (result.tried.attempts if result.tried else ()) if a.verdict in _MEASURED]
    tries = [a for a in tries if {what} == a.settings.keys() - ({"loader.persistent_workers"} - {what})]
    tries = [a for a in tries if value is None or str(a.settings[what]) == str(value)]
    helps: Helps
    if value is not None and now == str(value):
        helps, why = "already", f"it is {now} in this run"
    elif tries:
        helps, why = ("yes" if tries[-1].verdict == "gain" else "no"), f"measured: {tried.row(tries[-1])}"
    else:
        helps, why = _predicted(topic, value, now, less, judging, run)
    at, diff = run.placed(settings) if settings else ("", "")
    return Item(
        what,
        helps,
        why.replace(NBSP, " "),
        value,
        now,
        judged=tuple(map(_judged, judging)),
        numerics=topic.numerics or bool(changes_numbers({what: value or ""})),
        training=topic.training,
        risk=_SETTINGS[what].risk if what in _SETTINGS else "",
        at=at or _seen(judging),
        diff=diff,
        measure="" if helps == "already" else _measure(what, settings, now, run),
    )


def _predicted(
    topic: _Topic, value: Value | None, now: str, less: bool, judging: list[Outcome], run: Recorded
) -> tuple[Helps, str]:
    """Return whether a change helps by the recording alone, and why. `less`: less of it is advised than there is."""
    what, step = topic.what, run.result.window.step_ns if run.result.window else 0.0
    forecasts = [f for o in run.result.outcomes for f in o.forecasts if f.setting == what.partition(".")[2]]
    fit = [f for f in forecasts if f.value == str(value) or (value is None and _is_less(f.value, now) is less)]
    if fit and step and (least := min(f.step_ns for f in fit)) > 0:
        best = next(f for f in fit if f.step_ns <= _GAIN * least)
        steps = f"{formatting.duration(best.step_ns)} instead of {formatting.duration(step)}"
        return ("yes" if step / best.step_ns > _GAIN else "no"), f"predicted with {best.value}: a step of {steps}"
    against = less and not topic.fewer
    found = [o for o in judging if o.state == "found"]
    for o in found:
        for to in [words[what] for change in o.changes if (words := run.named(change) or {}) and what in words]:
            same = str(value) == to or (value is None and _is_less(to, now) in (less, None))
            helps: Helps = "yes" if same else "no" if against or value is None else "perhaps"
            return helps, f"{o.id} advises {what}={to}: {formatting.gained(o)}"
    for o in found:
        sure: Helps = "no" if against else "perhaps" if what in _SETTINGS else "yes"
        return sure, f"{o.id} was found: {formatting.gained(o) if formatting.saves(o) else o.title}"
    if not judging:
        return "unknown", "no rule judges it"
    first = next((o for o in judging if o.state == "clear"), judging[0])
    no = first.state == "does_not_apply" or (first.state == "clear" and not topic.partly)
    return ("no" if no else "unknown"), f"{first.id}: {first.summary or first.why}"


def _is_number(value: object) -> bool:
    return re.fullmatch(r"\d+(\.\d+)?", str(value)) is not None


def _is_less(value: str, now: str) -> bool | None:
    """Return whether one number is below another; None: they are not numbers, or the same."""
    return float(value) < float(now) if _is_number(value) and _is_number(now) and value != now else None


def _by_words(said: str, run: Recorded) -> Iterator[Item]:
    """Yield the rule, or the way of writing a line, whose name and description share most words with advice."""
    asked = _stems(said)
    rules = {o.id: f"{o.title} {o.manual.partition(chr(10))[0]}" for o in run.result.outcomes}
    known = {**{one.name: f"{one.what} {one.remedy}" for one in IDIOMS}, **rules}
    shared = {name: len(asked & _stems(f"{name} {text}")) for name, text in known.items() if asked & _stems(name)}
    best = max(shared, key=lambda name: (shared[name], name in rules), default="")
    if not best or (shared[best] < 2 and not _stems(best) <= asked):
        return
    if best in rules:
        yield _item(_Topic(best, best, fewer=best), None, said, run)
        return
    idiom = next(one for one in IDIOMS if one.name == best)
    judges = "input_wait slow_worker_batches" if DATA[0] in idiom.doing else "costly_line step_python host_bound"
    judges = "slow_start" if START[0] in idiom.doing else judges
    item = _item(_Topic(best, judges, fewer=judges), None, said, run)
    seen = any(idiom.remedy in change.text for o in run.result.found for change in o.changes)
    sure: Helps = item.helps if seen or item.helps != "yes" else "perhaps"
    yield msgspec.structs.replace(item, helps=sure, why=f"{item.why}; {idiom.name}: {idiom.remedy}")


def _stems(text: str) -> set[str]:
    return {word[:4] for word in re.findall(r"[a-z0-9]{3,}", text.lower())} - _COMMON


def _judged(outcome: Outcome) -> Judged:
    says = formatting.gained(outcome) if formatting.saves(outcome) else outcome.summary or outcome.why
    speedup = round(min(outcome.speedup, 1e3), 4)
    return Judged(outcome.id, outcome.state, plain(says, 300).replace(NBSP, " "), speedup, outcome.at_most)


def _seen(judging: list[Outcome]) -> str:
    """Return the first line of the script that a finding names; "": none."""
    places = [p for o in judging for p in (*(c.at for c in o.changes if c.at), *o.where) if o.state == "found"]
    return next((plain(f"{p.file}:{p.line}", 200) for p in places if p.line), "")


def _measure(what: str, settings: Mapping[str, Value], now: str, run: Recorded) -> str:
    path, command = shlex.quote(run.path), run.result.run.command
    if not command:
        return "record the job first: dlprof wrap -o RUN COMMAND"
    if settings:
        words = " ".join(f"{name}={value}" for name, value in settings.items())
        allowed = " --allow-numerics" if changes_numbers(settings) else ""
        return f"dlprof try {path} --only --set {shlex.quote(words)}{allowed}"
    if what in _SETTINGS:
        least = 0 if "0" in _SETTINGS[what].values else 1
        n = (int(float(now)) if _is_number(now) else 1) or least
        values = sorted({max(n // 2, least), n, 2 * n or 1, 4 * n or 2})
        return f"dlprof sweep {what}={','.join(map(str, values))} -- {command_line(command)}"
    return f"make the change, then: dlprof wrap -o AFTER -- {command_line(command)}; dlprof compare {path} AFTER"


_ANSWERS: Mapping[Helps, str] = {
    "yes": "would help",
    "no": "would not help",
    "perhaps": "may help",
    "already": "is so already",
    "unknown": "not known whether it would help",
}


def render(advice: Advice) -> str:
    """Return advice that was judged as text."""
    lines = []
    for one in advice.items:
        named = f"{one.what}={one.value}" if one.value is not None else one.what
        lines += [f"{named}{f' (now {one.now})' if one.now else ''}: {_ANSWERS[one.helps]}", f"  {one.why}"]
        lines += [f"  rule {j.rule}: {j.state.replace('_', ' ')}: {j.says}" for j in one.judged]
        lines += ["  the job then computes other numbers"] if one.numerics else []
        lines += ["  the job then trains otherwise"] if one.training else []
        lines += [f"  {label}: {text}" for label, text in (("risk", one.risk), ("at", one.at)) if text]
        lines += [f"    {line}" for line in one.diff.splitlines()]
        lines += [f"  measure: {one.measure}"]
    lines += [f"not known: {clause}" for clause in advice.unknown]
    lines += [f"near: {', '.join(advice.near)}"] if advice.near else []
    return plain("\n".join(lines), keep="\n")
