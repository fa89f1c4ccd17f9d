"""`dlprof wrap`: records any existing script or launcher command, unedited, and ends as it ends."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import click

from dlprof import overrides
from dlprof.errors import DlprofError
from dlprof.plain import plain
from dlprof.record.launch.folder import new_folder
from dlprof.record.launch.supervisor import Ended, end_like, supervise
from dlprof.record.launch.tasks import TASK_NUMBERS
from dlprof.record.launch.unapplied import outcomes
from dlprof.record.redaction import shown

# Enough for shares of a few per cent after one burst; a round number would beat with steps of 5, 10 or 20 ms.
STACKS_A_SECOND = "47"

_AS_IS = "dlprof.as_is"  # in the context's meta: a `--` stood before the command


class _Wrap(click.Command):
    """Takes its own options up to the first word that is none; everything after that is the script's."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        takes_value = {o for p in self.params if isinstance(p, click.Option) and not p.is_flag for o in p.opts}
        at = 0
        while at < len(args) and args[at].startswith("-") and args[at] != "--" and not args[at].startswith("-m"):
            at += 2 if args[at] in takes_value else 1
        rest = args[at:]
        ctx.meta[_AS_IS] = rest[:1] == ["--"]
        return super().parse_args(ctx, [*args[:at], "--", *(rest[1:] if ctx.meta[_AS_IS] else rest)])


# The types of options: each returns the value as it is kept, or raises BadParameter, which is a usage error.


def _window(value: str) -> str:
    try:
        skip, warmup, active = (int(part) for part in value.split(","))
    except ValueError:
        raise click.BadParameter("three whole numbers: steps to skip, to warm up, to trace, e.g. 10,2,5") from None
    if min(skip, warmup) < 0 or active < 1:
        raise click.BadParameter("at least one step to trace, and no negative numbers")
    return f"{skip},{warmup},{active}"


def _function(value: str) -> str:
    where, _, name = value.rpartition(":")
    if value != "auto" and not (where and all(part.isidentifier() for part in name.split("."))):
        raise click.BadParameter(f"{value!r} is neither MODULE:FUNCTION nor auto")
    return value


def _stacks(value: str) -> str:
    if value in ("on", "off"):
        return STACKS_A_SECOND if value == "on" else value
    if not value.isdigit() or not 1 <= int(value) <= 1000:
        raise click.BadParameter("on, off, or how many stacks a second, 1 to 1000")
    return str(int(value))


def _sample(value: str) -> str:
    with contextlib.suppress(ValueError):
        if value == "auto" or 0.1 <= float(value) <= 3600:
            return value if value == "auto" else f"{float(value):g}"
    raise click.BadParameter("auto, or the seconds between two readings, 0.1 to 3600")


def _setting(value: str) -> str:
    try:
        overrides.parse([value])
    except DlprofError as e:
        raise click.BadParameter(str(e)) from None
    return value


def _job(value: str) -> str:
    if not all(c.isalnum() or c in "._-" for c in value):
        raise click.BadParameter("letters, digits, dots, hyphens and underscores")
    return value


