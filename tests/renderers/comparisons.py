"""Comparisons made by hand, for the tests of their renderers."""

from __future__ import annotations

from msgspec.structs import replace

from dlprof.comparison import Comparison, compare
from dlprof.result import Exchange, Fact, RankCost, RankStep, Result, TimePart, Work
from tests.renderers import results
from tests.renderers.results import MS

OPERATORS = (("mm", 80.0), ("convolution", 31.0), ("relu", 0.2))


def measured(result: Result, noise: float = 0.4, slower: float = 1.0) -> Result:
    """Return a result with what a comparison wants to know: noise, operators, collectives, and other figures."""
    window = result.window
    if window is None:
        return result
    window = replace(window, step_ns=window.step_ns * slower, noise_ns=noise * MS)
    return replace(
        result,
        window=window,
        time=tuple(TimePart(p.rank, p.category, p.ns * slower, p.share, 0.2 * MS) for p in result.time),
        steps=tuple(
            RankStep(r, 400, window.step_ns, noise * MS, tuple(f * window.step_ns for f in (0.9, 1, 1.2, 3)))
            for r in result.run.ranks
        ),
        work=(
            *(Work("operator", f"aten::{name}", 12.5, ms * slower * MS, 0.1 * MS) for name, ms in OPERATORS),
            Work("kernel", "ampere_sgemm<float, 128, 32>" * 9, 3, 40 * slower * MS, 0.1 * MS),
        ),
        exchanges=(Exchange("all_reduce", 4, "below 1 MiB", 8, 9 * slower * MS, 3 * slower * MS),),
    )


def fixed() -> Comparison:
    """What ddp() had advised was done, and two thirds of the gain came."""
    a = measured(results.ddp())
    b = measured(results.ddp(), slower=0.8)
    facts = tuple(replace(f, value="6") if f.name == "num_workers" else f for f in b.facts)
    outcomes = tuple(
        replace(o, state="clear", saving_ns=0.5 * MS, share=0.003, by_rank=(RankCost(1, 0.5 * MS),), summary="0.3 %")
        if o.id == "input_wait"
        else o
        for o in b.outcomes
    )
    return compare(a, replace(b, facts=facts, outcomes=outcomes))


def hostile() -> Comparison:
    """Texts that attack whoever shows them, on both sides."""
    a = measured(results.hostile())
    facts = (*a.facts, Fact("Loader", "</style><script>alert(1)</script>", "\x1b[2J\u202e"))
    return compare(a, replace(measured(results.hostile(), slower=2.0), facts=facts))


ALL = {
    "fixed": fixed,
    "same": lambda: compare(measured(results.ddp()), measured(results.ddp())),
    "large": lambda: compare(measured(results.many()), measured(results.many(), slower=1.3)),
    "other": lambda: compare(measured(results.ddp()), measured(results.healthy())),
    "empty": lambda: compare(results.ALL["empty"](), measured(results.ddp())),
    "old": lambda: compare(results.ddp(), results.ddp()),  # as an older dlprof wrote them
    "hostile": hostile,
}
