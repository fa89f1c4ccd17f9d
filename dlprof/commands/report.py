"""`dlprof report PATH`: the verdict on a run or on traces from anywhere."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dlprof import run_folder
from dlprof.commands import PATH, cache, file, jobs, new_folder, no_limits, out, quiet, rarely, run_path, say, show
from dlprof.commands.progress import Progress
from dlprof.errors import DlprofError, RefusedError
from dlprof.files import compact, write, writing
from dlprof.plain import command_line, plain
from dlprof.units import count

if TYPE_CHECKING:
    from dlprof.analysis.engine import Done
    from dlprof.read.run import Run
    from dlprof.report.summary import Summary
    from dlprof.result import Result

# Variables that a launcher sets in each of its processes: its number, from 0, and how many there are. SLURM_NTASKS does
# not do: a batch script has it too, and is no task of a step.
_LAUNCHERS = (
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)


def _shard(_context: click.Context, _option: click.Parameter, text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    if text == "auto":
        return _launched()
    k, _, n = text.partition("/")
    if not (k.isdecimal() and n.isdecimal() and 0 <= int(k) < int(n) < 100_000):
        raise click.BadParameter(f"{text!r}: K/N, with K from 0 to N - 1, or auto")
    return int(k), int(n)


def _launched() -> tuple[int, int]:
    """Return the number of this process and how many there are, as the launcher set them; without a launcher (0, 1)."""
    for number, many in _LAUNCHERS:
        k, n = os.environ.get(number, ""), os.environ.get(many, "")
        if k.isdecimal() and n.isdecimal() and int(k) < int(n):
            return int(k), int(n)
    return 0, 1


@click.command(short_help="Show where the time of a step goes.")
@run_path
@click.argument("more", type=PATH, nargs=-1, metavar="[PART]...")
@out("Folder for report.html and result.json.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "json", "md", "brief"]),
    default="text",
    help="What to print; md: the first screen as Markdown, 2 kB at most; brief: the same as JSON, 8 kB at most.",
)
@file("--patch", "Write the edits of the findings' changes into FILE, for `git apply`.")
@show
@quiet
@rarely
@jobs
@no_limits
@click.option(
    "--redact", is_flag=True, help="Leave out the names of users, hosts and folders, so that the report can be shared."
)
@click.option(
    "--allow-numerics", is_flag=True, help="With --patch: also changes with which the job computes other numbers."
)
@click.option(
    "--window",
    type=click.IntRange(min=1),
    metavar="N",
    help="Which window to read, where ranks have several traces. [default: a run's first; of other tools' the last "
    "complete one]",
)
@click.option(
    "--dask",
    metavar="local|slurm|tcp://HOST:PORT",
    help="Read the ranks on a Dask cluster: of processes here (local:4), of SLURM jobs (slurm:16), or a running one.",
)
@cache
@click.option(
    "--shard",
    callback=_shard,
    metavar="K/N|auto",
    help="Read only share K of N, from 0 on, keep what the report needs of it, and write no report; auto: the share of "
    "this task of srun or mpirun.",
)
@click.option("--kept-only", is_flag=True, help="Leave out the ranks that no `--shard` has read.")
@click.option("-v", "--verbose", is_flag=True, help="Print all ranks, findings and warnings, not the first screen.")
@click.option("--files", is_flag=True, help="Also print what each file of a folder was taken for, and what was left.")
def report(
    path: Path,
    more: tuple[Path, ...],
    out: Path | None,
    form: str,
    jobs: int | None,
    redact: bool,
    patch: Path | None,
    allow_numerics: bool,
    window: int | None,
    dask: str | None,
    cache: Path | None,
    shard: tuple[int, int] | None,
    kept_only: bool,
    verbose: bool,
    files: bool,
    show: bool,
    quiet: bool,
) -> None:
    """Show where the time goes in PATH: a run, a folder of other tools' files, or one (`dlprof explain sources`).

    Prints the verdict and writes report.html and result.json: into a run, or else into a new folder dlprof-report.
    Several paths are parts of one run, such as hosts left on disks of their own: they are put together there.

    `srun dlprof report PATH --shard auto` reads the ranks on any number of nodes that see the same files, and writes no
    report: what it keeps is not read again. It may be stopped and repeated.
    """
    if more:
        path = out = put_together([path, *more], out)
    if shard:
        of_report = {
            "-o": out,
            f"--format {form}": form != "text",
            "--redact": redact,
            "--patch": patch,
            "--dask": dask,
        }
        of_report |= {"--kept-only": kept_only, "--files": files, "--open": show}
        if given := [option for option, value in of_report.items() if value]:
            raise click.UsageError(f"--shard writes no report: it takes no {', '.join(given)}")
        _read_share(path, shard, window, cache, jobs, quiet)
        return
    if dask and (jobs or kept_only):
        raise click.UsageError("--dask has its own number of workers (local:4), and reads what is not kept")
    result = _analysed_for_page(path, jobs, quiet, window=window, dask=dask, cache=cache, kept_only=kept_only)
    if redact:
        from dlprof.result.stored import shareable

        result = shareable(result)
    if form in ("md", "brief"):
        verdict = _short(result, path, form)
    else:
        verdict = _json(result) if form == "json" else _verdict(result, path, verbose)
    try:
        html = write_files(result, path, out, redact=redact)
    finally:
        # Reading may have taken minutes: the verdict is printed even where it could not be written.
        click.echo(verdict)
    if form == "text":
        for line in _files(result) if files else ():
            say(line)
        say(f"report: {shown(html)}")
    if patch is not None:
        _write_patch(result, path, patch, allow_numerics, tell=form == "text")
    if show:
        browse(html)


def put_together(parts: Sequence[Path], out: Path | None) -> Path:
    """Copy the ranks and hosts of parts of one run into `out`, or a new folder; that is then a run. Return it.

    Raises RefusedError, before anything is copied, where one is no run, they are of several jobs, or of a rank twice.
    """
    jobs, ranks = {}, dict[str, Path]()
    for part in parts:
        try:
            info = json.loads((part / "run.json").read_bytes())
            jobs[part] = (info["command"], info.get("cwd"), info.get("batch"), (info.get("options") or {}).get("job"))
        except (OSError, ValueError, KeyError, TypeError):
            raise RefusedError(f"{part}: no run of dlprof; of several paths each is a part of one run") from None
        if jobs[part] != jobs[parts[0]]:
            raise RefusedError(f"{parts[0]} and {part} are of different jobs: report on one at a time")
        for rank in run_folder.in_ranks(part):
            if (other := ranks.setdefault(rank.name, part)) is not part:
                raise RefusedError(f"{other} and {part} both hold rank {rank.name}: they are not parts of one run")
    folder = out or new_folder("dlprof-report")
    with writing(f"the run put together, {folder}"):
        for part in reversed(parts):  # the first one's run.json counts
            for name in ("ranks", "tasks", run_folder.HOSTS, run_folder.SPREAD_HOSTS):
                if (part / name).is_dir():
                    shutil.copytree(part / name, folder / name, dirs_exist_ok=True)
            shutil.copyfile(part / "run.json", folder / "run.json")
    return folder


def _read_share(
    path: Path, shard: tuple[int, int], window: int | None, cache: Path | None, jobs: int | None, quiet: bool
) -> None:
    """Read the ranks of a share, keep their answers, and print a summary line and warnings."""
    k, n = shard
    run = _opened(path, window)
    from dataclasses import replace

    from dlprof.analysis.diagnosis import wanted
    from dlprof.analysis.engine import answers_of, open_store
    from dlprof.analysis.engine.store import shares
    from dlprof.analysis.rules import RULES

    store = open_store(run, cache, f"{k}/{n}")
    with writing(f"what is known of each rank, in {store.folder},", "; --cache names another folder"):
        store.make()
    share = replace(run, ranks=tuple(sorted(shares(run, n)[k], key=lambda rank: rank.index)))
    with Progress(f"shard {k}/{n}: " if n > 1 else "", quiet=quiet) as progress:
        answers = answers_of(share, wanted(RULES), jobs or _jobs_of_shard(n), progress, store=store, tell=progress.tell)
    for rank, answer in sorted(answers.items()):
        if not answer.tables:
            say(f"rank {rank}: {answer.warnings[0]}")
    whole = count(len(run.ranks), "rank")
    say(f"shard {k}/{n}: {len(answers):,} of {whole} in {store.folder}; `dlprof report` uses them")


def _jobs_of_shard(shards: int) -> int | None:
    """Return how many processes read: the cores of a SLURM task, else 1 of several shards; None: as many as usual."""
    cores = os.environ.get("SLURM_CPUS_PER_TASK", "")
    return int(cores) if cores.isdecimal() and int(cores) > 0 else 1 if shards > 1 else None


def _files(result: Result) -> list[str]:
    """Return a line for each kind of file that was read, then for each that was left out."""
    from dlprof.analysis.panels.machine import TITLE

    rows = [row for panel in result.panels if panel.title == TITLE for row in panel.rows]
    return [f"  {read}: {what}: {files} ({why})" for files, what, read, why in rows]


def _write_patch(result: Result, path: Path, file: Path, numerics: bool, tell: bool) -> None:
    """Write the edits of all changes into a file; raise DlprofError if there are none, or it cannot be written."""
    from dlprof.analysis.source import patches, where
    from dlprof.read.run import open_run

    edits = [
        wanted
        for outcome in result.found
        for change in outcome.changes
        if not change.training and (numerics or not where.changes_numbers(change))
        for wanted in where.wanted(change, where.role_of(outcome.id))
    ]
    made = patches.patch(patches.calls_of(rank.facts for rank in open_run(path).ranks), edits)
    left = [f"{settings}{f' at {place}' if place else ''}: {why}" for settings, place, why in made.left_out]
    for line in left if tell and made.text else ():
        say(f"not in the patch: {line}")
    if not made.text:
        raise DlprofError(f"no patch: {'; '.join(left) or 'no finding has a change that is a keyword of a call'}")
    with writing(f"the patch {file}"):
        write(file, made.text)
    if tell:
        say(f"patch: {shown(file)} (git apply {shown(file)}, in the folder that the job was started in)")


def browse(page: Path) -> None:
    """Open a page in the user's browser; print a line if no browser is found."""
    import webbrowser

    if not webbrowser.open(page.resolve().as_uri()):
        click.echo("no browser was found to open it with", err=True)