@dataclass(frozen=True)
class Recording:
    """The options of a command that records, a field each."""

    out: Path | None
    job: str
    window: str
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
    quiet: bool
    no_report: bool
    tries: bool

    def check(self) -> None:
        """Raise a usage error where options exclude each other."""
        changing = overrides.changes_numbers(self.overrides)
        if changing and not self.allow_numerics:
            raise click.UsageError(
                f"--set {changing[0]}: the job then computes other numbers; --allow-numerics allows that"
            )
        if self.tries and self.no_report:
            raise click.UsageError("--try tries what the report advises, and --no-report makes none")

    @property
    def overrides(self) -> dict[str, overrides.Value]:
        """The settings to override, by name."""
        return overrides.parse(self.settings)

    def check(self) -> None:
        """Raise a usage error where options exclude each other."""
        try:
            overrides.parse(self.settings)
        except DlprofError as e:
            raise click.UsageError(str(e)) from None
        changing = overrides.changes_numbers(self.overrides)
        if changing and not self.allow_numerics:
            raise click.UsageError(
                f"--set {changing[0]}: the job then computes other numbers; --allow-numerics allows that"
            )

    @property
    def overrides(self) -> dict[str, overrides.Value]:
        """The settings to override, by name."""
        return overrides.parse(self.settings)

    @property
    def asked(self) -> dict[str, str]:
        """What collectors and samplers read, as DLPROF_<NAME> in their environment; also kept in run.json."""
        return {
            "job": self.job,
            "flops": self.flops,
            "lines": "\n".join(self.lines),
            "sample": "off" if self.no_sample else self.sample,
            "stacks": self.stacks,
            "memory": "on" if self.memory else "off",
            "nvtx": "on" if self.nvtx or self.nsys else "off",
            "shapes": "on" if self.shapes else "off",
            "window": "off" if self.no_trace else "nsys" if self.nsys else self.window,
        }

    def environment(self, env: Mapping[str, str]) -> dict[str, str]:
        """Return the environment for the command: with the options, and the variables that are overridden."""
        asked = {f"DLPROF_{name.upper()}": value for name, value in self.asked.items()}
        if not self.settings:
            return {**env, **asked}
        variables = {n.partition(".")[2]: str(v) for n, v in self.overrides.items() if n.startswith("env.")}
        told = {"set": self.overrides, "environment": {name: env.get(name) for name in variables}}
        return {**env, **variables, **asked, "DLPROF_SET": json.dumps(told)}


def _flag(name: str, help: str) -> Callable[..., Any]:  # noqa: A002 - click's name
    return click.option(name, is_flag=True, help=help)


def _value(name: str, parse: Callable[[str], str], default: str, metavar: str, help: str) -> Callable[..., Any]:  # noqa: A002
    return click.option(name, type=parse, default=default, show_default=bool(default), metavar=metavar, help=help)


_OPTIONS = (
    click.option("-o", "--out", type=click.Path(path_type=Path), help="The run folder [default: a new one in runs/]."),
    _value(
        "--job",
        _job,
        "",
        "NAME",
        "Record into one folder with all that give this name: for a job that is started host by host, on a disk that"
        " the hosts share. Tasks of srun and mpirun need none.",
    ),
    _value("--window", _window, "10,2,5", "S,W,A", "Steps to skip, to warm up and to trace."),
    _flag("--no-trace", "The step log only: no profiler window."),
    click.option(
        "--flops",
        type=click.Choice(["auto", "on", "off"]),
        default="auto",
        show_default=True,
        help="Count what one un-timed step computes: where that is tried and safe, elsewhere too, or never.",
    ),
    click.option(
        "--lines",
        multiple=True,
        type=_function,
        metavar="MODULE:FUNCTION",
        help="Time a function line by line, in the ranks and in loader workers: package.data:Images.__getitem__,"
        " path/to/file.py:function, __main__:function; auto: the hottest functions of your own files. Repeatable."
        " Slows these functions.",
    ),
    _flag(
        "--shapes",
        "Trace the shapes that operators meet: each then has its own time in the report. Slows the traced steps.",
    ),
    _value(
        "--stacks",
        _stacks,
        "on",
        "on|off|RATE",
        f"Read the Python stacks of ranks and loader workers with py-spy: in bursts, {STACKS_A_SECOND} or RATE times a"
        " second, without stopping them.",
    ),
    _flag("--memory", "Record the history of the CUDA allocator, for pytorch.org/memory_viz. Slows every allocation."),
    _flag("--nsys", "Run the command under NVIDIA's nsys, with NVTX ranges and without the profiler window."),
    _flag("--nvtx", "Name steps, phases and collectives as NVTX ranges, for an nsys that you run yourself."),
    _value(
        "--sample",
        _sample,
        "auto",
        "auto|SECONDS",
        "How often to sample the host and its GPUs; auto: every second, and ever less often as the job grows older,"
        " down to every 5.",
    ),
    _flag("--no-sample", "Start no sampling process: no samples of host, GPUs and stacks."),
    click.option(
        "--set",
        "settings",
        multiple=True,
        type=_setting,
        metavar="NAME=VALUE",
        help="Override a setting as the script builds its objects, without editing it: loader.num_workers=4."
        " Repeatable. `dlprof explain settings` lists them.",
    ),
    _flag("--allow-numerics", "Let --set take settings with which the job computes other numbers."),
    _flag("--quiet", "Print nothing but warnings and errors."),
    _flag("--no-report", "Record only."),
    click.option(
        "--try",
        "tries",
        is_flag=True,
        help="Then run the command again and again, for ten minutes at most, with what the report advises, and measure"
        " what that gains, as `dlprof try` does.",
    ),
)


