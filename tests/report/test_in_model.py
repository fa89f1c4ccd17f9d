"""Where in the model the time is, in words and lines."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from dlprof.plain import NBSP
from dlprof.report import in_model
from dlprof.result.figures import InModule, Modules, Outside
from tests.fixtures import results


def test_lines_are_of_what_takes_most_none_inside_another() -> None:
    lines = in_model.lines_of(results.encoder())
    assert [name for _, name in lines] == [
        "encoder.layer.*.attention × 12 (Attention)",
        "encoder.layer.*.mlp × 12 (MLP)",
        "device idle",
        "communication of no single module",
        "head (Linear)",
    ]
    assert [share for share, _ in lines] == pytest.approx([ms / 214.6 for ms in (80, 46, 34.6, 30, 18)])


def test_what_a_module_does_itself_is_a_line_of_its_own() -> None:
    model = results.module("", "ResNet", 0, 190.0, own=130.0, communication_ns=128e6)
    layers = results.module("layers.*", "Block", 1, 60.0, own=60.0, count=3)
    lines = in_model.lines_of(Modules(True, 214.6e6, (model, layers)))
    assert [name for _, name in lines] == ["ResNet, communication", "layers.* × 3 (Block)"]
    assert sum(share for share, _ in lines) == pytest.approx(190 / 214.6)
    computing = in_model.lines_of(Modules(True, 214.6e6, (replace(model, communication_ns=0.0), layers)))
    assert computing[0][1] == "ResNet itself"


def test_small_parts_have_no_line() -> None:
    small = Outside("other", 1e6, 0.004)
    assert in_model.lines_of(Modules(False, 214.6e6, (), (small,))) == []


def test_a_finding_names_a_few_modules_with_their_shares() -> None:
    where = (
        InModule("layer.*.mlp", "MLP", 0.62),
        InModule("", "", 0.2),
        InModule("head.Linear_3", "Linear", 0.1),
        InModule("a", "A", 0.06),
    )
    percent = f"{NBSP}%"
    assert (
        in_model.named(where)
        == f"layer.*.mlp (MLP) 62{percent}, outside modules 20{percent}, head.Linear_3 10{percent}"
    )
    assert in_model.named(()) == ""
    # That all of it is in the model says nothing.
    assert in_model.named((InModule("", "ResNet", 1.0),)) == ""
    assert in_model.named((InModule("", "ResNet", 0.6), InModule("", "", 0.4))).startswith("ResNet 60")
