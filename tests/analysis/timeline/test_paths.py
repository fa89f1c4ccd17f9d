"""Repeated layers fold into one path, and what differs stays apart."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlprof.analysis.timeline.paths import FEWEST_LEAVES, around, folded, parent


def layers(at: str, *inside: str) -> dict[str, str]:
    """Return layers that hold an attention, which holds a layer of a class each."""
    return {
        f"{at}.{n}{path}": kind
        for n, of in enumerate(inside)
        for path, kind in (("", "Layer"), (".attention", "Attention"), (".attention.out", of))
    }


def experts(*called: tuple[int, ...]) -> dict[str, str]:
    """Return layers of which each has called some experts."""
    up = {f"h.{n}.experts.{e}.up": "Linear" for n, of in enumerate(called) for e in of}
    return {f"h.{n}": "Layer" for n in range(len(called))} | {path[:-3]: "Expert" for path in up} | up


def blocks(stages: int) -> dict[str, str]:
    """Return blocks and stages that are named by a number."""
    kinds = {f"block{n}": "Block" for n in range(stages)} | {f"block{n}.up": "Linear" for n in range(stages)}
    kinds |= {f"layer{n}": "Sequential" for n in range(stages)}
    kinds |= {f"layer{n}.{i}": "BasicBlock" for n in range(stages) for i in range(3)}
    return kinds | {f"layer{n}.{i}.conv1": "Conv2d" for n in range(stages) for i in range(3)}


def of_classes(count: int) -> dict[str, str]:
    """Return blocks of two layers with the names that the profiler makes of their classes."""
    kinds = {f"Net_0.Block_{n}": "Block" for n in range(count)}
    return kinds | {f"Net_0.Block_{n // 2}.Conv2d_{n}": "Conv2d" for n in range(2 * count)}


def alike(name: str, count: int, *kinds: str) -> dict[str, str]:
    return {f"{name}{n}": kinds[n % len(kinds)] for n in range(count)}


FEW = FEWEST_LEAVES - 1
# Modules by path, and what some of them become; what is not named stays as it is where nothing is named.
FOLDED: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "with what is in them": (
        {"": "Model", "head": "Linear", **layers("encoder.layer", *["Linear"] * 12)},
        {"": "", "head": "head", "encoder.layer.3": "encoder.layer.*"}
        | {f"encoder.layer.{n}.attention.out": "encoder.layer.*.attention.out" for n in range(12)},
    ),
    "what is built otherwise": (
        {**layers("h", "Linear", "LoRALinear", "Linear", "Linear"), "h.4": "Norm"},
        {"h.0": "h.{0,2-3}", "h.3.attention.out": "h.{0,2-3}.attention.out", "h.4": "h.4"}
        | {"h.3": "h.{0,2-3}", "h.1.attention": "h.1.attention"},
    ),
    "two kinds in turn": (
        layers("h", *["Experts", "Dense"] * 12),
        {"h.22.attention": "h.{0,2,4,…}.attention", "h.23.attention": "h.{1,3,5,…}.attention"},
    ),
    "whatever each layer called": (
        experts((0, 3), (1, 2), (5,)),
        {path: "h.*.experts.*.up" for path in experts((0, 3), (1, 2), (5,)) if path.endswith(".up")},
    ),
    "few single layers": (alike("net.", FEW, "Linear"), {f"net.{n}": f"net.{n}" for n in range(FEW)}),
    "many single layers": (alike("tables.", 26, "Bag"), {f"tables.{n}": "tables.*" for n in range(26)}),
    "in turn": (alike("features.", 20, "ReLU", "Conv2d"), {f"features.{n}": f"features.{n}" for n in range(20)}),
    # bn1 and bn2 are different layers, and so are stages of a network.
    "names": (alike("block.bn", 9, "BatchNorm2d"), {f"block.bn{n}": f"block.bn{n}" for n in range(9)}),
    "blocks and stages": (blocks(4), {"block2.up": "block*.up", "layer2.1.conv1": "layer2.*.conv1"}),
    # The first of one block is the first of the other, too.
    "names of classes": (
        of_classes(5),
        {f"Net_0.Block_{n}": "Net_0.Block_*" for n in range(5)}
        | {f"Net_0.Block_{n}.Conv2d_{2 * n}": "Net_0.Block_*.Conv2d_{0,2,4,…}" for n in (0, 4)}
        | {f"Net_0.Block_{n}.Conv2d_{2 * n + 1}": "Net_0.Block_*.Conv2d_{1,3,5,…}" for n in (0, 4)},
    ),
    "many of a class": (alike("Net_0.Bag_", 26, "Bag"), {f"Net_0.Bag_{n}": "Net_0.Bag_*" for n in range(26)}),
    "an attribute that is only called so": (alike("fc_", 5, "Linear"), {f"fc_{n}": f"fc_{n}" for n in range(5)}),
}


@pytest.mark.parametrize(("kinds", "expected"), FOLDED.values(), ids=FOLDED)
def test_repeated_layers_fold_into_one_path(kinds: dict[str, str], expected: dict[str, str]) -> None:
    found = folded(kinds)
    assert {path: found[path] for path in expected} == expected


names = st.lists(st.sampled_from(["a", "b", "0", "1", "2", "3", "4", "5", "A_1", "A_2"]), max_size=4).map(".".join)
trees = st.dictionaries(names, st.sampled_from(["A", "B", ""]), max_size=30)


@settings(deadline=None, max_examples=60)
@given(trees)
def test_every_path_has_one_that_is_below_its_parents_and_of_one_class(kinds: dict[str, str]) -> None:
    found = folded(kinds)
    assert set(found) == set(kinds)
    kinds_of: dict[str, set[str]] = {}
    for path, whole in found.items():
        assert whole.count(".") == path.count(".")
        if parent(path) in kinds and path:
            assert parent(whole) == found[parent(path)]
        kinds_of.setdefault(whole, set()).add(kinds[path])
    assert all(len(of) == 1 for whole, of in kinds_of.items() if whole.rpartition(".")[2] == "*")


def test_the_innermost_module_around_several() -> None:
    assert around(["h.0.up", "h.0.down"]) == "h.0"
    assert around(["h.0", "h.0.up"]) == "h.0"
    assert around(["h.1", "h.10"]) == "h"
    assert around(["head", "h"]) == around([]) == ""