def write_report(path: Path) -> str:
    """Analyse a run, write report.html and result.json, and return the verdict as text for the terminal."""
    # This follows the job's own output: only a progress line is printed, and it is removed again.
    result = _analysed_for_page(path, None, quiet=not sys.stderr.isatty())
    return f"{_verdict(result, path)}\nreport: {plain(shown(write_files(result, path, None)))}"


def _analysed_for_page(path: Path, jobs: int | None, quiet: bool, **how: Any) -> Result:
    with Progress(quiet=quiet) as progress:

        def shown_progress(done: Done) -> None:
            progress(done)
            if 0 < done.ranks < done.of_ranks:  # other processes read the remaining ranks
                from dlprof.report import html

                html.prepare()

        return analyse(path, jobs, shown_progress, page=True, tell=progress.tell, **how)


def analyse(
    path: Path,
    jobs: int | None = None,
    progress: Callable[[Done], None] | None = None,
    *,
    page: bool = False,
    window: int | None = None,
    dask: str | None = None,
    cache: Path | None = None,
    kept_only: bool = False,
    tell: Callable[[str], None] = lambda _: None,
) -> Result:
    """Open a run or traces and apply every rule.

    `page`: import the renderers while other processes read. `window`: see `open_run`. `dask`, `cache`, `kept_only`: the
    options of `dlprof report`. `tell` receives lines for the user.
    """
    run = _opened(path, window)
    from dlprof.read.kineto import prefetch
    from dlprof.read.run import TRACE

    if jobs != 1 and not dask and "pandas" not in sys.modules:
        run.share_out(jobs)
        whole = (rank for rank in run.largest_first if TRACE in rank.files and TRACE not in rank.pieces)
        prefetch.begin([rank.files[TRACE] for rank in whole])
    # These imports come after the start of decoding, so that another core decodes meanwhile.
    from dlprof.analysis.diagnosis import diagnosed, wanted
    from dlprof.analysis.engine import find, measure
    from dlprof.analysis.rules import RULES
    from dlprof.trial.job import with_tried

    backend = None
    if dask:
        from dlprof.analysis.engine.cluster import Dask

        backend = Dask(dask, tell)
    if page:
        from dlprof.report import html, terminal  # noqa: F401

    store = find(run, cache, requested=bool(dask), tell=tell)
    measured = measure(run, wanted(RULES), jobs, progress, store=store, backend=backend, only_kept=kept_only, tell=tell)
    return with_tried(diagnosed(measured, RULES), path)


