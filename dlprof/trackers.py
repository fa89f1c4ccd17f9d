"""Logs a verdict and its figures to what the job logs to: W&B, MLflow, TensorBoard or another logger of Lightning's."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from dlprof.plain import words_of
from dlprof.record.recorder import say
from dlprof.report import brief, formatting
from dlprof.result import Result


def log(result: Result, report: Path, to: Any, step: int) -> None:
    """Log a result and the path of its page to a list of runs and writers; True: to what the process has active."""
    found = active() if to is True else to
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


def active() -> list[Any]:
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
