"""The options of every command that records: `wrap` and `run`."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import click

from dlprof import nsys, overrides
from dlprof.commands import out, rarely
from dlprof.errors import DlprofError
from dlprof.record.launch import options


def _setting(value: str) -> str:
    overrides.parse([value])
    return value


def _job(value: str) -> str:
    if not all(c.isalnum() or c in "._-" for c in value):
        raise ValueError("letters, digits, dots, hyphens and underscores")
    return value


def checked_by(check: Callable[[str], str]) -> Callable[[str], str]:
    """Return an option type from a check; its errors become usage errors."""

    def checked(value: str) -> str:
        try:
            return check(value)
        except (DlprofError, ValueError) as e:
            raise click.BadParameter(str(e)) from None

    return checked


@dataclass(frozen=True, kw_only=True)
class Recording:
    """The options of a command that records, a field each."""

    out: Path | None = None
    local: str = ""
    job: str = ""
    window: str
    ranks: str
    no_trace: bool
    flops: str
    lines: tuple[str, ...]
    memory: bool
    nsys: bool
    nvtx: bool
    shapes: bool
    stacks: str
    sample: str
    no_sample: bool
    settings: tuple[str, ...]  # to override, NAME=VALUE
    allow_numerics: bool
    keep_arguments: bool = False
    no_sources: bool = False
    losses: str = ""
    stop_after: str = ""
    hang: str = "auto"
    metrics: str = ""
    quiet: bool
    no_report: bool
    tries: bool = False

    def check(self) -> None:
        """Raise a usage error where options exclude each other."""
        try:
            changing = overrides.changes_numbers(self.overrides)
        except DlprofError as e:
            raise click.UsageError(str(e)) from None
        if changing and not self.allow_numerics:
            raise click.UsageError(
                f"--set {changing[0]}: the job then computes other numbers; --allow-numerics allows that"
            )
        if self.nsys and self.ranks != "all":
            raise click.UsageError("--nsys records every process that it starts: --ranks is for dlprof's own traces")
        if self.tries and self.no_report:
            raise click.UsageError("--try tries what the report advises, and --no-report makes none")

    @property
    def overrides(self) -> dict[str, overrides.Value]:
        """The settings to override, by name."""
        return overrides.parse(self.settings)

    @property
    def asked(self) -> dict[str, str]:
        """What collectors and samplers read, as DLPROF_<NAME> in their environment; also kept in run.json."""
        return options.asked(
            job=self.job,
            flops=self.flops,
            hang=self.hang,
            keep_arguments=self.keep_arguments,
            lines=self.lines,
            local=self.local,
            losses=self.losses,
            memory=self.memory,
            metrics=self.metrics,
            nvtx=self.nvtx or self.nsys,
            sample="off" if self.no_sample else self.sample,
            shapes=self.shapes,
            sources="off" if self.no_sources else "on",
            stacks=self.stacks,
            stop_after=self.stop_after,
            # Without a GPU nothing opens nsys' window, so nsys records the whole job.
            capture=(self.window or "on") if self.nsys and not self.no_trace and nsys.has_gpu() else "",
            ranks=self.ranks,
            window="off" if self.no_trace else "nsys" if self.nsys else self.window,
        )

    @property
    def words(self) -> list[str]:
        """The same as words on a command line, without options at their defaults."""
        found = []
        for field in fields(self):
            value, option = getattr(self, field.name), _NAMES.get(field.name, "--" + field.name.replace("_", "-"))
            if value is True:
                found.append(option)
            elif isinstance(value, tuple):
                found += [word for one in value for word in (option, one)]
            elif value and value != _DEFAULTS.get(field.name):
                found += [option, str(value)]
        return found

    def environment(self, env: Mapping[str, str]) -> dict[str, str]:
        """Return the environment for the command: with the options, and the variables that are overridden."""
        requested = options.variables(self.asked)
        if not self.settings:
            return {**env, **requested}
        variables = {n.partition(".")[2]: str(v) for n, v in self.overrides.items() if n.startswith("env.")}
        replaced = {"set": self.overrides, "environment": {name: env.get(name) for name in variables}}
        return {**env, **variables, **requested, "DLPROF_SET": json.dumps(replaced)}


def _flag(name: str, help: str) -> Callable[..., Any]:  # noqa: A002 - click's name
    return click.option(name, is_flag=True, help=help)


def _value(name: str, check: Callable[[str], str], default: str, metavar: str, help: str) -> Callable[..., Any]:  # noqa: A002
    return click.option(
        name, type=checked_by(check), default=default, show_default=bool(default), metavar=metavar, help=help
    )


_OPTIONS = {
    "out": out("The run folder; %j, %a and the like as in srun [default: a new one in runs/]."),
    "local": _value(
        "--local",
        options.folder,
        "",
        "DIR",
        "Record on a disk of each node, such as '$TMPDIR', and put it all into the run folder when the node's command"
        " has ended.",
    ),
    "job": _value(
        "--job",
        _job,
        "",
        "NAME",
        "Record into one folder with all that give this name: for a job that is started host by host, on a disk that"
        " the hosts share. Tasks of srun and mpirun need none.",
    ),
    "window": _value(
        "--window",
        options.window,
        "",
        "S,W,A",
        "Steps to skip, to warm up and to trace [default: 10,2,5; sooner and fewer where steps are slow].",
    ),
    "ranks": _value(
        "--ranks",
        options.ranks,
        "all",
        "RANKS",
        "Which ranks record a trace in the window: all; 0,1,last; 0-7; per-host, the first of each host; per-stage, one"
        " of each pipeline stage. All else is recorded of every rank.",
    ),
    "no_trace": _flag("--no-trace", "The step log only: no profiler window."),
    "flops": click.option(
        "--flops",
        type=click.Choice(["auto", "on", "off"]),
        default="auto",
        show_default=True,
        help="Count what one un-timed step computes: where that is tried and safe, elsewhere too, or never.",
    ),
    "lines": click.option(
        "--lines",
        multiple=True,
        type=checked_by(options.function),
        metavar="MODULE:FUNCTION",
        help="Time a function line by line, in the ranks and in loader workers: package.data:Images.__getitem__,"
        " path/to/file.py:function, __main__:function; auto: the hottest functions of your own files. Repeatable."
        " Slows these functions.",
    ),
    "shapes": _flag(
        "--shapes",
        "Trace the shapes that operators meet: each then has its own time in the report. Slows the traced steps.",
    ),
    "stacks": _value(
        "--stacks",
        options.stacks,
        "on",
        "on|off|RATE",
        f"Read the Python stacks of ranks and loader workers with py-spy: in bursts, {options.STACKS_A_SECOND} or RATE"
        " times a second, without stopping them.",
    ),
    "memory": _flag(
        "--memory", "Record the history of the CUDA allocator, for pytorch.org/memory_viz. Slows every allocation."
    ),
    "nsys": _flag(
        "--nsys",
        "Record the window with NVIDIA's nsys instead of torch.profiler, with NVTX ranges; with --no-trace, all of the"
        " job.",
    ),
    "nvtx": _flag("--nvtx", "Name steps, phases and collectives as NVTX ranges, for an nsys that you run yourself."),
    "sample": _value(
        "--sample",
        options.sample,
        "auto",
        "auto|off|SECONDS",
        "How often to sample the host and its GPUs; auto: every second, and ever less often as the job grows older,"
        " down to every 5.",
    ),
    "no_sample": _flag("--no-sample", "Start no sampling process: no samples of host, GPUs and stacks."),
    "settings": click.option(
        "--set",
        "settings",
        multiple=True,
        type=checked_by(_setting),
        metavar="NAME=VALUE",
        help="Override a setting as the script builds its objects, without editing it: loader.num_workers=4."
        " Repeatable. `dlprof explain settings` lists them.",
    ),
    "allow_numerics": _flag("--allow-numerics", "Let --set take settings with which the job computes other numbers."),
    "keep_arguments": _flag(
        "--keep-arguments",
        "Record the whole command, but for what is named like a secret. Without it: the script, the names of options,"
        " and values that are numbers or known settings.",
    ),
    "no_sources": _flag(
        "--no-sources",
        "Keep no copy of the script's own files, by which `dlprof compare` tells whether they changed.",
    ),
    "losses": _value(
        "--losses",
        options.losses,
        "",
        "SEED|on",
        "Record the loss of each step of each rank, and seed Python's random, numpy and torch with SEED before the"
        " script does (on: leave them). The host waits for the device in each step.",
    ),
    "stop_after": _value(
        "--stop-after",
        options.stop_after,
        "",
        "N|TIME",
        "End the job, as by SIGTERM, after so many training steps and the trace window (40), or after a time (90s, 5m,"
        " '60s of training'); the exit status is then 0.",
    ),
    "hang": _value(
        "--hang",
        options.hang,
        "auto",
        "auto|off|SECONDS",
        "Say once why the job stands still, when no rank has ended a step for so long; auto: for 20 of its steps, and a"
        " minute at least.",
    ),
    "metrics": _value(
        "--metrics",
        options.metrics,
        "",
        "ADDRESS",
        "Serve the figures of the job for Prometheus at HOST:PORT (:9400: to this host alone), or push them by OTLP to"
        " otlp://HOST[:PORT].",
    ),
    "quiet": _flag("--quiet", "Print nothing but warnings and errors."),
    "no_report": _flag("--no-report", "Record only."),
    "tries": click.option(
        "--try",
        "tries",
        is_flag=True,
        help="Then run the command again and again, for ten minutes at most, with what the report advises, and measure"
        " what that gains, as `dlprof try` does.",
    ),
}
_USUAL = ("out", "settings", "tries")  # what --help shows
_NAMES = {"settings": "--set", "tries": "--try"}
_DEFAULTS = {"ranks": "all", "flops": "auto", "stacks": options.STACKS_A_SECOND, "sample": "auto", "hang": "auto"}


def recording_options(command: Callable[..., None], without: Collection[str] = ()) -> Callable[..., None]:
    """Give a command the options of every command that records, gathered into its argument `recording`.

    `without`: fields that it has no options for.
    """

    @functools.wraps(command)
    def gathered(**options: Any) -> None:
        recording = Recording(**{name: options.pop(name) for name in _OPTIONS if name not in without})
        recording.check()
        command(recording=recording, **options)

    names = sorted((name for name in _OPTIONS if name not in without), key=lambda name: name not in _USUAL)
    for name in reversed(names):
        gathered = _OPTIONS[name](gathered)
        gathered = gathered if name in _USUAL else rarely(gathered)
    return gathered
