"""`dlprof wrap`: records any existing script or launcher command, unedited, and ends as it ends."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shlex
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import click

from dlprof import nsys, redaction
from dlprof.commands.recording import Recording, recording_options
from dlprof.errors import DlprofError, RefusedError
from dlprof.plain import plain, words_of
from dlprof.record.launch.child import deaf
from dlprof.record.launch.folder import RunFolder, number_of, opened, task_of
from dlprof.record.launch.supervisor import applied, end_like, must_be_linux, supervise, unrecorded
from dlprof.record.launch.watching import kill
from dlprof.record.ranks import local_rank
from dlprof.redaction import shown
from dlprof.run_folder import recorded
from dlprof.units import count, few

_OTHERS_END_S = 10.0  # that a launcher's other tasks have to end, when one was ended by a signal

_AS_IS = "dlprof.as_is"  # in the context's meta: there was a `--` before the command


class OfScript(click.Command):
    """Parses its own options up to the first word that is no option; the rest belongs to the script."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Keep the words of the script, and whether there was a `--` before them."""
        takes_value = {o for p in self.params if isinstance(p, click.Option) and not p.is_flag for o in p.opts}
        at = 0
        while at < len(args) and args[at].startswith("-") and args[at] != "--" and not args[at].startswith("-m"):
            at += 2 if args[at] in takes_value else 1
        rest = args[at:]
        ctx.meta[_AS_IS] = rest[:1] == ["--"]
        return super().parse_args(ctx, [*args[:at], "--", *(rest[1:] if ctx.meta[_AS_IS] else rest)])


