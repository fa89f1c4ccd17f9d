"""The steps of an inference server by what they do: prefill, decode, or both."""

from __future__ import annotations

import pandas as pd

from dlprof.analysis.engine import JOB, Frame, Job, needs
from dlprof.analysis.panel import Picture, table
from dlprof.analysis.step.serving import engine_of, serving_steps
from dlprof.result import Panel

_COLUMNS = {
    "phase": "steps that do",
    "steps": "steps a rank",
    "mean_ns": "mean step_ns",
    "longest_ns": "longest_ns",
    "requests": "requests a step",
    "tokens": "tokens a step",
    "tokens_per_s": "tokens/s",
    "busy": "device busy_share",
}


def draw(serving_steps: Frame = needs(serving_steps), job: Job = needs(JOB)) -> list[Panel]:
    """Show for each phase how many steps there are, how long, with how many requests and tokens, and how busy."""
    rows = []
    ranks = serving_steps["rank"].nunique()
    for phase, of in serving_steps.groupby("phase", sort=True):
        told = of[of["tokens"] >= 0]
        tokens_ns = float(told["dur_ns"].sum())
        rows.append(
            {
                "phase": phase,
                "steps": len(of) / ranks,
                "mean_ns": float(of["dur_ns"].mean()),
                "longest_ns": float(of["dur_ns"].max()),
                "requests": float(of["requests"].mean()),
                "tokens": float(told["tokens"].mean()) if len(told) else None,
                "tokens_per_s": float(told["tokens"].sum()) / (tokens_ns / 1e9) if tokens_ns else None,
                "busy": float(of["busy_ns"].sum() / of["dur_ns"].sum()) if of["busy_ns"].notna().all() else None,
            }
        )
    title = f"Inference by {engine_of(job) or 'a server'}: prefill and decode steps"
    note = (
        "A step is from its start to the next one's where they follow each other. Tokens: that a step reads and makes."
    )
    return [table(title, pd.DataFrame(rows), _COLUMNS, note=note)]


PICTURE = Picture(draw)
