"""Embedding tables lie in the host's memory: each step looks rows up there and copies them to the device.

The host looks rows up more slowly than the device would, and the result crosses PCIe. The gradients come back, and the
host waits for them; then it adds them up and updates the table while the device is idle.

Needs a trace of a GPU job. The rule looks for an `embedding` that launches no kernel and whose result is copied to the
device next. The trace does not show which tables these are, or how large.

Saving: the traced steps are replayed without the lookups, gradients and updates on the host, their copies, and the
waits for these. On the device, a fiftieth of the time of the copies is left.

What to change: `embedding.to(device)`, where the device has memory for the table, its gradient and its optimizer state;
with `sparse=True` the gradient is not as large as the table. For a table that is too large: look up the next batch's
rows ahead of time on another thread.
"""

from __future__ import annotations

from dlprof.analysis.engine import Frame, by_rank, needs
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change, nothing
from dlprof.analysis.host.gaps import HOST, SAVES_FROM
from dlprof.analysis.host.host_tables import host_tables
from dlprof.result import Panel
from dlprof.units import duration, often, size

_MOVED = change("`embedding.to(device)`, if the device has memory for the table, its gradient and its optimizer state")
_AHEAD = change(
    "if the table is too large: look up the next batch's rows ahead of time, on another thread, into pinned memory"
)
_PARTS = {
    "lookup_ns": "lookups on the host",
    "copy_ns": "copies of rows and gradients",
    "gradient_ns": "gradients on the host",
    "optimizer_ns": "updates on the host",
}


def check(host_tables: Frame = needs(host_tables)) -> Estimate:
    if host_tables.empty:
        return nothing("no embedding table is in host memory")
    return Estimate(
        gone_ns=by_rank(host_tables, "gain_ns"), noise_of=HOST, loses="would be saved by embeddings on the device"
    )


def explain(estimate: Estimate, host_tables: Frame = needs(host_tables)) -> Explanation:
    rank = estimate.worst
    row = estimate.rows(host_tables).iloc[0]
    parts = tuple((name, float(row[column])) for column, name in _PARTS.items())
    return Explanation(
        title="Embedding tables are in host memory",
        summary=f"Rank {rank} looks up embeddings in host memory {often(float(row['lookups']))} a step. Lookups,"
        " gradients and updates take the host"
        f" {duration(row[['lookup_ns', 'gradient_ns', 'optimizer_ns']].sum())} a step;"
        f" {size(row['copy_bytes'])} are copied.",
        changes=(_MOVED, _AHEAD),
        evidence=Panel("bars", f"Time of embeddings on the host, a step of rank {rank}", parts, unit="ns"),
        sure="Estimated by replaying the traced steps without this work of the host, its copies and waits.",
    )


RULE = Rule("Embeddings on the host", check, explain, ("copy", *SAVES_FROM), only_with="gpu")
