"""Attention in memory: found with what fused kernels would leave, silent on them and on short ones, else abstaining."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.compute.rules.unfused_attention import RULE
from dlprof.result import Outcome, Setting
from tests.fixtures import operators, runs, traces
from tests.fixtures.asking import ask
from tests.fixtures.runs import MS

US = 1_000
A100 = "NVIDIA A100-SXM4-80GB"
BF16 = "c10::BFloat16"


def trained(
    folder: Path,
    *,
    length: int = 4096,
    dtype: str = BF16,
    device: str = A100,
    between: tuple[str, ...] = ("aten::mul", "aten::masked_fill_"),
    fused: bool = False,
    shapes: bool = True,
    waits: bool = True,
    took: int = 5 * MS,
    **facts: Any,
) -> Path:
    """Write three steps of 40 ms: attention of 16 heads, `took` ns a kernel, and 10 ms; the host waits, or is late."""
    heads = [[16, length, 64], [16, 64, length]], [[16, length, length], [16, length, 64]]
    inner = [
        ("aten::bmm", heads[0]),
        *((name, []) for name in between),
        ("aten::_softmax", []),
        ("aten::bmm", heads[1]),
    ]
    ops = [("aten::_scaled_dot_product_flash_attention", [])] if fused else inner
    events: list[Any] = []
    for n in range(3):
        t, number = n * 40 * MS, 100 * n
        events.append(traces.step(n, t, 40 * MS))
        done = t
        for place, (name, dims) in enumerate([*ops, ("aten::add", [])]):
            at = t + place * 100 * US if waits else done
            args = {"Input Dims": dims, "Input type": [dtype] * 2} if dims and shapes else {}
            events.append(traces.op(name, at, 80 * US, **args))
            kernel = "void flash_fwd_kernel<Flash_fwd_kernel_traits<64>>" if fused else name
            dur = 10 * MS if name == "aten::add" else took
            done = max(done, at + 10 * US)
            events += traces.launched(kernel, at + US, done, dur, number + place + 1)
            done += dur
        events += [traces.call("cudaStreamSynchronize", t + 2 * MS, 37 * MS, number + 99)] if waits else []
    made = traces.trace(*events, world_size=1, device=device)
    if not facts:
        return runs.foreign(folder / "traces", made)
    return runs.recorded(folder / "run", (made, [], {"device": {"type": "cuda", "name": device}, **facts}))


def test_found_with_what_a_fused_kernel_leaves(tmp_path: Path) -> None:
    found = ask(RULE, trained(tmp_path))
    assert found.state == "found"
    # Two products of 16 × 4096² × 64 at a quarter of 312 TFLOP/s.
    fused = 2 * 16 * 4096**2 * 128 / (312e12 / 4) * 1e9
    assert found.saving_ns == pytest.approx(25 * MS - fused, rel=1e-3)
    assert (found.ranks, [cost.ns for cost in found.by_rank]) == ((0,), [found.saving_ns])
    assert "scaled_dot_product_attention(q, k, v, is_causal=True or attn_mask=…)" in found.advice[0]
    assert found.changes[1].settings == (
        Setting("attn_implementation", None, "sdpa"),
        Setting("need_weights", to=False),
    )
    assert not any(change.numerics for change in found.changes)
    assert found.evidence is not None
    assert found.evidence.rows[0][:4] == ("forward", "16x4096x64 16x4096x64", "bfloat16", 1)
    assert found.evidence.rows[0][4:] == (25 * MS, pytest.approx(fused))
    assert found.evidence.columns[4:] == ("takes_ns", "fused, at most_ns")


@pytest.mark.parametrize(
    ("model", "leads"),
    [
        ({"class": "GPT2LMHeadModel", "attention": "eager"}, "is eager"),
        # An older recording does not say it; a model of the script's own has another name.
        ({"class": "BertForSequenceClassification"}, "BertForSequenceClassification is made"),
        ({"class": "GPT2LMHeadModel", "attention": "sdpa"}, "scaled_dot_product_attention(q, k, v"),
        ({"class": "Transformer"}, "scaled_dot_product_attention(q, k, v"),
    ],
)
def test_a_model_of_transformers_is_told_how_it_is_made(tmp_path: Path, model: dict[str, Any], leads: str) -> None:
    found = ask(RULE, trained(tmp_path, models=[model]))
    assert leads in found.advice[0]
    assert ("attn_implementation" in found.advice[0]) == (leads.startswith("is ") or leads.endswith("made"))


def test_fused_attention_is_left_alone(tmp_path: Path) -> None:
    clear = ask(RULE, trained(tmp_path, fused=True))
    assert (clear.state, clear.share) == ("clear", 0)


def test_short_sequences_are_left_alone(tmp_path: Path) -> None:
    assert ask(RULE, trained(tmp_path, length=64)).state == "clear"


def test_a_host_that_launches_no_faster_would_gain_nothing(tmp_path: Path) -> None:
    clear = ask(RULE, trained(tmp_path, waits=False))
    assert (clear.state, clear.share) == ("clear", 0)


@pytest.mark.parametrize(
    ("device", "dtype"), [("Some GPU 9", BF16), ("Tesla V100-SXM2-16GB", "c10::Half"), (A100, "float")]
)
def test_where_nobody_knows_how_fast_it_would_be_it_tells_the_time_and_abstains(
    tmp_path: Path, device: str, dtype: str
) -> None:
    answer = ask(RULE, trained(tmp_path, device=device, dtype=dtype))
    assert answer.state == "not_measured"
    assert "how fast a fused kernel is on this device" in answer.why
    assert answer.why.startswith("attention that keeps its scores in memory takes 6")


def test_where_nobody_knows_it_a_short_one_is_left_alone_with_all_of_its_time(tmp_path: Path) -> None:
    clear = ask(RULE, trained(tmp_path, device="Some GPU 9", took=100 * US))
    assert clear.state == "clear"
    # Five kernels of 0.1 ms in 40 ms: fused, it would save no more.
    assert clear.share == pytest.approx(0.0125)
    assert "takes 1.2 % of the step" in clear.summary


def test_without_shapes_it_abstains_and_takes_those_of_a_counted_step(tmp_path: Path) -> None:
    answer = ask(RULE, trained(tmp_path / "none", shapes=False))
    assert (answer.state, "record_shapes=True" in answer.why) == ("not_measured", True)
    told = [("16x4096x64 16x64x4096", 1), ("16x4096x4096 16x4096x64", 1)]
    counted = [
        {"operator": "aten::bmm", "dtype": "bfloat16", "shape": shape, "calls": calls, "flops": 1, "bytes": 1}
        for shape, calls in told
    ]
    flops = {"state": "counted", "total": 2, "shapes": counted}
    assert ask(RULE, trained(tmp_path / "counted", shapes=False, flops=flops)).state == "found"


def test_what_sdpa_cannot_express_is_named(tmp_path: Path) -> None:
    found = ask(RULE, trained(tmp_path, between=("aten::tanh", "aten::mul")))
    assert "flex_attention" in found.advice[0]
    assert "tanh" in found.advice[0]


# A product, scaling, a mask, the softmax and a product, and their gradients, of 2 ms each.
FORWARD = ("aten::bmm", "aten::div", "aten::masked_fill", "aten::_softmax", "aten::bmm")
BACK = (
    "aten::bmm",
    "aten::bmm",
    "aten::_softmax_backward_data",
    "aten::masked_fill",
    "aten::div",
    "aten::bmm",
    "aten::bmm",
)
SHAPES = [("16x512x64 16x64x512", 2), ("16x512x512 16x512x64", 3), ("16x64x512 16x512x512", 1)]


def on_a_cpu(folder: Path, *, forward: tuple[str, ...] = FORWARD, counted: bool = True) -> Outcome:
    rows = [
        {"operator": "aten::bmm", "dtype": "float32", "shape": s, "calls": n, "flops": 1, "bytes": 1} for s, n in SHAPES
    ]
    flops = {"state": "counted", "total": 1, "shapes": rows} if counted else {}
    called = operators.times((*forward, *BACK), 2 * MS)
    return ask(RULE, operators.job(folder, *called, on_cpu=True, flops=flops))


def test_on_a_cpu_the_products_are_what_a_fused_kernel_takes(tmp_path: Path) -> None:
    found = on_a_cpu(tmp_path)
    assert found.state == "found"
    # Two products of five operators forward, four of seven backward; 15 % longer than the products alone.
    assert found.saving_ns == pytest.approx((5 + 7 - 6 * 1.15) * 2 * MS, rel=0.01)
    assert "measured on a CPU" in found.sure


def test_on_a_cpu_dropout_leaves_nothing_to_gain(tmp_path: Path) -> None:
    clear = on_a_cpu(tmp_path, forward=(*FORWARD[:-1], "aten::native_dropout", "aten::bmm"))
    assert (clear.state, clear.share) == ("clear", 0)


def test_on_a_cpu_it_abstains_without_shapes_for_short_sequences_gain_nothing(tmp_path: Path) -> None:
    answer = on_a_cpu(tmp_path, counted=False)
    assert (answer.state, "neither traced" in answer.why) == ("not_measured", True)


@pytest.mark.parametrize(
    ("width", "between", "why"),
    [
        (512, (), "512 wide"),
        (36, (), "no multiple of 8"),
        (64, ("aten::add",), "a mask"),
        (64, (), "found no fused kernel. `"),
    ],
)
def test_what_left_sdpa_without_a_fused_kernel_is_named(
    tmp_path: Path, width: int, between: tuple[str, ...], why: str
) -> None:
    heads = [[16, 1024, width], [16, width, 1024]], [[16, 1024, 1024], [16, 1024, width]]
    inner = [
        ("aten::bmm", heads[0]),
        *((name, []) for name in between),
        ("aten::_softmax", []),
        ("aten::bmm", heads[1]),
    ]
    events: list[Any] = [traces.op("aten::_scaled_dot_product_attention_math", 0, 900 * US)]
    for place, (name, dims) in enumerate(inner):
        args = {"Input Dims": dims, "Input type": [BF16] * 2} if dims else {}
        events.append(traces.op(name, (1 + place * 100) * US, 80 * US, **args))
        events += traces.launched(name, (2 + place * 100) * US, (2 + place * 5000) * US, 5 * MS, place + 1)
    events += [traces.call("cudaStreamSynchronize", 2 * MS, 37 * MS, 99)]
    made = traces.trace(traces.step(0, 0, 40 * MS), *events, world_size=1, device=A100)
    found = ask(RULE, runs.foreign(tmp_path / "traces", made))
    assert found.state == "found"
    assert why in found.advice[0]