def recording_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of every command that records, gathered into its argument `recording`."""

    @functools.wraps(command)
    def gathered(**options: Any) -> None:
        recording = Recording(**{f.name: options.pop(f.name) for f in fields(Recording)})
        recording.check()
        command(recording=recording, **options)

    for option in reversed(_OPTIONS):
        gathered = option(gathered)
    return gathered


@click.command(
    cls=_Wrap,
    options_metavar="[OPTIONS]",
    context_settings={"allow_interspersed_args": False},
    short_help="Record any script or launcher command, unedited.",
)
@recording_options
@click.argument(
    "command",
    nargs=-1,
    required=True,
    type=click.UNPROCESSED,
    metavar="(SCRIPT.py | -m PACKAGE | -- COMMAND) [ARGS]...",
)
@click.pass_context
def wrap(ctx: click.Context, recording: Recording, command: tuple[str, ...]) -> None:
    """Record a training script, unedited, and print where its time goes.

    \b
    dlprof wrap train.py --lr 0.1
    dlprof wrap -m package.train --lr 0.1
    dlprof wrap -- torchrun --nproc-per-node 4 train.py --lr 0.1

    A script or -m package runs under the Python that runs dlprof; after --, any command runs as it is. Nothing after
    the script's name is an option of ours. Exit status, signals, stdin and stdout are the script's own; dlprof prints
    on stderr.
    """  # noqa: D301 - \b keeps these lines apart in click's help
    words = list(command)
    python = not ctx.meta.get(_AS_IS) and (words[0].startswith("-m") or words[0].endswith(".py"))
    record([sys.executable, *words] if python else words, recording, name=_name(words), env=os.environ)


def record(
    command: Sequence[str],
    recording: Recording,
    *,
    name: str,
    env: Mapping[str, str],
    options: Mapping[str, str] | None = None,
) -> None:
    """Run the command, record it, print the verdict on stderr, and end this process as the command ended.

    Raises DlprofError, before the command starts, where the run folder cannot be made or a recording already runs.
    """
    if env.get("DLPROF_RUN"):
        raise DlprofError(f"this already runs under dlprof, which records into {env['DLPROF_RUN']}; wrap only once")
    launcher = _nsys(env) if recording.nsys else ()
    asked = recording.asked
    env = recording.environment(env)
    folder = recording.out if recording.out is not None else new_folder(name, env)
    if not recording.quiet:
        _say(f"dlprof: recording into {folder}")
    with _undisturbed():
        ended = supervise(command, folder, env, {**asked, **(options or {})}, launcher, recording.overrides)
        for warning in ended.warnings:
            _say(f"dlprof: {warning}")
        if not recording.quiet:
            _say_applied(folder, recording)
    if not recording.no_report and ended.last and any(folder.glob("ranks/*/facts.json")):
        _report(ended, recording.quiet)
        if recording.tries and ended.signal is None:
            _try(ended, recording)
    end_like(ended)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Let no Ctrl-C cost the command its exit status: while it runs a Ctrl-C is its own, and afterwards too late."""
    # An ignored one stays so: the command inherits that.
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if ours:
        signal.signal(signal.SIGINT, lambda _number, _frame: None)
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _say_applied(folder: Path, recording: Recording) -> None:
    """Say what each override did that took effect; those that did not are among the warnings."""
    asked = {name: shown(name, value) for name, value in recording.overrides.items()}
    for name, outcome in outcomes(folder, asked).items() if asked else ():
        if outcome.applied and not outcome.error:
            _say(f"dlprof: {name} {overrides.described(asked[name], outcome)}")


