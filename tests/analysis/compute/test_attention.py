"""Attention with its scores in memory, in traces that torch itself makes: its operators, with a kernel for each."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from dlprof.analysis.compute.attention import FUSED_SHARE, attention
from dlprof.analysis.engine import RankData
from dlprof.read.run import open_run
from tests.fixtures import operators, runs, traces
from tests.fixtures.operators import A100
from tests.fixtures.runs import MS

US = 1_000
BATCH, HEADS, LENGTH, WIDTH = 2, 2, 128, 16
KERNEL = 10 * US  # every kernel's length


def profiled(folder: Path, build: Callable[[Any], tuple[Any, Any]], shapes: bool = True) -> RankData:
    """Trace forward and backward of what `build` gives of torch: a module and its input."""
    torch = pytest.importorskip("torch")
    module, x = build(torch)
    return operators.profiled(torch, folder, lambda: module(x).sum().backward(), kernel=KERNEL, shapes=shapes)


def self_attention(how: str) -> Callable[[Any], tuple[Any, Any]]:
    """Build a self-attention of torch: its scores by hand, or by one of torch's own ways."""

    def build(torch: Any) -> tuple[Any, Any]:
        width = HEADS * WIDTH
        project, mask = torch.nn.Linear(width, 3 * width), torch.ones(LENGTH, LENGTH).tril() == 0
        out = torch.nn.Linear(width, width)

        def forward(x: Any) -> Any:
            q, k, v = project(x).view(BATCH, LENGTH, 3, HEADS, WIDTH).permute(2, 0, 3, 1, 4)
            if how == "sdpa":
                y = torch.nn.functional.scaled_dot_product_attention(q, k, v)
            elif how == "math":
                with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
                    y = torch.nn.functional.scaled_dot_product_attention(q, k, v)
            else:
                scores = (q @ k.transpose(-2, -1)) / WIDTH**0.5
                scores = scores.tanh() if how == "capped" else scores
                scores = scores.masked_fill(mask, float("-inf"))
                y = torch.nn.functional.dropout(scores.softmax(-1), 0.1) @ v
            return out(y.transpose(1, 2).reshape(BATCH, LENGTH, width))

        return forward, torch.randn(BATCH, LENGTH, width)

    return build


def found(rank: RankData) -> pd.DataFrame:
    return rank.once(attention)


def test_scores_by_hand_are_found_forward_and_backward(tmp_path: Path) -> None:
    frame = found(profiled(tmp_path, self_attention("by hand")))
    assert sorted(frame["passes"]) == ["backward", "forward"]
    assert set(frame["shape"]) == {f"{BATCH * HEADS}x{LENGTH}x{WIDTH} {BATCH * HEADS}x{LENGTH}x{WIDTH}"}
    assert frame["calls"].to_list() == [1, 1]
    (forward,) = frame[frame["passes"] == "forward"].to_dict("records")
    # Two products, scaling, the mask, the softmax, dropout: six kernels at the least.
    assert forward["ns"] >= 6 * KERNEL
    assert {"aten::_softmax", "aten::bmm"} <= set(forward["between"].split())
    assert (frame["math"] == 0).all()
    # In float32, of whose fused kernels nobody gives the speed.
    assert forward["dtype"] == "float32"
    assert math.isnan(forward["fused_ns"])


def test_fused_attention_is_none(tmp_path: Path) -> None:
    assert not len(found(profiled(tmp_path, self_attention("sdpa"))))


def test_sdpa_without_a_fused_kernel_is_told_as_such(tmp_path: Path) -> None:
    frame = found(profiled(tmp_path, self_attention("math")))
    assert dict(zip(frame["passes"], frame["math"], strict=True))["forward"] == 1


def test_a_function_of_the_scores_is_among_what_lies_between(tmp_path: Path) -> None:
    frame = found(profiled(tmp_path, self_attention("capped")))
    assert "aten::tanh" in dict(zip(frame["passes"], frame["between"], strict=True))["forward"].split()


def test_multihead_attention_that_gives_its_weights_is_found(tmp_path: Path) -> None:
    def build(torch: Any) -> tuple[Any, Any]:
        module = torch.nn.MultiheadAttention(32, 2, batch_first=True)
        return (lambda x: module(x, x, x, need_weights=True)[0]), torch.randn(2, LENGTH, 32)

    assert sorted(found(profiled(tmp_path, build))["passes"]) == ["backward", "forward"]


