"""Records a training loop in its own process and says where its time goes: what `dlprof.profile` is.

The verdict and its figures go where the job logs: to W&B, MLflow, TensorBoard or another logger of Lightning's.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from dlprof.errors import DlprofError
from dlprof.plain import NBSP, words_of
from dlprof.record import in_process
from dlprof.record.ranks import find_rank
from dlprof.record.recorder import say
from dlprof.report import brief, first, formatting
from dlprof.result import Result
from dlprof.result.stored import from_json

# How long rank 0 waits for the others to end their recordings, and how long a report may take. Whoever waits for rank 0
# in a collective meanwhile does so for minutes without an error.
_OTHERS_S, _REPORT_S = 30.0, 300


class Profile:
    """What `dlprof.profile` returns: records the `with` block; then it has the diagnosis, and the path of its page.

    The diagnosis is made in another process: this one neither imports what analysis needs nor keeps its memory.
    """

    def __init__(self, block: in_process.Block, *, quiet: bool = False, log: Any = False) -> None:
        if not (isinstance(log, bool) or hasattr(log, "add_scalar")):
            raise ValueError(f"log={log!r}: True, False or a SummaryWriter")
        self._block, self._quiet = block, quiet
        self._log = log if isinstance(log, bool) else [log]
        self._outer: str | None = None  # the folder of a recording that runs already

    def __enter__(self) -> Profile:
        self._outer = os.environ.get("DLPROF_RUN")
        if not self._outer:
            self._block.__enter__()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.end(error)

    def end(self, error: BaseException | None = None, log: Any = None, step: int = 0) -> None:
        """End the recording; rank 0 prints the verdict, and logs it to trackers as of that step. Raises nothing.

        After an exception only the folder is named: the script is on its way out.
        """
        if self._outer:
            return
        self._block.__exit__(None, error, None)
        log = self._log if log is None else log
        if self._block.why_not or find_rank() != 0 or (self._quiet and not log):
            return
        try:
            if error is not None:
                say(f"`dlprof report {self._block.path}` says where the time went until then")
                return
            result, screen = self.result, first.first(self.result, str(self._block.path), lambda _: None)
            proof = f"try it: {screen.command}" if screen.command.startswith("dlprof try") else ""
            lines = (first.summary(result), screen.headline, screen.gain, proof, f"report: {self.report}")
            for line in () if self._quiet else filter(None, lines):
                say(line.replace(NBSP, " "))
            if log is not False:
                log_verdict(result, self.report, log, step)
        except Exception as e:  # noqa: BLE001 - the script goes on
            say(f"no verdict: {words_of(e)}")

    @cached_property
    def result(self) -> Result:
        """The diagnosis, as result.json holds it. Raises DlprofError where there is none, with the reason."""
        why = f"this process is recorded already, into {self._outer}" if self._outer else self._block.why_not
        if why or self._block.path is None:
            raise DlprofError(f"there is no verdict: {why}")
        return _diagnosed(self._block.path)

    @property
    def report(self) -> Path:
        """The page, report.html in the run folder. Raises DlprofError as `result` does."""
        return Path((self.result and self._block.path) or "", "report.html")


def _diagnosed(path: Path) -> Result:
    """Once the whole job has ended, have a process write result.json and report.html. Raises DlprofError."""
    until = time.monotonic() + _OTHERS_S
    while msgspec.json.decode((path / "run.json").read_bytes())["end_ns"] is None and time.monotonic() < until:
        time.sleep(0.05)
    env = {name: value for name, value in os.environ.items() if not name.startswith("DLPROF_")}
    # It is to find this dlprof, wherever that is. It runs in the run folder, where no module of the script's is.
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (env.get("PYTHONPATH"), str(Path(__file__).parents[1]))))
    words = [sys.executable, "-m", "dlprof", "report", str(path), "--quiet", "--format", "json"]
    how: dict[str, Any] = {"cwd": path, "env": env, "stdin": subprocess.DEVNULL, "timeout": _REPORT_S}
    try:
        done = subprocess.run(words, capture_output=True, check=False, **how)
    except (OSError, subprocess.TimeoutExpired) as e:
        raise DlprofError(f"`dlprof report {path}` does not end, or not begin: {e}") from None
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise DlprofError(said[-1] if said else f"dlprof report ended with status {done.returncode}")
    return from_json(msgspec.json.decode(done.stdout))


def log_verdict(result: Result, report: Path, to: Any, step: int) -> None:
    """Log a result and the path of its page to a list of runs and writers; True: to what the process has active."""
    found = active_trackers() if to is True else to
    if not found:
        say("the verdict is logged nowhere: no active run of W&B or MLflow was found")
    verdict, figures = brief.markdown(result, str(report.parent), lambda _: None), figures_of(result)
    for one in found:
        try:
            _put(one, verdict, figures, str(report), step)
        except Exception as e:  # noqa: BLE001, PERF203 - the others get it
            say(f"the verdict is not logged to {type(one).__name__}: {words_of(e)}")


def _put(one: Any, verdict: str, figures: dict[str, float], report: str, step: int) -> None:
    if isinstance(one, tuple):  # MLflow's client, and the run, which may have ended
        client, run = one
        for name, value in figures.items():
            client.log_metric(run, name, value, step=step)
        client.log_text(run, verdict, "dlprof/verdict.md")
        client.set_tag(run, "dlprof.report", report)
    elif hasattr(one, "add_scalar"):  # a SummaryWriter; one that was closed opens another file in its folder
        for name, value in figures.items():
            one.add_scalar(name, value, step)
        one.add_text("dlprof/verdict", f"{verdict}\n\n{report}", step)
        one.flush()
    elif hasattr(one, "summary"):  # a run of W&B, whose steps are the job's own
        one.summary.update({**figures, "dlprof/verdict": verdict, "dlprof/report": report})
    else:  # another logger of Lightning's
        one.log_metrics(figures, step)


def figures_of(result: Result) -> dict[str, float]:
    """Return the figures of a result that are worth comparing between jobs, by name; what is not known is left out."""
    window, first = result.window, result.changes[0] if result.changes else None
    throughput = window.throughput if window else None
    known: dict[str, float | None] = {f"{c}_share": share for c, share in formatting.mean_shares(result.time).items()}
    known |= {"step_ms": window.step_ns / 1e6, "steps": window.steps, "mfu": window.mfu} if window else {}
    known |= {name: getattr(throughput, name, None) for name in ("samples_per_s", "tokens_per_s")}
    known |= {"first_change_speedup": first.speedup if first else None}
    return {f"dlprof/{name}": float(value) for name, value in known.items() if value is not None}


def active_trackers() -> list[Any]:
    """Return the runs of W&B and MLflow that this process has active; it has none of what it has not imported."""
    wandb, mlflow = sys.modules.get("wandb"), sys.modules.get("mlflow")
    run = mlflow.active_run() if mlflow is not None else None
    runs = [getattr(wandb, "run", None), (mlflow.MlflowClient(), run.info.run_id) if mlflow and run else None]
    return [one for one in runs if one is not None]


def of_lightning(logger: Any) -> Any:
    """Return what one of Lightning's loggers writes to, or the logger itself if it is of another kind."""
    to = logger.experiment
    if hasattr(to, "set_tag") and getattr(logger, "run_id", None):
        return to, logger.run_id
    return to if hasattr(to, "add_scalar") or hasattr(to, "summary") else logger
