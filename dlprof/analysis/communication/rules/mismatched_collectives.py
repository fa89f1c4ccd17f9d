"""Ranks of one process group issue different collectives under one number.

The ranks of a group match their collectives by order alone. Where one issues an all_reduce and another a broadcast, or
both an all_reduce of different sizes or element types, the job hangs, ends with an error, or goes on with wrong
numbers.

Needs the dumps of PyTorch's flight recorder of two ranks at least, see `hung_collective`.

Saving: none of a step: what was computed after it may be wrong. The report lists it before any saving.

What to change: the first pair that differs; those after it follow from it. The table has the line of each. The usual
causes: a branch that depends on the rank, parameters or buckets in another order, a last batch of another size, another
precision on one rank. `TORCH_DISTRIBUTED_DEBUG=DETAIL` makes torch stop at the first.
"""

from __future__ import annotations

import pandas as pd

from dlprof.analysis.communication.recorder import NO_DUMP, any_dump, has_one_rank, mismatches, whole_calls
from dlprof.analysis.engine import JOB, Frame, Job, Maybe, maybe, needs
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change, nothing
from dlprof.analysis.panel import table
from dlprof.errors import DoesNotApply, NotMeasured
from dlprof.units import count

MOST = 24  # variants that are listed

_COLUMNS = {"named": "group", "sequence": "number", "differs": "differs in", "ranks": "ranks", "op": "collective"}
_COLUMNS |= {"input": "takes", "output": "gives", "dtype": "elements", "site": "at"}
_PART = {"operation": "op", "element type": "dtype", "size": "input"}


def check(
    whole_calls: Maybe[Frame] = maybe(whole_calls), mismatches: Maybe[Frame] = maybe(mismatches), job: Job = needs(JOB)
) -> Estimate:
    """Find the ranks that are fewest in the first collective that differs."""
    if not any_dump(whole_calls):
        if has_one_rank(job):
            raise DoesNotApply("one rank has no other to differ from")
        raise NotMeasured(whole_calls.why() if whole_calls.broke else NO_DUMP)
    calls = whole_calls.get()
    if calls["rank"].nunique() < 2:
        raise NotMeasured("the dump of one rank alone: there is nothing to compare it with")
    frame = mismatches.get()
    if not len(frame):
        shared = calls[calls["kind"] == "collective"].groupby(["key", "sequence"])["rank"].nunique()
        return nothing(
            f"{count(int((shared > 1).sum()), 'collective')} that several ranks issued are the same on all", "failure"
        )
    first = frame[(frame["named"] == frame["named"].iloc[0]) & (frame["sequence"] == frame["sequence"].iloc[0])]
    return Estimate(scope="failure", by_rank_ns=dict.fromkeys(_fewest(first), 1.0), seen=frame)


def _fewest(first: pd.DataFrame) -> list[int]:
    """Return the first rank of each variant but the commonest; of two that are equally common, both."""
    most = first["many"].max()
    odd = first[first["many"] < most]
    return (odd if len(odd) else first)["rank"].tolist()


def explain(estimate: Estimate) -> Explanation:
    """Compare the variants of the first collective that differs."""
    frame: pd.DataFrame = estimate.seen
    first = frame[(frame["named"] == frame["named"].iloc[0]) & (frame["sequence"] == frame["sequence"].iloc[0])]
    one = first.iloc[0]
    many = len(frame.drop_duplicates(["named", "sequence"]))
    column = _PART[one["differs"]]
    variants = first.groupby(column, sort=False).first().reset_index().head(3)
    differing = " and ".join(
        f"{_what(row, column)} on rank{'s' if row['many'] > 1 else ''} {row['ranks']}"
        for row in variants.to_dict("records")
    )
    at = " and ".join(dict.fromkeys(f"`{site}`" for site in variants["site"] if site))
    return Explanation(
        title=f"Collective #{one['sequence']} of {one['named']} is not the same on all ranks",
        summary=f"It is {differing}: the {one['differs']} differs. {count(many, 'collective')} differ in all;"
        " those after the first may follow from it.",
        verdict=f"The ranks do not issue the same collectives: #{one['sequence']} of {one['named']} is {differing}.",
        changes=(
            change(f"make all ranks issue the same there{f': {at}' if at else ''}"),
            change(
                "`TORCH_DISTRIBUTED_DEBUG=DETAIL` stops at the first call that differs",
                TORCH_DISTRIBUTED_DEBUG=(None, "DETAIL"),
            ),
        ),
        evidence=table("Collectives that differ between ranks", frame, _COLUMNS, most=MOST),
        sure="Compared by the recorders' entries of one number; sizes only where the operation needs the same on all.",
    )


def _what(row: dict[object, object], column: str) -> str:
    if column == "op":
        return str(row["op"])
    return f"{row['op']} of {row[column] or 'unknown'}{' elements' if column == 'input' else ''}"


RULE = Rule("Collectives that differ between ranks", check, explain)
