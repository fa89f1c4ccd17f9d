"""What a change would do to memory: closed forms of the papers, and the same script with the change, really run."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import pandas as pd
import pytest

from dlprof.analysis.memory import footprint as fp
from dlprof.analysis.memory.footprint import (
    Footprint,
    at_places,
    corners,
    largest_unit,
    places_of,
    unit_of,
    units,
    with_modules_inside,
)
from tests.fixtures import counted
from tests.fixtures.counted import Script
from tests.fixtures.holding import row


def table(*rows: dict[str, object]) -> pd.DataFrame:
    return pd.DataFrame(list(rows))


def parts(held: pd.DataFrame) -> dict[str, float]:
    """Return all that a table holds at once, but for the gradients: the end of a forward pass."""
    sums = held.groupby("part")["bytes"].sum().astype(float).to_dict()
    return {str(part): n for part, n in sums.items() if part != "gradient"}


# -- where in the backward pass gradients are made, what is saved until then, and which places may be the peak

ROWS = [
    row("parameter", "embedding", 1_000, "Embedding"), row("parameter", "a", 40), row("parameter", "b", 20),
    row("gradient", "embedding", 1_000, "Embedding"), row("gradient", "a", 40), row("gradient", "b", 20),
    row("activation", "a", 600, tensors=3), row("activation", "act", 900, "GELU"), row("activation", "head", 50),
    row("activation", "head", 8, dtype="int64"),
]  # fmt: skip
SHARED = row("shared", "head", 0, full_bytes=1_000)
BLOCKS = [row(part, f"blocks.{n}", 10 * n) for part in ("parameter", "activation") for n in (1, 2, 3)]

# Rows → columns of the places.
PLACES: dict[str, tuple[list[dict[str, object]], dict[str, list[object]]]] = {
    # Two of a module's largest tensor flow through it: the result's gradient and the input's. None through indices.
    # The embedding saves nothing: its gradient is made after that of the next that does; and so is that of b, which has
    # none behind it, with the last before it.
    "modules that save something or nothing": (
        ROWS,
        {
            "module": ["a", "act", "head", "head"], "kept": [600, 900, 50, 8],
            "flowing": [400, 1_800, 100, 0], "gradient": [1_060, 0, 0, 0],
        },
    ),
    # The earlier one makes another gradient, and adds them up: both are there for a moment.
    "a parameter of two modules": ([*ROWS, SHARED], {"gradient": [60, 0, 0, 1_000], "own": [1_060, 0, 0, 1_000]}),
    "recorded in order": (BLOCKS, {"kept": [10, 20, 30]}),
    "recorded in the order of the backward pass": (BLOCKS[:3] + BLOCKS[:2:-1], {"kept": [10, 20, 30]}),
    "without names, gradients are spread over what is saved": (
        [r if r["part"] != "activation" else r | {"module": ""} for r in ROWS], {"gradient": [1_000, 0, 40, 20]},
    ),
    "nothing is saved": ([r for r in ROWS if r["part"] != "activation"], {"kept": [0], "gradient": [1_060]}),
}  # fmt: skip


@pytest.mark.parametrize("name", PLACES)
def test_places_of(name: str) -> None:
    rows, columns = PLACES[name]
    found = places_of(table(*rows))
    assert {column: found[column].to_list() for column in columns} == columns


def test_what_is_added_at_the_places_goes_to_its_module_or_the_only_place() -> None:
    found = places_of(table(*(r for r in ROWS if r["part"] != "activation")))
    assert at_places(table(*ROWS), found["module"], table(*ROWS[:1])).tolist() == [1_000]


@pytest.mark.parametrize("seed", range(3))
def test_corners_are_where_any_weights_have_their_largest_sum(seed: int) -> None:
    rng = np.random.default_rng(seed)
    grows, stays = np.cumsum(rng.uniform(size=40)), np.cumsum(rng.uniform(size=40))[::-1].copy()
    found = corners(grows, stays)
    assert 0 < len(found) < 40
    for weight in np.linspace(0.01, 10, 200):
        assert (weight * grows + stays)[found].max() == (weight * grows + stays).max()
    assert corners(np.array([1.0]), np.array([2.0])) == [0]
    assert len(corners(np.array([1.0, 1.0]), np.array([2.0, 2.0]))) == 1


def test_lists_of_modules_are_units_and_what_lies_in_them_belongs_to_them() -> None:
    held = table(*(row("activation", f"layers.{n}.up", 100) for n in range(3)), *ROWS[:1])
    assert units(held) == ["layers.0", "layers.1", "layers.2"]
    assert unit_of(held["module"], units(held)).to_list() == ["layers.0", "layers.1", "layers.2", ""]
    assert largest_unit(held, units(held)) == 1_000
    # So do layers of one of several models.
    rows = [row("activation", f"(Net).blocks.{n}.{name}", 100) for n in range(3) for name in ("up", "down")]
    held = table(*rows, row("activation", "(Critic).0", 50))
    assert units(held) == ["(Net).blocks.0", "(Net).blocks.1", "(Net).blocks.2", "(Critic).0"]
    assert with_modules_inside(held, units(held)) == ["(Net).blocks.0", "(Net).blocks.1", "(Net).blocks.2"]


def test_the_main_device_has_the_most_of_all_counted_parts() -> None:
    rows = [("cuda:0", "parameter", 60), ("cuda:0", "optimizer", 60), ("cuda:1", "parameter", 100)]
    frame = pd.DataFrame([(*r, "counted") for r in rows], columns=["device", "part", "bytes", "known"])
    more = pd.DataFrame([("cuda:1", "cache", 900, "allocator")], columns=frame.columns)
    assert fp.main_device(pd.concat([frame, more])) == "cuda:0"


# -- closed forms


def adam(parameters: int) -> Footprint:
    """Return a model in mixed precision with Adam: 2 + 2 + 12 bytes a parameter (Rajbhandari et al. 2020)."""
    held = table(
        row("parameter", "layers.0", 2 * parameters, dtype="bfloat16"),
        row("gradient", "layers.0", 2 * parameters, dtype="bfloat16"),
        row("optimizer", "layers.0", 12 * parameters),
    )
    return fp.footprint(held, parts(held) | {"gradient": 2.0 * parameters})  # as the optimizer steps


@pytest.mark.parametrize(("stage", "fixed", "divided"), [(1, 4, 12), (2, 2, 14), (3, 0, 16)])
@pytest.mark.parametrize("ranks", [2, 64])
def test_zero_leaves_what_its_paper_says(stage: int, fixed: int, divided: int, ranks: int) -> None:
    now = adam(7_500_000_000)
    assert now.peak_bytes == 16 * 7.5e9  # 120 GB, the paper's example
    assert fp.sharded(now, stage, ranks).peak_bytes == pytest.approx((fixed + divided / ranks) * 7.5e9)


def layer(path: str, s: int, b: int, h: int, a: int, *, scores: bool = True) -> list[dict[str, object]]:
    """Return a transformer layer's activations in 16 bits, item by item (Korthikanti et al. 2022, section 4.1)."""
    sbh, kept = s * b * h, 5 * a * s * s * b if scores else 0
    sizes = {
        "norm1": ("LayerNorm", 2 * sbh), "attention.qkv": ("Linear", 2 * sbh),
        "attention.core": (
            "Attention", 6 * sbh + kept,
        ),  # queries, keys, values; softmax, its dropout's mask and output
        "attention.out": ("Linear", 2 * sbh), "attention.dropout": ("Dropout", sbh),
        "norm2": ("LayerNorm", 2 * sbh), "mlp.up": ("Linear", 2 * sbh),
        "mlp.gelu": ("GELU", 8 * sbh), "mlp.down": ("Linear", 8 * sbh),
        "mlp.dropout": ("Dropout", sbh),
    }  # fmt: skip
    return [row("activation", f"{path}.{name}", n, kind, dtype="bfloat16") for name, (kind, n) in sizes.items()]