def _report(ended: Ended, quiet: bool) -> None:
    """Write the report and print its verdict; whatever goes wrong here costs one line, and never the exit status."""
    try:
        from dlprof.commands.report import write_report

        verdict = write_report(ended.folder)
        if not quiet:
            _say(verdict, "\n\x1b")
    except KeyboardInterrupt:
        _say(f"dlprof: report stopped; to make it later: dlprof report {ended.folder}")
    except Exception as e:  # noqa: BLE001 - the job's exit status comes first
        _say(f"dlprof: no report: {e if isinstance(e, DlprofError) else f'{type(e).__name__}: {e}'}")


def _try(ended: Ended, recording: Recording) -> None:
    """Try what the report advises; whatever goes wrong here costs one line, and never the exit status."""
    try:
        from dlprof.commands.report import analyse
        from dlprof.commands.try_ import try_run
        from dlprof.trial.trying import Options

        options = Options(allow_numerics=recording.allow_numerics)
        try_run(ended.folder, analyse(ended.folder), options, quiet=recording.quiet, err=True)
    except KeyboardInterrupt:
        _say(f"dlprof: trial stopped; to make it later: dlprof try {ended.folder}")
    except Exception as e:  # noqa: BLE001 - the job's exit status comes first
        _say(f"dlprof: not tried: {e if isinstance(e, DlprofError) else f'{type(e).__name__}: {e}'}")


def _nsys(env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the words that start a command under nsys; "{}" is the folder that its report goes to.

    Raises DlprofError where there is no nsys: it was asked for, and something else would be recorded without it.
    """
    command = shutil.which("nsys", path=env.get("PATH"))
    if command is None:
        raise DlprofError("--nsys: no nsys on the PATH; install NVIDIA Nsight Systems, or record without --nsys")
    # Tasks of one job on one host each have an nsys of their own.
    task = next((f"-{env[name]}" for name in TASK_NUMBERS if env.get(name)), "")
    return (
        *(command, "profile", "--trace=cuda,nvtx,osrt,cudnn,cublas"),
        # py-spy samples Python; nsys' own sampling of the cores slows the job, and 2022.4 may not end with it.
        *("--sample=none", "--cpuctxsw=none"),
        "--wait=primary",  # with "all", nsys 2022.4 does not end even where the command left nothing
        "--kill=none",  # the end of a recording ends nobody
        "--force-overwrite=true",
        f"--output={{}}/nsys{task}",
    )


def _say(text: str, keep: str = "") -> None:
    """Print on stderr; a reader that has gone (2>&1 | head) must not cost the job its exit status."""
    with contextlib.suppress(OSError):
        click.echo(plain(text, keep=keep), err=True)


def _name(words: Sequence[str]) -> str:
    """Name a run after what runs: the script where one is named, else the command."""
    script = next((w for w in words if w.endswith(".py")), None)
    if script is None and words[0].startswith("-m"):
        script = words[0][2:] or (words[1] if len(words) > 1 else "python")
    stem = Path(script or words[0]).stem if script is None or script.endswith(".py") else script
    return "".join(c if c.isalnum() or c in "._-" else "_" for c in stem) or "run"
