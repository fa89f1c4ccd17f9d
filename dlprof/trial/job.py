"""The job of a recorded run, as far as it can be started again: command, working directory and environment.

try.json of a run folder: written, and added to the result of that run.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from dlprof.analysis.engine import RankData
from dlprof.errors import DlprofError, NotMeasured
from dlprof.files import compact, write, writing
from dlprof.overrides import Value
from dlprof.plain import command_line, plain
from dlprof.read import facts
from dlprof.read.opening import Inside, read_file
from dlprof.read.run import Run
from dlprof.redaction import DROPPED, REDACTED, VARIABLES
from dlprof.result import Result
from dlprof.result.tried import FILE, Tried, from_json, to_json
from dlprof.units import few

_AGAIN = "give it after --: dlprof try RUN -- COMMAND"


@dataclass(frozen=True)
class Job:
    """What is started again: `settings` are the overrides that it was recorded with, `exit_code` is what it ended with.

    `saves`: files that the recording saw it write checkpoints to. `warnings`: what differs from how it was recorded.
    """

    command: tuple[str, ...]
    cwd: Path
    env: Mapping[str, str]
    settings: Mapping[str, Value]
    exit_code: int | None = None
    saves: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def repeatable(run: Run, environ: Mapping[str, str], command: Sequence[str] = ()) -> Job:
    """Return the job of a run that was recorded on this host, with another command where one is given.

    Raises DlprofError, with what to do, where it cannot be started again.
    """
    told = _told(run)
    if told.get("tasks"):
        raise DlprofError(
            f"{run.path}: its tasks were started one by one (srun, mpirun, --job): run it again with --set"
        )
    if len(run.hosts) > 1:
        raise DlprofError(
            f"{run.path}: the job ran on {len(run.hosts)} hosts, and only this one could be started again"
        )
    words = tuple(command) or run.command
    if not words:
        raise DlprofError(f"{run.path}: holds no command; {_AGAIN}")
    if any(REDACTED in word or DROPPED in word for word in words):
        raise DlprofError(
            f"{run.path}: not all of its command was recorded ({plain(command_line(words), 200)}); {_AGAIN}, or record"
            " it with --keep-arguments"
        )
    if told.get("cwd") is None and not command:
        raise DlprofError(f"{run.path}: does not say in which folder its command ran")
    cwd = Path(str(told.get("cwd") or Path.cwd()))
    if not cwd.is_dir():
        raise DlprofError(f"{cwd}: the folder in which the job ran is gone")
    env, warnings = _environment(run, environ)
    if shutil.which(words[0] if os.sep not in words[0] else str(cwd / words[0]), path=env.get("PATH")) is None:
        raise DlprofError(f"{words[0]}: the command that was recorded is not here; {_AGAIN}")
    here = os.uname().nodename
    if run.hosts and run.hosts[0] != here:
        warnings.append(f"it was recorded on {run.hosts[0]}, and is measured on {here}")
    asked = _mapping((told.get("options") or {}).get("set"))
    settings = {n: v for n, v in asked.items() if REDACTED not in str(v) and v != DROPPED}
    return Job(words, cwd, env, settings, run.exit.get("code"), _saves(run), tuple(warnings))


def _told(run: Run) -> Mapping[str, Any]:
    try:
        return facts.read(run.path / "run.json", facts.RUN).facts
    except DlprofError:
        raise DlprofError(f"{run.path}: no run that `dlprof wrap` or `dlprof run` recorded") from None


def _saves(run: Run) -> tuple[str, ...]:
    """Return the files that the ranks were seen to save to, each once."""
    found: dict[str, None] = {}
    for rank in run.ranks[:1]:
        if "stalls" not in rank.files:
            continue
        try:
            stalls = RankData(rank).table("stalls")
        except NotMeasured:
            continue
        paths = stalls.loc[(stalls["kind"] == "checkpoint").to_numpy(), "path"].dropna()
        found.update(dict.fromkeys(str(path) for path in paths if str(path)))
    return tuple(found)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _environment(run: Run, environ: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Return this environment with the variables as they were recorded, and what could not be made so.

    Of the environment only the variables that affect training are recorded, as each rank saw them: what differs from
    rank to rank was its launcher's.
    """
    env = {name: value for name, value in environ.items() if not name.startswith("DLPROF_")}
    seen = [rank.facts["env"] for rank in run.ranks if isinstance(rank.facts.get("env"), Mapping)]
    if not seen:
        return env, ["the environment that it was recorded in is not known: it runs in this one"]
    lost = []
    for name in sorted(VARIABLES):
        values = {of.get(name) for of in seen}
        if name.startswith("SLURM") or len(values) > 1:
            continue
        (value,) = values
        if isinstance(value, str) and REDACTED in value:
            lost.append(name)
        elif isinstance(value, str):
            env[name] = value
        else:
            env.pop(name, None)
    return env, [f"not recorded, and taken from this environment: {few(lost, 8)}"] if lost else []


def keep(folder: Path, tried: Tried) -> None:
    """Write what was tried into a run folder; raise DlprofError where it takes no file."""
    with writing(str(folder / FILE)):
        write(folder / FILE, compact(to_json(tried)))


def kept(path: Path) -> Tried | None:
    """Return what was tried on a run; None where nothing was. Raises DlprofError where the file says nothing."""
    if not path.is_dir() or not Inside(path).holds(path / FILE):
        return None
    try:
        return from_json(json.loads(read_file(path / FILE)))
    except (ValueError, RecursionError) as e:
        raise DlprofError(f"{path / FILE} is broken ({str(e)[:120]})") from None


def with_tried(result: Result, path: Path) -> Result:
    """Return a run's result with what was tried on it; where try.json says nothing, with a warning."""
    try:
        tried = kept(path)
    except DlprofError as e:
        return replace(result, run=replace(result.run, warnings=(*result.run.warnings, str(e))))
    return result if tried is None else replace(result, tried=tried)