@pytest.mark.parametrize("shapes", [True, False])
def test_a_classifiers_and_a_routers_softmax_are_no_attention(tmp_path: Path, shapes: bool) -> None:
    def build(torch: Any) -> tuple[Any, Any]:
        router, experts = torch.nn.Linear(32, 4), torch.nn.Parameter(torch.randn(4, 32, 256))

        def forward(x: Any) -> Any:
            weights = router(x).softmax(-1)  # between a product and a batched one
            y = torch.bmm(x.expand(4, 256, 32), experts)
            classes = (y * weights.t()[:, :, None]).sum(0).softmax(-1)  # and after the last
            return torch.nn.functional.nll_loss(classes.log(), torch.zeros(256, dtype=torch.long))

        return forward, torch.randn(256, 32)

    assert not len(found(profiled(tmp_path, build, shapes)))


def test_short_sequences_are_left_out(tmp_path: Path) -> None:
    def build(torch: Any) -> tuple[Any, Any]:
        x = torch.randn(64, LENGTH // 2, 32, requires_grad=True)
        return (lambda q: (q @ x.transpose(1, 2)).softmax(-1) @ x), torch.randn(64, LENGTH, 32)

    assert not len(found(profiled(tmp_path, build)))


def test_without_shapes_those_of_the_counted_step_count(tmp_path: Path) -> None:
    rank = profiled(tmp_path, self_attention("by hand"), shapes=False)
    assert set(found(rank)["shape"]) == {""}
    assert found(rank)["fused_ns"].isna().all()
    whole = json.loads((tmp_path / "trace.json").read_text())
    batched = [("4x128x16 4x16x128", 2), ("4x128x128 4x128x16", 3), ("4x16x128 4x128x128", 1), ("9x64x64 9x64x7", 1)]
    counted = [
        {"operator": "aten::bmm", "dtype": "bfloat16", "shape": shape, "calls": calls, "flops": 1, "bytes": 1}
        for shape, calls in batched
    ]
    facts = {"device": {"type": "cuda", "name": A100}, "flops": {"state": "counted", "total": 1, "shapes": counted}}
    path = runs.recorded(tmp_path / "run", (whole, [], facts))
    frame = found(RankData(open_run(path).ranks[0]))
    assert set(frame["shape"]) == {"4x128x16 4x128x16"}
    assert set(frame["dtype"]) == {"bfloat16"}
    # Counted products that do not fit each other are no attention.
    facts["flops"] = {"state": "counted", "total": 1, "shapes": counted[-1:]}
    path = runs.recorded(tmp_path / "other", (whole, [], facts))
    assert not len(found(RankData(open_run(path).ranks[0])))


def test_products_of_gradients_are_not_taken_for_those_of_scores(tmp_path: Path) -> None:
    # As a step on two layers was counted: 512 places, heads 32 wide. The second makes what the first takes, too.
    batched = [("16x512x512 16x512x32", 6), ("16x512x32 16x32x512", 4), ("16x32x512 16x512x512", 2)]
    counted = [
        {"operator": "aten::bmm", "dtype": "bfloat16", "shape": shape, "calls": calls, "flops": 1, "bytes": 1}
        for shape, calls in batched
    ]
    rank = profiled(tmp_path, self_attention("by hand"), shapes=False)
    assert len(found(rank))
    whole = json.loads((tmp_path / "trace.json").read_text())
    facts = {"device": {"type": "cuda", "name": A100}, "flops": {"state": "counted", "total": 1, "shapes": counted}}
    path = runs.recorded(tmp_path / "run", (whole, [], facts))
    assert set(found(RankData(open_run(path).ranks[0]))["shape"]) == {"16x512x32 16x512x32"}


def test_what_a_fused_kernel_takes_goes_by_arithmetic_and_type(tmp_path: Path) -> None:
    events = scores(16, 4096, 64, "c10::BFloat16", 0)
    made = traces.trace(traces.step(0, 0, 40 * MS), *events, world_size=1, device=A100)
    (row,) = found(runs.rank_of(tmp_path, made)).to_dict("records")
    assert row["ns"] == 30 * MS
    assert row["fused_ns"] == pytest.approx(2 * 16 * 4096**2 * (64 + 64) / (312e12 * FUSED_SHARE) * 1e9)


def scores(batch: int, length: int, width: int, dtype: str, at: int) -> list[Any]:
    """Return one forward pass on a device: a product, the softmax and a product, of 10 ms each."""
    product = [[batch, length, width], [batch, width, length]]
    second = [[batch, length, length], [batch, length, width]]
    named = (("aten::bmm", product), ("aten::_softmax", [second[0], [], []]), ("aten::bmm", second))
    events: list[Any] = []
    for n, (name, dims) in enumerate(named):
        start = at + n * 50 * US
        events.append(traces.op(name, start, 40 * US, **{"Input Dims": dims, "Input type": [dtype] * len(dims)}))
        events += traces.launched("kernel", start + US, at + 200 * US + n * 10 * MS, 10 * MS, at // US + n + 1)
    return events
