"""What a change would do to memory: closed forms of the papers, and the same script with the change, really run."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pandas as pd
import pytest

from dlprof.analysis.memory import footprint as fp
from dlprof.analysis.memory.footprint import Footprint
from dlprof.analysis.memory.snapshot import largest_unit, units
from tests.fixtures import counted
from tests.fixtures.counted import Script
from tests.fixtures.holding import row


def table(*rows: dict[str, object]) -> pd.DataFrame:
    return pd.DataFrame(list(rows))


def parts(held: pd.DataFrame) -> dict[str, float]:
    """Return all that a table holds at once, but for the gradients: the end of a forward pass."""
    sums = held.groupby("part")["bytes"].sum().astype(float).to_dict()
    return {str(part): n for part, n in sums.items() if part != "gradient"}


# -- closed forms


def adam(parameters: int) -> Footprint:
    """Return a model in mixed precision with Adam: 2 + 2 + 12 bytes a parameter (Rajbhandari et al. 2020)."""
    held = table(
        row("parameter", "layers.0", 2 * parameters, dtype="bfloat16"),
        row("gradient", "layers.0", 2 * parameters, dtype="bfloat16"),
        row("optimizer", "layers.0", 12 * parameters),
    )
    gradient = float(held.loc[held["part"] == "gradient", "bytes"].sum())
    return fp.footprint(held, parts(held) | {"gradient": gradient})  # as the optimizer steps


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
        "norm1": ("LayerNorm", 2 * sbh),
        "attention.qkv": ("Linear", 2 * sbh),
        "attention.core": (
            "Attention",
            6 * sbh + kept,
        ),  # queries, keys, values; softmax, its dropout's mask and output
        "attention.out": ("Linear", 2 * sbh),
        "attention.dropout": ("Dropout", sbh),
        "norm2": ("LayerNorm", 2 * sbh),
        "mlp.up": ("Linear", 2 * sbh),
        "mlp.gelu": ("GELU", 8 * sbh),
        "mlp.down": ("Linear", 8 * sbh),
        "mlp.dropout": ("Dropout", sbh),
    }
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

CHANGES: dict[str, tuple[Callable[[Footprint], Footprint], Script]] = {
    "a batch twice as large": (lambda f: fp.larger_batch(f, 2), Script(batch=16)),
    "a batch five times as large": (lambda f: fp.larger_batch(f, 5), Script(batch=40)),
    "half the batch": (lambda f: fp.larger_batch(f, 0.5), Script(batch=4)),
    "autocast": (fp.autocast, Script(autocast=True)),
    "the model in 16 bits": (fp.in_16_bits, Script(half=True)),
    "checkpoints": (lambda f: fp.checkpointed(f, units(f.held)), Script(checkpoints=True)),
    "SGD with momentum": (fp.one_moment, Script(adam=False)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_the_changed_script_holds_what_was_predicted(name: str) -> None:
    change, script = CHANGES[name]
    assert change(now()).peak_bytes == pytest.approx(counted.peak(script), rel=0.02)


# Of other scripts: the change, what it makes of the script, and at which moment its peak is then.
OTHERS: dict[tuple[str, str], tuple[Callable[[Footprint], Footprint], Script, str]] = {
    ("unfused", "fused attention"): (lambda f: fp.fused_attention(f, _SCORES), Script(), "backward"),
    ("unfused", "autocast"): (fp.autocast, Script(fused=False, autocast=True), "backward"),
    ("tied", "autocast"): (fp.autocast, Script(tied=True, batch=1, autocast=True), "backward"),
    ("tied", "checkpoints"): (
        lambda f: fp.checkpointed(f, units(f.held)),
        Script(tied=True, batch=1, checkpoints=True),
        "update",
    ),
    ("small batch", "checkpoints"): (
        lambda f: fp.checkpointed(f, units(f.held)),
        Script(batch=1, checkpoints=True),
        "update",
    ),
    # As it is the optimizer's step is its peak, which no batch changes.
    ("pictures", "half the batch"): (lambda f: fp.larger_batch(f, 0.5), Script(pictures=True, batch=8), "update"),
    ("pictures", "four times the batch"): (
        lambda f: fp.larger_batch(f, 4),
        Script(pictures=True, batch=64),
        "backward",
    ),
}


@pytest.mark.parametrize(("name", "what"), OTHERS)
def test_other_scripts_with_a_change_hold_what_was_predicted(name: str, what: str) -> None:
    change, script, moment = OTHERS[name, what]
    then = change(now(name))
    assert then.peak_bytes == pytest.approx(counted.peak(script), rel=0.03)
    fullest = max(then.moments, key=lambda m: sum(then.moments[m].values()))
    assert fullest.partition(" ")[0] == moment


def test_autocast_keeps_softmax_in_32_bits_and_a_copy_of_its_result_in_16() -> None:
    held = table(row("activation", "a.core", 400, "Attention"), row("activation", "a.down", 400))
    wide = fp.footprint(held, parts(held))
    then = fp.autocast(wide, {100: 400.0})
    assert then.moments["forward"]["activation"] == 400 + 200 + 200
    assert fp.autocast(wide).moments["forward"]["activation"] == 400


def test_the_largest_batch_that_fits_is_where_the_memory_is_full() -> None:
    most = fp.most_times(now(), 500e6)
    assert fp.larger_batch(now(), most).peak_bytes == pytest.approx(500e6)
    # What stays is more than there is: no batch fits.
    assert fp.most_times(now(), 10e6) == 0.0


def test_layers_that_repeat_are_what_is_checkpointed_and_sharded() -> None:
    assert units(now().held) == [f"layers.{n}" for n in range(6)]
    head = (counted.WIDTH + 1) * counted.WORDS + counted.WORDS * counted.WIDTH + 2 * counted.WIDTH
    assert largest_unit(now().held, units(now().held)) == 4 * head  # what lies in no layer is a unit, too


def test_a_state_in_8_bits_is_a_quarter_and_its_scales() -> None:
    then = fp.eight_bit(adam(1_000_000))
    assert then.parts["optimizer"] == pytest.approx(3_000_000 * (1 + 1 / 64))


def test_an_optimizer_on_the_host_leaves_nothing_of_its_state() -> None:
    assert fp.offloaded(adam(1_000)).peak_bytes == 4_000


def test_an_optimizer_that_steps_all_tensors_at_once_needs_the_parameters_once_more() -> None:
    held = pd.concat([adam(1_000).held, table(row("activation", "layers.0", 500, dtype="bfloat16"))])
    at_peak = parts(held) | {"temporary": 3_500}
    now = fp.footprint(held, at_peak, stepping=fp.stepping_of(held, {}))
    assert (now.parts["temporary"], now.parts["activation"]) == (2_000, 0)
    # Without it no more than 17,500 are known of, as the backward pass ends: the rest is of that, and grows.
    then = fp.larger_batch(fp.footprint(held, at_peak), 2)
    assert then.peak_bytes == 14_000 + 2 * (500 + 1_000 + 500) + 2_000
    assert fp.larger_batch(now, 1.1).peak_bytes == now.peak_bytes == 18_000


@pytest.mark.long
def test_a_rank_of_fsdp_holds_what_was_predicted() -> None:
    modules = units(now().held)
    then = fp.sharded(now(), 3, 2, largest_unit(now().held, modules))
    assert then.peak_bytes == pytest.approx(counted.peak_of_fsdp(2), rel=0.05)