def test_activations_and_full_recomputation_are_those_of_the_paper() -> None:
    s, b, h, a, count = 2_048, 4, 1_024, 16, 24
    held = table(*(r for n in range(count) for r in layer(f"layers.{n}", s, b, h, a)))
    now = fp.footprint(held, parts(held))
    each = s * b * h * (34 + 5 * a * s / h)
    assert now.peak_bytes == pytest.approx(count * each)
    then = fp.checkpointed(now, units(held))
    assert then.moments["forward"]["activation"] == pytest.approx(count * 2 * s * b * h)
    # While a layer is computed again, all of it is there, whatever flows through it.
    assert then.with_rows(flowing=0.0).parts["activation"] == pytest.approx((count - 1) * 2 * s * b * h + each)
    flash = table(*(r for n in range(count) for r in layer(f"layers.{n}", s, b, h, a, scores=False)))
    assert sum(parts(flash).values()) == pytest.approx(count * 34 * s * b * h)


def test_autocast_keeps_softmax_in_32_bits_and_a_copy_of_its_result_in_16() -> None:
    held = table(row("activation", "a.core", 400, "Attention"), row("activation", "a.down", 400))
    wide = fp.footprint(held, parts(held))
    then = fp.autocast(wide, {100: 400.0})
    assert then.moments["forward"]["activation"] == 400 + 200 + 200
    assert fp.autocast(wide).moments["forward"]["activation"] == 400


