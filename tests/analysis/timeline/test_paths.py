"""Repeated layers fold into one path, and what differs stays apart."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from dlprof.analysis.timeline.paths import FEWEST_LEAVES, around, folded, parent


def layer(at: str, inside: str = "Linear") -> dict[str, str]:
    return {at: "Layer", f"{at}.attention": "Attention", f"{at}.attention.out": inside}


def test_layers_of_one_class_fold_with_what_is_in_them() -> None:
    kinds = {"": "Model", "head": "Linear"}
    for n in range(12):
        kinds |= layer(f"encoder.layer.{n}")
    found = folded(kinds)
    assert Counter(found.values()) == {
        "": 1,
        "head": 1,
        "encoder.layer.*": 12,
        "encoder.layer.*.attention": 12,
        "encoder.layer.*.attention.out": 12,
    }


def test_what_is_built_otherwise_stays_apart() -> None:
    kinds = {**layer("layers.0"), **layer("layers.1", "LoRALinear"), **layer("layers.2"), **layer("layers.3")}
    found = folded({**kinds, "layers.4": "Norm"})
    assert found["layers.0"] == found["layers.3"] == "layers.{0,2-3}"
    assert found["layers.3.attention.out"] == "layers.{0,2-3}.attention.out"
    assert found["layers.1.attention"] == "layers.1.attention"
    assert found["layers.4"] == "layers.4"


def test_two_kinds_of_layers_in_turn_have_two_names() -> None:
    kinds: dict[str, str] = {}
    for n in range(24):
        kinds |= layer(f"h.{n}", "Dense" if n % 2 else "Experts")
    found = folded(kinds)
    assert found["h.22.attention"] == "h.{0,2,4,…}.attention"
    assert found["h.23.attention"] == "h.{1,3,5,…}.attention"


def test_experts_fold_over_layers_whatever_each_layer_called() -> None:
    kinds: dict[str, str] = {}
    for n, called in enumerate([(0, 3), (1, 2), (5,)]):
        kinds[f"h.{n}"] = "Layer"
        for e in called:
            kinds |= {f"h.{n}.experts.{e}": "Expert", f"h.{n}.experts.{e}.up": "Linear"}
    found = folded(kinds)
    assert {found[p] for p in kinds if p.endswith(".up")} == {"h.*.experts.*.up"}


def test_single_layers_fold_only_where_many_are_side_by_side() -> None:
    few = {f"net.{n}": "Linear" for n in range(FEWEST_LEAVES - 1)}
    assert folded(few) == {path: path for path in few}
    many = {f"tables.{n}": "EmbeddingBag" for n in range(26)}
    assert set(folded(many).values()) == {"tables.*"}
    vgg = {f"features.{n}": "Conv2d" if n % 2 else "ReLU" for n in range(20)}
    assert folded(vgg) == {path: path for path in vgg}
    # bn1 and bn2 are different layers, and so are stages of a network.
    named = {f"block.bn{n}": "BatchNorm2d" for n in range(9)}
    assert folded(named) == {path: path for path in named}


def test_blocks_that_are_named_by_a_number_fold_and_stages_do_not() -> None:
    kinds: dict[str, str] = {}
    for n in range(4):
        kinds |= {f"block{n}": "Block", f"block{n}.up": "Linear", f"layer{n + 1}": "Sequential"}
        kinds |= {f"layer{n + 1}.{i}.conv1": "Conv2d" for i in range(3)}
        kinds |= {f"layer{n + 1}.{i}": "BasicBlock" for i in range(3)}
    found = folded(kinds)
    assert {found[p] for p in kinds if p.endswith(".up")} == {"block*.up"}
    assert found["layer2.1.conv1"] == "layer2.*.conv1"


def test_names_that_the_profiler_makes_of_classes_fold_by_their_number() -> None:
    kinds: dict[str, str] = {}
    for n in range(5):
        kinds |= {f"Net_0.Block_{n}": "Block", f"Net_0.Block_{n}.Conv2d_{2 * n}": "Conv2d"}
        kinds |= {f"Net_0.Block_{n}.Conv2d_{2 * n + 1}": "Conv2d"}
    found = folded(kinds)
    assert {found[p] for p, kind in kinds.items() if kind == "Block"} == {"Net_0.Block_*"}
    # The first of one block is the first of the other, too.
    assert found["Net_0.Block_0.Conv2d_0"] == found["Net_0.Block_4.Conv2d_8"] == "Net_0.Block_*.Conv2d_{0,2,4,…}"
    assert found["Net_0.Block_0.Conv2d_1"] == found["Net_0.Block_4.Conv2d_9"] == "Net_0.Block_*.Conv2d_{1,3,5,…}"
    tables = {f"Net_0.EmbeddingBag_{n}": "EmbeddingBag" for n in range(26)}
    assert set(folded(tables).values()) == {"Net_0.EmbeddingBag_*"}
    # An attribute that is only called so is none.
    assert folded({"fc_1": "Linear", "fc_2": "Linear", "fc_3": "Linear", "fc_4": "Linear"})["fc_1"] == "fc_1"


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