@click.command(
    cls=OfScript,
    options_metavar="[OPTIONS]",
    context_settings={"allow_interspersed_args": False},
    short_help="Record any script or launcher, unedited.",
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
    words = with_python(ctx, command)
    record(words, recording, name=name_of(words), env=os.environ)


# Options of Python that have a value of their own, and words after which what follows is no script.
_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")
_NO_SCRIPT = ("-m", "-c", "-", "--module", "--no-python")


def missing_script(words: Sequence[str]) -> str:
    """Return the script that python or torchrun would not find; "": there is one, or what is started is unknown."""
    program, rest = Path(words[0]).name, list(words[1:])
    if re.fullmatch(r"python[\d.]*", program):
        while rest and rest[0].startswith("-") and rest[0] not in _NO_SCRIPT and not rest[0].startswith(("-m", "-c")):
            del rest[: 2 if rest[0] in _WITH_VALUE else 1]
        if rest[:2] not in (["-m", "torch.distributed.run"], ["-m", "torch.distributed.launch"]):
            return rest[0] if rest and not rest[0].startswith("-") and not os.path.exists(rest[0]) else ""  # noqa: PTH110
        program, rest = "torchrun", rest[2:]
    script = next((word for word in rest if word.endswith(".py")), "")
    known = program == "torchrun" and not {*_NO_SCRIPT} & {*rest[: rest.index(script) if script else None]}
    return script if known and script and not os.path.exists(script) else ""  # noqa: PTH110 - never raises


def with_python(ctx: click.Context, command: Sequence[str]) -> list[str]:
    """Return the words of a command of class OfScript: a script or -m package without `--` runs under this Python.

    Raises RefusedError where the script does not exist.
    """
    python = not ctx.meta.get(_AS_IS) and (command[0].startswith("-m") or command[0].endswith(".py"))
    words = [sys.executable, *command] if python else list(command)
    if script := missing_script(words):
        raise RefusedError(f"there is no script {script}")
    return words


def record(
    command: Sequence[str],
    recording: Recording,
    *,
    name: str,
    env: Mapping[str, str],
    options: Mapping[str, str] | None = None,
) -> None:
    """Run the command, record it, print the verdict on stderr, and end this process as the command ended.

    The command also runs where nothing can be recorded. Raises DlprofError, before it starts, if nsys is required
    and not installed, or if a trial's run cannot be recorded in the trial's folder.
    """
    must_be_linux()
    if env.get("DLPROF_RUN"):
        _run_unrecorded(command, env, f"this is recorded already, into {env['DLPROF_RUN']}, and not a second time")
    launcher = nsys.launcher(env, number_of(env), bool(recording.asked["capture"])) if recording.nsys else None
    changed = recording.environment(env)
    task = task_of(changed)
    overridden = {name: shown(name, value) for name, value in recording.overrides.items()}
    written = {**recording.asked, **(options or {}), **({"set": overridden} if overridden else {})}
    run, why = opened(recording.out, name, command, written, changed)
    if why and env.get("DLPROF_TRIAL"):
        raise DlprofError(why)
    if run is None:
        more = ", and no --set takes effect" if overridden else ""
        _run_unrecorded(command, env, f"{why}; nothing is recorded{more}")
    if why and run.made:
        _say(f"dlprof: {why}; recording into {run.named}")
    elif not recording.quiet and (task is None or task.number in (None, "0")):
        _say(f"dlprof: recording into {run.named}")
    with _undisturbed():
        ended = supervise(command, run, changed, launcher, overridden)
        for warning in ended.warnings:
            _say(f"dlprof: {warning}")
        if ended.last and not recording.quiet:
            with _in_one_line("what --set did is not known", "stopped"):
                for line in applied(run.path, overridden):
                    _say(f"dlprof: {line}")
        if env.get("DLPROF_TRIAL"):
            _end_rest(run.records)
    if not recording.no_report and ended.last and recorded(run.path):
        # A launcher ends all tasks when one fails. The last task writes the report.
        with deaf() if task else contextlib.nullcontext():
            _report(run.path, recording.quiet)
        if recording.tries and ended.signal is None:
            _try(run.path, recording, command)
    # A rank that fails by itself ends at once: its launcher ends the others then.
    if task and not ended.last and ended.signal is not None and local_rank() in (None, 0):
        _say_unended(run)
    end_like(ended)


def _say_unended(run: RunFolder) -> None:
    """Say which tasks have not ended though this one was ended: of a node that is lost, nobody makes the report."""
    with deaf(), _in_one_line("whether other tasks have ended is not known", "stopped"):
        if left := run.unended(_OTHERS_END_S):
            named = f"{count(len(left), 'task')} of the job {'has' if len(left) == 1 else 'have'} not ended"
            where = os.path.relpath(run.path)
            _say(f"dlprof: {named} ({few(left, 8)}); what was recorded is kept: dlprof report {shlex.quote(where)}")


def _run_unrecorded(command: Sequence[str], env: Mapping[str, str], why: str) -> NoReturn:
    """Run the command as it is, and end this process as it ended."""
    _say(f"dlprof: {why}")
    with _undisturbed():
        ended = unrecorded(command, env)
    end_like(ended)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Let no Ctrl-C cost the command its exit status: while it runs a Ctrl-C is its own, and afterwards too late."""
    # An ignored signal stays ignored: the command inherits that.
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if ours:
        signal.signal(signal.SIGINT, lambda _number, _frame: None)
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _end_rest(folder: Path) -> None:
    """End the processes that a trial's run left behind: their parent may have been killed.

    A loader's worker waits forever if its parent ends before it looks up the parent's id (PyTorch's ManagerWatchdog).
    """
    with _in_one_line("processes of the job may be left", "stopped"):
        kill(os.getpid(), folder.absolute())


@contextlib.contextmanager
def _in_one_line(failed: str, stopped: str) -> Iterator[None]:
    """Say in one line that something fails or is stopped after the job: never may it cost the job's exit status."""
    try:
        yield
    except KeyboardInterrupt:
        _say(f"dlprof: {stopped}")
    except Exception as e:  # noqa: BLE001 - the job's exit status comes first
        _say(f"dlprof: {failed}: {words_of(e)}")


def _report(folder: Path, quiet: bool) -> None:
    """Write the report and print its verdict."""
    with _in_one_line("no report", f"report stopped; to make it later: dlprof report {folder}"):
        from dlprof.commands.report import write_report

        verdict = write_report(folder)
        if not quiet:
            _say(verdict, "\n\x1b")


def _try(folder: Path, recording: Recording, command: Sequence[str]) -> None:
    """Try what the report advises."""
    with _in_one_line("not tried", f"trial stopped; to make it later: dlprof try {folder}"):
        from dlprof.commands.prove.try_ import try_run
        from dlprof.commands.report import analyse
        from dlprof.trial.search import Options

        options = Options(allow_numerics=recording.allow_numerics, command=tuple(command))
        try_run(folder, analyse(folder), options, quiet=recording.quiet, err=True)


def _say(text: str, keep: str = "") -> None:
    """Print on stderr; a reader that has gone (2>&1 | head) must not cost the job its exit status."""
    with contextlib.suppress(OSError):
        click.echo(plain(text, keep=keep), err=True)


def name_of(words: Sequence[str]) -> str:
    """Name a run after what runs: the script where one is named, else the command; as far as the recording names it."""
    kept = redaction.words(words)
    kept = [part for word in kept for part in (("-m", word[2:]) if word[:2] == "-m" and word[2:] else (word,))]
    modules = [after for word, after in itertools.pairwise(kept) if word == "-m" and after != redaction.DROPPED]
    script = next((w for w in kept if w.endswith(".py")), None)
    stem = Path(script or kept[0]).stem if script or not modules else modules[-1]
    return "".join(c if c.isalnum() or c in "._-" else "_" for c in stem.strip(redaction.DROPPED)) or "run"