def _opened(path: Path, window: int | None) -> Run:
    """Open a run. Set what makes this process and its forks read faster."""
    # The measures multiply no matrices, so threads of a linear-algebra library would be useless.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # Hundreds of columns of megabytes are allocated and freed. The kernel takes longer to do that with huge pages.
    os.environ.setdefault("NUMPY_MADVISE_HUGEPAGE", "0")
    from dlprof.read.run import open_run
    from dlprof.record.launch.process import keep_memory

    keep_memory()
    return open_run(path, window)


def _verdict(result: Result, path: Path, verbose: bool = False) -> str:
    """Return the first screen, or all that a terminal shows; a terminal's colours come with links to files."""
    from dlprof.report import terminal
    from dlprof.trial.planning import named

    if verbose:
        return terminal.render(result, width(), colour())
    text = terminal.first(result, command_line((shown(path),)), named, width(), colour())
    return linked(text) if colour() else text


_LINE = re.compile(r"(?<![\w./-])([\w./-]+\.py):(\d+)")


def linked(text: str) -> str:
    """Return a text in which lines of files that are here are links, as terminals take them (OSC 8)."""

    def link(at: re.Match[str]) -> str:
        file = Path(at[1])
        uri = f"{file.resolve().as_uri()}#{at[2]}" if file.is_file() else ""
        return f"\x1b]8;;{uri}\x1b\\{at[0]}\x1b]8;;\x1b\\" if uri else at[0]

    return _LINE.sub(link, text)


