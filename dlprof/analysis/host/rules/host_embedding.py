"""Embeddings are looked up in the host's memory, and copied to the device in every step.

The host looks rows up more slowly than the device would, and what it finds crosses PCIe; the gradients come back, for
which the host waits, and the host adds them up and changes the weights, while the device has nothing to do.

Needs a trace of a GPU run. Such a lookup is an `embedding` that launches no kernel and whose result is copied to the
device next. Which tables there are, and how large, no trace tells.

Saving: the traced steps replayed without the lookups, the gradients and the changes of weights on the host, and without
their copies and the waits for these: on the device it takes a fiftieth of the copies.

What to change: `embedding.to(device)`, where the device has room for the table, its gradient and the optimizer's state;
`sparse=True` needs no gradient of the table's size. A table that is too large: look up the next batch's rows ahead, on
another thread.
"""

from __future__ import annotations

from dlprof.analysis.engine import Frame, by_rank
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change, nothing
from dlprof.analysis.host.gaps import HOST, SAVES_FROM
from dlprof.result import Panel
from dlprof.units import duration, often

_MOVED = change(
    "`embedding.to(device)`, where the device has room for the table, its gradient and the optimizer's state"
)
_AHEAD = change("a table that is too large: look up the next batch's rows ahead, on another thread, into pinned memory")
_PARTS = {
    "lookup_ns": "lookups on the host",
    "copy_ns": "copies of them and of their gradients",
    "gradient_ns": "gradients on the host",
    "optimizer_ns": "weights changed on the host",
}


def check(host_tables: Frame) -> Estimate:
    if host_tables.empty:
        return nothing("no embedding is looked up on the host")
    return Estimate(
        gone_ns=by_rank(host_tables, "gain_ns"),
        noise_of=HOST,
        loses="would be saved by embeddings on the device",
    )


def explain(estimate: Estimate, host_tables: Frame) -> Explanation:
    rank = estimate.worst
    row = estimate.rows(host_tables).iloc[0]
    parts = tuple((name, float(row[column])) for column, name in _PARTS.items())
    return Explanation(
        title="Embeddings are looked up on the host",
        summary=f"{often(float(row['lookups'])).capitalize()} a step rank {rank} looks up embeddings in the host's"
        f" memory, which takes the host {duration(row[['lookup_ns', 'gradient_ns', 'optimizer_ns']].sum())} a step,"
        f" and copies {row['copy_bytes'] / 1e6:.1f} MB.",
        changes=(_MOVED, _AHEAD),
        evidence=Panel("bars", f"What embeddings on the host take of a step of rank {rank}", parts, unit="ns"),
        sure="Estimated by replaying the traced steps without this work of the host, its copies and their waits.",
    )


RULE = Rule("Embeddings on the host", check, explain, ("copy", *SAVES_FROM), only_with="gpu")
