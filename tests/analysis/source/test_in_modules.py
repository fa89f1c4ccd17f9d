"""A finding names the smallest modules that hold most of it."""

from __future__ import annotations

import pandas as pd
import pytest

from dlprof.analysis.modules.sums import OUTSIDE
from dlprof.analysis.source.where import MOST_NAMED, in_modules
from dlprof.result.figures import InModule


def found(*rows: tuple[str, str, float], about: str = "float32", total: float = 100.0, rank: int = 0) -> pd.DataFrame:
    """Return what a finding has in modules with what is inside them: path, class, ns."""
    frame = pd.DataFrame(rows, columns=["path", "kind", "ns"])
    return frame.assign(about=about, total_ns=total, rank=rank)


def shares(rule: str, frame: pd.DataFrame | None) -> dict[str, float]:
    return {one.path: one.share for one in in_modules(rule, frame)}


def test_what_is_inside_is_named_where_it_has_most_of_it() -> None:
    frame = found(
        ("", "Bert", 100.0),
        ("layer.*", "Layer", 90.0),
        ("layer.*.attention", "Attention", 50.0),
        ("layer.*.mlp", "MLP", 35.0),
        ("layer.*.norm", "LayerNorm", 5.0),
        ("head", "Linear", 10.0),
    )
    assert shares("fp32_matmul", frame) == {"layer.*.attention": 0.5, "layer.*.mlp": 0.35, "head": 0.1}
    assert in_modules("fp32_matmul", frame)[0] == InModule("layer.*.attention", "Attention", 0.5)


def test_many_small_ones_are_named_by_what_is_around_them() -> None:
    rows = [(f"block{n}", "Block", 5.0) for n in range(20)]
    assert shares("fp32_matmul", found(("", "Net", 100.0), *rows)) == {"": 1.0}


def test_what_is_in_no_module_is_said_beside_others() -> None:
    frame = found(("a", "Linear", 60.0), (OUTSIDE, "", 40.0))
    assert [(one.path, one.kind, one.share) for one in in_modules("fp32_matmul", frame)] == [
        ("a", "Linear", 0.6),
        ("", "", 0.4),
    ]
    assert in_modules("fp32_matmul", found((OUTSIDE, "", 100.0))) == ()


def test_ranks_count_by_what_they_have() -> None:
    frame = pd.concat([found(("a", "A", 10.0), total=10.0), found(("b", "B", 30.0), total=30.0, rank=1)])
    assert shares("fp32_matmul", frame) == {"b": pytest.approx(0.75), "a": pytest.approx(0.25)}


def test_a_finding_of_other_spans_or_of_none_has_no_modules() -> None:
    frame = found(("a", "Linear", 60.0))
    assert in_modules("host_sync", frame) == ()
    assert in_modules("input_wait", frame) == ()
    assert in_modules("fp32_matmul", None) == ()


def test_few_are_named() -> None:
    rows = [(f"m{n}", "Linear", 10.0) for n in range(10)]
    assert len(in_modules("fp32_matmul", found(*rows))) == MOST_NAMED
