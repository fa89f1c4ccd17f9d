"""The job of a recorded run: its command, working directory and environment, so that it can be started again.

Also here: try.json in the run folder, which is written and read here and added to the run's result.
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
from dlprof.result.tried import FILE, Attempt, Tried, from_json, to_json
from dlprof.units import few

_AGAIN = "give it after --: dlprof try RUN -- COMMAND"


@dataclass(frozen=True)
class Job:
    """A job that can be started again. `settings`: the overrides of its recording; `exit_code`: how it ended.

    `saves`: files that it wrote checkpoints to. `warnings`: differences from the recording. `started_s`: when it was
    recorded, Unix time; 0: not known.
    """

    command: tuple[str, ...]
    cwd: Path
    env: Mapping[str, str]
    settings: Mapping[str, Value]
    exit_code: int | None = None
    saves: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    started_s: float = 0.0


def refuse_inside(environ: Mapping[str, str]) -> None:
    """Raise DlprofError in a job that is recorded: what it starts would be recorded into the same run."""
    if environ.get("DLPROF_RUN"):
        raise DlprofError(f"this already runs under dlprof, which records into {environ['DLPROF_RUN']}")


def without_ours(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the variables of a recording."""
    return {name: value for name, value in environ.items() if not name.startswith("DLPROF_")}


def repeatable(run: Run, environ: Mapping[str, str], command: Sequence[str] = ()) -> Job:
    """Return the job of a run that was recorded on this host, with `command` instead of its own if given.

    Raises DlprofError, with what to do, if it cannot be started again.
    """
    recorded = _run_json(run)
    if recorded.get("tasks"):
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
    if recorded.get("cwd") is None and not command:
        raise DlprofError(f"{run.path}: does not say in which folder its command ran")
    cwd = Path(str(recorded.get("cwd") or Path.cwd()))
    if not cwd.is_dir():
        raise DlprofError(f"{cwd}: the folder in which the job ran is gone")
    env, warnings = _environment(run, environ)
    if shutil.which(words[0] if os.sep not in words[0] else str(cwd / words[0]), path=env.get("PATH")) is None:
        raise DlprofError(f"{words[0]}: the command that was recorded is not here; {_AGAIN}")
    here = os.uname().nodename
    if run.hosts and run.hosts[0] != here:
        warnings.append(f"it was recorded on {run.hosts[0]}, and is measured on {here}")
    overridden = (recorded.get("options") or {}).get("set")
    values = overridden.items() if isinstance(overridden, Mapping) else ()
    settings = {n: v for n, v in values if REDACTED not in str(v) and v != DROPPED}
    started_s = (run.start_ns or 0) / 1e9
    return Job(words, cwd, env, settings, run.exit.get("code"), _saves(run), tuple(warnings), started_s)


def _run_json(run: Run) -> Mapping[str, Any]:
    try:
        return facts.read(run.path / "run.json", facts.RUN).facts
    except DlprofError:
        raise DlprofError(f"{run.path}: no run that `dlprof wrap` or `dlprof run` recorded") from None


def _saves(run: Run) -> tuple[str, ...]:
    """Return the files that rank 0 saved checkpoints to, each once."""
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


def _environment(run: Run, environ: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Return this environment with the recorded variables, and warnings about those that are not known.

    Only variables that affect training are recorded, for each rank. Those that differ between ranks were set by the
    launcher, and are left out.
    """
    env = without_ours(environ)
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
    """Write try.json into a run folder; raise DlprofError if it cannot be written."""
    with writing(str(folder / FILE)):
        write(folder / FILE, compact(to_json(tried)))


def kept(path: Path) -> Tried | None:
    """Read try.json of a run; None if there is none. Raises DlprofError if it is broken."""
    if not path.is_dir() or not Inside(path).holds(path / FILE):
        return None
    try:
        return from_json(json.loads(read_file(path / FILE)))
    except (ValueError, RecursionError) as e:
        raise DlprofError(f"{path / FILE} is broken ({str(e)[:120]})") from None


def merged(before: Tried | None, now: Tried) -> Tried:
    """Return what was tried before and now: of the same settings the later result, unless it is of fewer pairs."""
    if before is None:
        return now
    attempts = _later(before.attempts, now.attempts)
    lost = [a.settings for a in attempts if a.verdict != "gain"]
    bests = _later(*(() if b is None or b.settings in lost else (b,) for b in (before.best, now.best)))
    return replace(
        now,
        attempts=attempts,
        combinations=_later(before.combinations, now.combinations),
        best=max(bests, key=lambda b: b.measured.ratio if b.measured else 0.0, default=None),
        runs=before.runs + now.runs,
        seconds=before.seconds + now.seconds,
        warnings=tuple(dict.fromkeys((*before.warnings, *now.warnings))),
    )


def _later(before: Sequence[Attempt], now: Sequence[Attempt]) -> tuple[Attempt, ...]:
    found = {(*sorted(a.settings.items()), a.edit): a for a in before}
    for a in now:
        key = (*sorted(a.settings.items()), a.edit)
        same = found.get(key)
        if same is None or _pairs(a) >= _pairs(same):
            found[key] = replace(a, losses=a.losses or same.losses) if same else a
    return tuple(found.values())


def _pairs(attempt: Attempt) -> int:
    return attempt.measured.pairs if attempt.measured else 0


def with_tried(result: Result, path: Path) -> Result:
    """Return a run's result with its try.json; with a warning if that is broken."""
    try:
        tried = kept(path)
    except DlprofError as e:
        return replace(result, run=replace(result.run, warnings=(*result.run.warnings, str(e))))
    return result if tried is None else added(result, tried)


def added(result: Result, tried: Tried) -> Result:
    """Return a result with what was tried, and its changes with what each of them gained."""
    from dlprof.analysis.proposals import with_tried
    from dlprof.trial.planning import values_of

    changes = with_tried(result.changes, tried, [values_of(one.change) for one in result.changes])
    return replace(result, tried=tried, changes=tuple(changes))