def test_an_optimizer_in_8_bits_on_the_host_and_on_part_of_the_batches() -> None:
    assert fp.eight_bit(adam(1_000_000)).parts["optimizer"] == pytest.approx(3_000_000 * (1 + 1 / 64))
    assert fp.offloaded(adam(1_000)).peak_bytes == 4_000
    held = table(row("activation", "a", 400))
    stage = fp.other_microbatches(fp.footprint(held, parts(held)), held_now=0.5, held_then=0.125)
    assert stage.peak_bytes == 100


def test_an_optimizer_that_steps_all_tensors_at_once_needs_the_parameters_once_more() -> None:
    held = pd.concat([adam(1_000).held, table(row("activation", "layers.0", 500, dtype="bfloat16"))])
    at_peak = parts(held) | {"temporary": 3_500}
    now = fp.footprint(held, at_peak, stepping=fp.stepping_of(held, {}))
    assert (now.parts["temporary"], now.parts["activation"]) == (2_000, 0)
    # Without it no more than 17,500 are known of, as the backward pass ends: the rest is of that, and grows.
    then = fp.larger_batch(fp.footprint(held, at_peak), 2)
    assert then.peak_bytes == 14_000 + 2 * (500 + 1_000 + 500) + 2_000
    assert fp.larger_batch(now, 1.1).peak_bytes == now.peak_bytes == 18_000


@pytest.mark.parametrize(
    ("facts", "state", "device", "stepping"),
    [
        ({"fused": True}, 800, "cuda:0", 0),
        ({}, 800, "cuda:0", 400),
        ({"foreach": True}, 800, "cpu", 400),
        # Of the largest parameter, the weight of a module with a bias, Adam takes two more.
        ({}, 800, "cpu", 2 * 300),
        ({"foreach": False}, 800, "cuda:0", 2 * 300),
        ({}, 400, "cpu", 0),  # SGD with momentum
        ({}, 0, "cuda:0", 0),  # plain SGD
    ],
)
def test_what_an_optimizer_needs_as_it_steps(
    facts: dict[str, object], state: int, device: str, stepping: float
) -> None:
    made = [row("parameter", "a", 300, tensors=2, device=device), row("parameter", "b", 100, device=device)]
    held = table(*made, row("optimizer", "a", state, device=device))
    assert fp.stepping_of(held, facts) == stepping


# -- the change, really made


@cache
def now(name: str = "transformer") -> Footprint:
    """Return the footprint of a script as it is: what is beyond counted tensors at its peak is temporary."""
    script = SCRIPTS[name]
    held = counted.held(script)
    sizes = parts(held)
    at_peak = sizes | {"temporary": counted.peak(script) - sum(sizes.values())}
    return fp.footprint(held, at_peak, stepping=fp.stepping_of(held, {"foreach": False}))


SCRIPTS = {
    "transformer": Script(),
    "unfused": Script(fused=False),
    "tied": Script(tied=True, batch=1),
    "small batch": Script(batch=1),
    "pictures": Script(pictures=True, batch=16),
}

# Elements of one call's scores, and the bytes of a copy of those of six layers.
_ELEMENTS = 8 * counted.HEADS * counted.LENGTH**2
_SCORES = {_ELEMENTS: 6.0 * 4 * _ELEMENTS}

Change = Callable[[Footprint], Footprint]


def checkpoints(f: Footprint) -> Footprint:
    return fp.checkpointed(f, units(f.held))


def batch(times: float) -> Change:
    return lambda f: fp.larger_batch(f, times)


# Of a script: the change, what it makes of the script, and at which moment its peak is then ("": wherever).
CHANGES: dict[tuple[str, str], tuple[Change, Script, str]] = {
    ("transformer", "twice the batch"): (batch(2), Script(batch=16), ""),
    ("transformer", "half the batch"): (batch(0.5), Script(batch=4), ""),
    ("transformer", "autocast"): (fp.autocast, Script(autocast=True), ""),
    ("transformer", "16 bits"): (fp.in_16_bits, Script(half=True), ""),
    ("transformer", "checkpoints"): (checkpoints, Script(checkpoints=True), ""),
    ("unfused", "fused attention"): (lambda f: fp.fused_attention(f, _SCORES), Script(), "backward"),
    ("unfused", "autocast"): (fp.autocast, Script(fused=False, autocast=True), "backward"),
    ("tied", "autocast"): (fp.autocast, Script(tied=True, batch=1, autocast=True), "backward"),
    ("tied", "checkpoints"): (checkpoints, Script(tied=True, batch=1, checkpoints=True), "update"),
    ("small batch", "checkpoints"): (checkpoints, Script(batch=1, checkpoints=True), "update"),
    # As it is the optimizer's step is its peak, which no batch changes.
    ("pictures", "half the batch"): (batch(0.5), Script(pictures=True, batch=8), "update"),
    ("pictures", "four times the batch"): (batch(4), Script(pictures=True, batch=64), "backward"),
}


# What shows one thing more than another case.
MORE = (
    ("transformer", "half the batch"),
    ("transformer", "16 bits"),
    ("unfused", "autocast"),
    ("tied", "autocast"),
    ("tied", "checkpoints"),
    ("pictures", "half the batch"),
    ("pictures", "four times the batch"),
)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "what"), [pytest.param(*key, marks=[pytest.mark.slow] * (key in MORE)) for key in CHANGES]
)
def test_the_changed_script_holds_what_was_predicted(name: str, what: str) -> None:
    change, script, moment = CHANGES[name, what]
    then = change(now(name))
    assert then.peak_bytes == pytest.approx(counted.peak(script), rel=0.03 if moment else 0.02)
    fullest = max(then.moments, key=lambda m: sum(then.moments[m].values()))
    assert fullest.startswith(moment)


@pytest.mark.long
def test_the_largest_batch_that_fits_is_where_the_memory_is_full() -> None:
    most = fp.most_times(now(), 500e6)
    assert fp.larger_batch(now(), most).peak_bytes == pytest.approx(500e6)
    # What stays is more than there is: no batch fits.
    assert fp.most_times(now(), 10e6) == 0.0


def test_layers_that_repeat_are_what_is_checkpointed_and_sharded() -> None:
    assert units(now().held) == [f"layers.{n}" for n in range(6)]
    head = (counted.WIDTH + 1) * counted.WORDS + counted.WORDS * counted.WIDTH + 2 * counted.WIDTH
    assert largest_unit(now().held, units(now().held)) == 4 * head  # what lies in no layer is a unit, too


@pytest.mark.slow
def test_a_rank_of_fsdp_holds_what_was_predicted() -> None:
    modules = units(now().held)
    then = fp.sharded(now(), 3, 2, largest_unit(now().held, modules))
    assert then.peak_bytes == pytest.approx(counted.peak_of_fsdp(2), rel=0.05)
