"""What the server does for a client: each tool is a struct, its docstring and fields what the client learns of it.

The work is done by `dlprof` commands, each a process of its own that is ended when the client is gone.
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import anyio
import msgspec

from dlprof.errors import DlprofError
from dlprof.plain import NBSP, plain
from dlprof.read import facts
from dlprof.record.launch.process import has_ended, stat_of, tied
from dlprof.record.launch.watching import kill
from dlprof.redaction import said
from dlprof.report import brief, formatting
from dlprof.result import Outcome, Result
from dlprof.result.stored import from_json
from dlprof.run_folder import recorded
from dlprof.trial.planning import named
from dlprof.trial.running import DLPROF

MOST = 4_000  # bytes of an answer
_KEPT = 1 << 16  # bytes from the end of what a command prints
_TICK_S = 2.0
_GRACE_S = 10.0  # for a command to end its own processes, and to keep what it measured

Tell = Callable[[str], Awaitable[None]]  # takes what is being done, again and again

_Run = Annotated[str, msgspec.Meta(description="A run folder, a folder of traces, or a trace file.")]
_Minutes = Annotated[float, msgspec.Meta(gt=0, le=600, description="The most minutes that it may take.")]


class Tool(msgspec.Struct, forbid_unknown_fields=True):
    """The arguments of a tool."""


class Record(Tool):
    """Run a training command, unedited, record it, end it after some steps, and say where its time goes."""

    command: Annotated[list[str], msgspec.Meta(min_length=1, description='Its words: ["train.py", "--lr", "0.1"]')]
    folder: Annotated[str, msgspec.Meta(description="Where to run it; default: the server's first folder.")] = ""
    steps: Annotated[int, msgspec.Meta(ge=1, le=1_000_000, description="After how many training steps to end it.")] = 60
    minutes: _Minutes = 10.0
    out: Annotated[str, msgspec.Meta(description="The new run folder; default: one in runs/.")] = ""
    keep_arguments: Annotated[
        bool, msgspec.Meta(description="Record all its arguments, which `try` needs, but for secrets.")
    ] = False


class Report(Tool):
    """Say where the time of a step goes, and what to change, in order: JSON of `dlprof report --format brief`."""

    run: _Run


class Explain(Tool):
    """Print the manual of a rule, a format or a setting; the names: rules, sources, settings, idioms."""

    name: str


class Evidence(Tool):
    """Show what one finding stands on: its changes with their edits, its places in the script, and its figures."""

    run: _Run
    rule: Annotated[str, msgspec.Meta(description="The id of a rule, as the report names it.")]


class Try(Tool):
    """Run the recorded job again, with and without a change in turn, and measure the gain; prints the patch."""

    run: _Run
    settings: Annotated[str, msgspec.Meta(description="'NAME=VALUE …', as `explain settings` lists them.")] = ""
    change: Annotated[int, msgspec.Meta(ge=0, description="The number of a change in the report; 0: none.")] = 0
    minutes: _Minutes = 10.0
    allow_numerics: Annotated[bool, msgspec.Meta(description="Also what changes the numbers computed.")] = False


class Compare(Tool):
    """Say what got faster or slower from one run to another, and whether predictions came true."""

    before: _Run
    after: _Run


class CheckAdvice(Tool):
    """Say whether advice ("use channels_last, 8 workers") would help this job, what it touches, how to measure it."""

    run: _Run
    advice: str


def fitted(text: str) -> str:
    """Return text of MOST bytes at most: lines are left out from the end, and counted."""
    data = text.strip().encode()
    if len(data) <= MOST:
        return data.decode()
    kept = data[: MOST - 60].decode(errors="ignore")
    kept = kept[: kept.rfind("\n")] if "\n" in kept else kept
    left = data.decode()[len(kept) :].strip("\n")
    return f"{kept}\n… left out: {left.count(chr(10)) + 1:,} lines, {len(left.encode()):,} bytes"


def evidence(outcome: Outcome) -> str:
    """Return what an outcome stands on as text: its answer, changes, places, and evidence as a table."""
    lines = [f"{outcome.id}: {outcome.state.replace('_', ' ')}: {outcome.title}", outcome.summary or outcome.why]
    lines += [f"gain: {formatting.gained(outcome)}"] if formatting.saves(outcome) else []
    lines += [outcome.sure] if outcome.sure else []
    for change in outcome.changes:
        more = " (other numbers)" * change.numerics + " (the job trains otherwise)" * change.training
        lines += [f"change: {change.text}{more}", *formatting.edits(change)]
    lines += [f"at: {formatting.where(place)}" for place in outcome.where]
    lines += [f"in: {one.path} {formatting.percent(one.share)}" for one in outcome.modules if one.path]
    if (panel := outcome.evidence) is not None:
        lines += [panel.title, " | ".join(map(formatting.header, panel.columns))]
        columns = panel.columns if panel.shape == "table" else (panel.unit and f"_{panel.unit}",) * 9
        lines += [
            " | ".join(formatting.cell(v, c) for v, c in zip(row, (*columns, *[""] * len(row)), strict=False))
            for row in panel.rows
        ]
    return plain("\n".join(filter(None, lines)).replace(NBSP, " "), keep="\n")


class Tools:
    """Does what a client asks for, in some folders alone."""

    def __init__(self, folders: list[Path], scratch: Path) -> None:
        self.folders = [folder.resolve(strict=True) for folder in folders]
        self._scratch = scratch
        self._alone = anyio.Lock()  # two jobs at a time would slow each other

    async def do(self, request: Tool, tell: Tell) -> str:
        """Return the answer of a tool; raise DlprofError with the reason where there is none."""
        if isinstance(request, Record):
            return await self._record(request, tell)
        if isinstance(request, Report):
            return self._brief(self._path(request.run), await self._result(request.run, tell), MOST)
        if isinstance(request, Evidence):
            result = await self._result(request.run, tell)
            found = {o.id: o for o in result.outcomes}
            if request.rule not in found:
                raise DlprofError(
                    f"no rule {request.rule!r}; found: {', '.join(o.id for o in result.found) or 'nothing'}"
                )
            return evidence(found[request.rule])
        if isinstance(request, Try):
            return await self._try(request, tell)
        if isinstance(request, Compare):
            runs = (str(self._path(request.before)), str(self._path(request.after)))
            text = await self._dlprof(tell, "compare", "--quiet", "-o", str(self._scratch), *runs)
            return text.rpartition("\npage: ")[0]
        if isinstance(request, CheckAdvice):
            run = str(self._path(request.run))
            return await self._dlprof(tell, "check-advice", "--quiet", "--", run, request.advice)
        assert isinstance(request, Explain)
        return await self._dlprof(tell, "explain", "--", request.name)

    def _path(self, text: str) -> Path:
        """Return a path as it is after all links; raise DlprofError if it lies in no folder of the server."""
        path = Path(os.path.realpath(self.folders[0] / text))
        if not any(path.is_relative_to(folder) for folder in self.folders):
            raise DlprofError(f"{text} is outside of the folders of this server: {', '.join(map(str, self.folders))}")
        return path

    async def _record(self, request: Record, tell: Tell) -> str:
        folder = self._path(request.folder or str(self.folders[0]))
        run = self._path(request.out or str(folder / "runs" / f"mcp-{time.time_ns() // 1_000_000}"))
        if run.exists():
            raise DlprofError(f"{run} exists already")
        words = ["wrap", "-o", str(run), "--quiet", "--no-report", "--stop-after", str(request.steps)]
        words += ["--keep-arguments"] if request.keep_arguments else []
        words += [] if request.command[0] == "-m" or request.command[0].endswith(".py") else ["--"]
        async with self._alone:
            code, *printed = await _ended(tell, [*words, *request.command], request.minutes * 60, folder, run)
        ended = f"after {request.minutes:g} minutes" if code is None else f"with exit code {code}"
        if not recorded(run):
            last = plain(" / ".join(said("\n".join(printed), request.command).strip().splitlines()[-5:]), 400)
            raise DlprofError(f"nothing was recorded; the command ended {ended}: {last or 'it printed nothing'}")
        first = f"recorded into {run}; the command ended {ended}\n"
        return first + self._brief(run, await self._result(str(run), tell), MOST - len(first.encode()))

    async def _try(self, request: Try, tell: Tell) -> str:
        run = self._path(request.run)
        if (run / "run.json").is_file():
            self._path(str(facts.read(run / "run.json", facts.RUN).facts.get("cwd") or "/"))
        words = ["try", str(run), "--minutes", str(request.minutes)]
        words += ["--only", "--set", request.settings] if request.settings else []
        words += ["--change", str(request.change)] if request.change else []
        words += ["--allow-numerics"] if request.allow_numerics else []
        async with self._alone:
            return await self._dlprof(tell, *words, limit_s=request.minutes * 60 + 300)

    async def _result(self, text: str, tell: Tell) -> Result:
        """Return the result of a run; the report of traces is not written beside them."""
        path = self._path(text)
        own = (path / "run.json").is_file()
        out = path if own else Path(tempfile.mkdtemp(dir=self._scratch))
        made = out / "result.json"
        if not own or not made.is_file() or made.stat().st_mtime < _changed(path):
            await self._dlprof(tell, "report", str(path), "--quiet", "--format", "md", "-o", str(out))
        return from_json(msgspec.json.decode(made.read_bytes()))

    def _brief(self, path: Path, result: Result, most: int) -> str:
        return brief.to_json(brief.brief(result, str(path), named, most)).decode()

    async def _dlprof(self, tell: Tell, *words: str, limit_s: float = 3600.0) -> str:
        """Return what a command of dlprof printed; raise DlprofError if it failed."""
        code, printed, last = await _ended(tell, words, limit_s, self.folders[0])
        if code is None or (code and not printed):
            failed = last.strip().splitlines()[-1:] if code else [f"{words[0]}: ended after {limit_s:.0f} s"]
            raise DlprofError("".join(failed).removeprefix("dlprof: ") or f"{words[0]}: ended with exit code {code}")
        return printed


def _changed(run: Path) -> float:
    """Return when a file of a run was last written, but for those of its report."""
    files = (path for path in run.rglob("*") if path.name not in ("result.json", "report.html", ".dlprof"))
    return max(path.lstat().st_mtime for path in files)


async def _ended(
    tell: Tell, words: Sequence[str], limit_s: float, cwd: Path, run: Path | None = None
) -> tuple[int | None, str, str]:
    """Run a command of dlprof to its end, or that of its time (None); return its exit code, and the ends of its stdout
    and stderr.

    `run`: where it records; its job ends with it.
    """
    process = await asyncio.create_subprocess_exec(
        *(*DLPROF, *words),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=cwd,
        start_new_session=True,
        preexec_fn=tied(signal.SIGTERM),
    )
    printed = {"out": b"", "err": b""}

    async def read(name: str, stream: asyncio.StreamReader | None) -> None:
        while stream is not None and (data := await stream.read(_KEPT)):
            printed[name] = (printed[name] + data)[-_KEPT:]

    async def ticking() -> None:
        while True:
            await anyio.sleep(_TICK_S)
            line = printed["err"].decode(errors="replace").strip().rpartition("\n")[2]
            await tell(plain(line.removeprefix("dlprof: ") or words[0], 200))

    try:
        with anyio.move_on_after(limit_s) as within:
            async with anyio.create_task_group() as beside:
                beside.start_soon(read, "out", process.stdout)
                beside.start_soon(read, "err", process.stderr)
                beside.start_soon(ticking)
                await process.wait()
                beside.cancel_scope.cancel()
    finally:
        code = process.returncode
        if code is None:
            # Cancelled, the client has gone, or soon gives this server a SIGTERM, and two seconds later a SIGKILL.
            grace_s = _GRACE_S if within.cancelled_caught else _GRACE_S / 10
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(_end, process.pid, run or Path(os.devnull), grace_s)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
    return code, printed["out"].decode(errors="replace"), printed["err"].decode(errors="replace")


def _end(pid: int, run: Path, grace_s: float) -> None:
    """End a command of ours that runs, and the processes that it has started or that record into a run."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    until = time.monotonic() + grace_s
    while not has_ended(stat_of(pid)) and time.monotonic() < until:
        time.sleep(_TICK_S / 20)
    kill(pid, run)
