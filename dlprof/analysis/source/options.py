"""The script's own options that do what a change does: a better remedy than an edit."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from msgspec.structs import replace

from dlprof.analysis.engine import JOB, Job, across_ranks, needs
from dlprof.analysis.source.patches import Call
from dlprof.result import Change, Setting

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


@dataclass(frozen=True)
class Option:
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
    for text in (source, f"{source} pass"):
        with suppress(SyntaxError, ValueError):
            given = [n.value for n in ast.walk(ast.parse(text)) if isinstance(n, ast.keyword) and n.arg == setting]
            return given[0].attr if len(given) == 1 and isinstance(given[0], ast.Attribute) else ""
    return ""


def _alike(setting: str, options: Sequence[Option], kind: str) -> Option | None:
    words = [*([setting.replace("_", "")] if "_" in setting else []), *_NAMES.get(setting, "").split()]
    of = {_bare(option.name): option for option in reversed(options)}
    return next((of[word] for word in words if word in of and _OF_TYPE.get(word, kind) == kind), None)


def _bare(name: str) -> str:
    return name.strip("-").replace("-", "").replace("_", "").lower().removeprefix("use").removeprefix("enable")