def width() -> int:
    """Return the width of the output in characters."""
    return max(60, min(shutil.get_terminal_size((88, 24)).columns, 110))


def _json(result: Result) -> str:
    from dlprof.result.stored import to_json

    return compact(to_json(result))


def _short(result: Result, path: Path, form: str) -> str:
    """Return the first screen as Markdown ("md") or JSON."""
    from dlprof.report import brief
    from dlprof.trial.planning import named

    if form == "md":
        return brief.markdown(result, shown(path), named).rstrip("\n")
    return brief.to_json(brief.brief(result, shown(path), named)).decode()


def write_files(result: Result, path: Path, out: Path | None, *, redact: bool = False) -> Path:
    """Write result.json and report.html, and return the path of the latter; raise DlprofError if that fails."""
    from dlprof.report import html
    from dlprof.trial.planning import named

    run = result.run.path if redact else shown(path)
    files = {"result.json": _json(result), "report.html": html.render(result, command_line((run,)), named)}
    if out is None and path.is_dir() and ((path / "run.json").is_file() or (path / "ranks").is_dir()):
        out = path
    return write_into("dlprof-report", out, files)


def print_summary(summary: Summary, data: Mapping[str, Any], form: str) -> None:
    """Print a summary, or its data as JSON."""
    click.echo(_in_form(summary, data, form))


def _in_form(summary: Summary, data: Mapping[str, Any], form: str) -> str:
    from dlprof.report import summary as summaries

    return compact(data) if form == "json" else summaries.text(summary, width(), colour()).removesuffix("\n")


def write_summary(
    summary: Summary,
    data: Mapping[str, Any],
    file: str,
    folder: str,
    out: Path | None,
    form: str,
    *,
    show: bool = False,
) -> None:
    """Print a summary, and write it as FILE.html and its data as FILE.json, into `out` or a new folder `folder`.

    Raises DlprofError if they cannot be written.
    """
    from dlprof.report import summary as summaries

    files = {f"{file}.json": compact(data), f"{file}.html": summaries.page(summary)}
    write_page(_in_form(summary, data, form), files, folder, out, form, show=show)


def write_page(verdict: str, files: Mapping[str, str], folder: str, out: Path | None, form: str, *, show: bool) -> None:
    """Print a verdict, and write files, of which the last is a page, into `out` or a new folder `folder`.

    Raises DlprofError if they cannot be written.
    """
    try:
        page = write_into(folder, out, files)
    finally:
        click.echo(verdict)
    if form != "json":
        say(f"page: {shown(page)}")
    if show:
        browse(page)


def write_into(name: str, out: Path | None, files: Mapping[str, str]) -> Path:
    """Write files into `out`, or else into a new folder `name`; return the path of the last file.

    Raises DlprofError if a file cannot be written, or a thousand folders of that name exist.
    """
    with writing(f"the report in {out or name}", "; -o names another folder"):
        folder = out or new_folder(name)
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            write(folder / file, text)
    return folder / list(files)[-1]


def shown(path: Path) -> str:
    """Return the shorter of a file's relative and absolute path, seen from the current folder."""
    here = os.path.relpath(path)
    return str(path.resolve()) if here.startswith(os.path.join("..", "..")) else here  # noqa: PTH118


def colour() -> bool:
    """Return whether to print colours to stdout."""
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ
