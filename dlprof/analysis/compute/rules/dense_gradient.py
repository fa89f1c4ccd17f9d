"""A large embedding has a dense gradient: all rows are set to zero and updated, for the few that a batch uses.

An embedding's backward pass makes a gradient as large as its table, mostly zeros, and the optimizer goes through all of
it. With `sparse=True` the gradient has only the rows of the batch.

Needs a trace with modules. The rule looks for an `nn.Embedding` or `nn.EmbeddingBag` of 4 MiB or more, whose backward
pass takes five times as long as its forward pass.

Saving: that backward pass, and of the optimizer's step the table's share by bytes: the most that it can be.

What to change: `sparse=True`, and an optimizer that knows such gradients: SGD, Adagrad, or `SparseAdam` for this table,
which updates the moments of a row only when it is used, and so trains otherwise than Adam. Not where the table is also
the weight of the last layer, whose gradient is dense; and NCCL does not add up sparse gradients over ranks.
"""

from __future__ import annotations

import pandas as pd

from dlprof.analysis import settings
from dlprof.analysis.engine import JOB, Frame, Job, needs
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change, nothing
from dlprof.analysis.modules.tree import module_means
from dlprof.analysis.modules.work import OUTSIDE
from dlprof.analysis.panel import table
from dlprof.analysis.source.statements import Trees, made_in, statements
from dlprof.analysis.timeline.steps import mean_step_ns
from dlprof.errors import DoesNotApply
from dlprof.units import duration, few, size

_CLASSES = ("Embedding", "EmbeddingBag")
_LARGE_BYTES, _LONGER = 4 << 20, 5.0

# Optimizers that update the rows of a sparse gradient as they would those of a dense one.
_SAME = ("SGD", "Adagrad")

_COLUMNS = {
    "path": "module",
    "parameter_bytes": "table_bytes",
    "forward_ns": "forward_ns",
    "backward_ns": "backward_ns",
}


def check(
    module_means: Frame = needs(module_means), mean_step_ns: float = needs(mean_step_ns), job: Job = needs(JOB)
) -> Estimate:
    if job.world_size > 1:
        raise DoesNotApply("several ranks add up their gradients, and few backends do that with sparse ones")
    tables = module_means[module_means["kind"].isin(_CLASSES)]
    tables = tables[(tables["parameter_bytes"] >= _LARGE_BYTES) & ~tables["path"].duplicated()]
    # Its table may be the weight of the last layer too.
    others = module_means[~module_means.index.isin(tables.index) & (module_means["kind"] == "Linear")]
    tables = tables[~tables["parameter_bytes"].isin(others["parameter_bytes"])]
    tables = tables[tables["backward_ns"] >= _LONGER * tables["forward_ns"]]
    if tables.empty:
        return nothing("no large embedding has a long backward pass")
    outermost = module_means[(module_means["depth"] == 0) & (module_means["path"] != OUTSIDE)]
    whole = max(float(outermost["parameter_bytes"].sum()), float(tables["parameter_bytes"].sum()))
    cost = float(tables["backward_ns"].sum()) + _optimizer(module_means) * tables["parameter_bytes"].sum() / whole
    cost *= min(mean_step_ns / float(module_means["total_ns"].iloc[0]), 1.0)  # tracing makes steps longer
    rank = job.ranks[0]
    return Estimate(
        saving_ns=cost, by_rank_ns={rank: cost}, loses="goes to a gradient that is mostly zeros", seen=tables
    )


def _optimizer(modules: pd.DataFrame) -> float:
    return float(modules.loc[(modules["path"] == OUTSIDE) & (modules["kind"] == "optimizer"), "ns"].sum())


def explain(estimate: Estimate, statements: Trees = needs(statements), job: Job = needs(JOB)) -> Explanation:
    mine = estimate.seen
    attributes = dict.fromkeys(path.strip("()").rpartition(".")[2] for path in mine["path"])
    named = few([f"`{path.strip('()')}`" for path in mine["path"]], 4)
    # The tables may have an optimizer of their own, beside that of the dense layers.
    optimizers, held = job.facts[job.ranks[0]].get("optimizers") or (), int(mine["parameter_bytes"].sum())
    of_tables = [one for one in optimizers if one.get("bytes") == held] or optimizers
    same = bool(of_tables) and {str(one.get("class")) for one in of_tables} <= set(_SAME)
    text = "`nn.Embedding(..., sparse=True)`"
    otherwise = f"{text}, and `torch.optim.SparseAdam` for this table: rows that a batch does not use stay as they are"
    return Explanation(
        title="The gradient of a large embedding is mostly zeros",
        summary=f"The backward pass of {named} ({size(float(mine['parameter_bytes'].sum()))}) takes"
        f" {duration(float(mine['backward_ns'].sum()))}, its forward pass"
        f" {duration(float(mine['forward_ns'].sum()))}: a gradient of the whole table is made and then used.",
        changes=(change(text if same else otherwise, numerics=not same, training=not same),),
        evidence=table("Embeddings with dense gradients", mine, _COLUMNS),
        sure="The backward pass of the table as traced, and its share of the optimizer's step by bytes: the most that"
        " it can be" + (", since a GPU may hide it." if settings.on_gpu(job) else "."),
        at_most=True,
        where=tuple(place for one in attributes for place in made_in(statements, one, *_CLASSES)),
    )


RULE = Rule(
    "Dense gradients of embeddings", check, explain, saves_from=("computation", "host", "optimizer_host", "other")
)
