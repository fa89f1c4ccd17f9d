"""Records a part of a script or a notebook from inside its process: what `dlprof.record` is."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from dlprof import overrides, run_folder
from dlprof.errors import DlprofError
from dlprof.plain import words_of
from dlprof.record import collectors, hooks
from dlprof.record.joined import environment
from dlprof.record.launch import options
from dlprof.record.launch.folder import RunFolder, compress, opened, task_of
from dlprof.record.launch.supervisor import Samplers, applied, must_be_linux, recorded, whole_run
from dlprof.record.ranks import process_group
from dlprof.record.recorder import say
from dlprof.redaction import shown


def record(
    open_run: Callable[[Path], Any],
    path: str | os.PathLike[str] | None = None,
    *,
    window: tuple[int, int, int] | None = None,
    ranks: str | int = "all",
    trace: bool = True,
    flops: str = "auto",
    lines: str | Sequence[str] = (),
    shapes: bool = False,
    memory: bool = False,
    nvtx: bool = False,
    stacks: str | int = "on",
    sample: str | float = "auto",
    set: Mapping[str, Any] | None = None,  # noqa: A002 - as the option `--set` is called
    allow_numerics: bool = False,
    keep_arguments: bool = False,
) -> Block:
    """Return the block that `dlprof.record` describes; `open_run` opens its run afterwards.

    Raises TypeError or ValueError for bad options.
    """
    settings = overrides.checked(dict(set or {}))
    if (changing := overrides.changes_numbers(settings)) and not allow_numerics:
        raise ValueError(f"set: {changing[0]}: the job then computes other numbers; allow_numerics=True allows that")
    functions = [lines] if isinstance(lines, str) else list(lines)
    chosen = _checked("window", options.window, window, "" if window is None else ",".join(map(str, window)))
    asked = options.asked(
        flops=_checked("flops", options.flops, flops),
        keep_arguments=keep_arguments,
        lines=[_checked("lines", options.function, line) for line in functions],
        memory=memory,
        nvtx=nvtx,
        ranks=_checked("ranks", options.ranks, ranks),
        sample=_checked("sample", options.sample, sample),
        shapes=shapes,
        stacks=_checked("stacks", options.stacks, stacks),
        window=chosen if trace else "off",
    )
    return Block(open_run, None if path is None else Path(path), asked, settings)


def _checked(name: str, check: Callable[[str], str], given: object, text: str | None = None) -> str:
    try:
        return check(str(given) if text is None else text)
    except ValueError as e:
        raise ValueError(f"{name}={given!r}: {e}") from None


class Block:
    """What `dlprof.record` returns: records the `with` block, and is the run that `dlprof.open` opens after it."""

    def __init__(
        self,
        open_run: Callable[[Path], Any],
        path: Path | None,
        asked: Mapping[str, str],
        settings: Mapping[str, overrides.Value],
    ) -> None:
        self._open = open_run
        self._settings = settings  # to override
        self._overridden = {name: shown(name, value) for name, value in settings.items()}
        self.path = path  # of the run folder; None: a new one is made when the block begins
        self._asked = asked
        self._exit: dict[str, int | None] = {}
        self._undo = ExitStack()  # empty where nothing is recorded
        self._pid = 0
        self.why_not = "the block has not ended"  # why there is no run to open; "": there is one
        self._opened: Any = None

    def __enter__(self) -> Block:
        try:
            self._begin()
        except Exception as e:  # noqa: BLE001 - the block runs without us
            self.why_not = words_of(e)
            say(f"nothing is recorded: {self.why_not}")
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._exit = _exit_of(error)
        try:
            self._undo.close()
        except Exception as e:  # noqa: BLE001 - whatever the block has raised passes
            say(f"the recording did not end cleanly: {words_of(e)}")

    def _begin(self) -> None:
        outer = os.environ.get("DLPROF_RUN")
        if outer:
            raise DlprofError(f"this process is recorded already, into {outer}")
        must_be_linux()
        command, name = _command()
        written = {**self._asked, "set": self._overridden} if self._settings else self._asked
        run, why = opened(self.path, name, command, written, _as_task(os.environ))
        if run is None:
            raise DlprofError(why)
        if why and run.made:
            say(f"{why}; recording into {run.named}")
        self._pid, self.path = os.getpid(), (folder := run.path)
        import torch  # noqa: F401 - what the hooks hang on

        changes = options.variables(self._asked)
        if self._settings:
            changes["DLPROF_SET"] = json.dumps({"set": self._settings, "environment": {}})
        # For the processes that the block starts, as loader workers; it names its own supervisor.
        changes |= recorded({"PYTHONPATH": os.environ.get("PYTHONPATH", "")}, folder)
        with ExitStack() as undo:
            undo.enter_context(environment(changes))
            samplers = Samplers(folder, os.environ)
            undo.callback(self._end, run, samplers)
            samplers.start()
            undo.callback(hooks.uninstall)
            hooks.install(str(folder), collectors.COLLECTORS)
            self._undo = undo.pop_all()

    def _end(self, run: RunFolder, samplers: Samplers) -> None:
        if os.getpid() != self._pid:
            return  # a fork's child leaves the block too
        end_ns = time.time_ns()
        samplers.end()
        ranks = run.ranks
        compress(ranks)
        warnings = samplers.wait()
        self.why_not = ""
        if not (any((rank / "facts.json").exists() for rank in ranks) or run_folder.recorded(run.path)):
            self.why_not = "no backward() and no optimizer step was seen in the block"
            warnings.append(f"nothing was recorded: {self.why_not}")
        for line in warnings:
            say(line)
        end = {"end_ns": end_ns, "exit": self._exit, "resumed_ns": [], "warnings": warnings}
        of_all = run.end(lambda: whole_run(run.path, self._overridden), **end)
        for line in () if of_all is None else (*of_all, *applied(run.path, self._overridden)):
            say(line)

    @property
    def _run(self) -> Any:
        if self.why_not:
            raise DlprofError(f"there is no run to open: {self.why_not}")
        if self._opened is None:
            assert self.path is not None
            self._opened = self._open(self.path)
        return self._opened

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # what copy, pickle and notebooks try
            raise AttributeError(name)
        return getattr(self._run, name)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *(() if self.why_not else dir(self._run))]

    def __repr__(self) -> str:
        return f"<dlprof.record: {self.why_not}>" if self.why_not else repr(self._run)

    def _repr_html_(self) -> str | None:
        html: str | None = None if self.why_not else self._run._repr_html_()
        return html


def _as_task(env: Mapping[str, str]) -> Mapping[str, str]:
    """Return the environment as torchrun would set it where a process group is there that another launcher made.

    Lightning's own launcher and multiprocessing do not name the job to its ranks: its address does.
    """
    group = process_group()
    if group is None or group.get_world_size() < 2 or task_of(env) is not None:
        return env
    return {
        **env,
        "TORCHELASTIC_RUN_ID": "group",
        "RANK": str(group.get_rank()),
        "WORLD_SIZE": str(group.get_world_size()),
    }


def _command() -> tuple[Sequence[str], str]:
    """Return the command of this process, or its notebook; and what to name the run after."""
    ipython: Any = sys.modules.get("IPython")
    shell: Any = ipython.get_ipython() if ipython is not None else None
    if hasattr(shell, "kernel"):
        # As Jupyter's server and VS Code name the notebook to its kernel.
        notebook = os.environ.get("JPY_SESSION_NAME") or shell.user_ns.get("__vsc_ipynb_file__") or "notebook"
        return [str(notebook)], Path(str(notebook)).stem
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if spec is not None:  # python -m
        return sys.orig_argv, spec.name.removesuffix(".__main__")
    return sys.orig_argv, Path(sys.argv[0]).stem if sys.argv[0] not in ("", "-c") else "python"


def _exit_of(error: BaseException | None) -> dict[str, int | None]:
    """Return how a block ended as run.json says it of a command: its exit code, or the signal that ended it."""
    if isinstance(error, KeyboardInterrupt):
        return {"code": None, "signal": int(signal.SIGINT)}
    if error is None or (isinstance(error, SystemExit) and error.code is None):
        return {"code": 0, "signal": None}
    code = error.code if isinstance(error, SystemExit) else 1
    return {"code": code if isinstance(code, int) else 1, "signal": None}
