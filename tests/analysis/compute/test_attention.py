"""Attention with its scores in memory: found in what torch itself traces, and what fused kernels would leave of it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from dlprof.analysis.compute.attention import FUSED_SHARE, attention, fused_share
from dlprof.analysis.compute.rules import masked_attention, unfused_attention
from dlprof.analysis.estimate import Rule
from tests.fixtures import operators, runs, traces
from tests.fixtures.operators import A100
from tests.fixtures.ruled import Case, check, clear, found, jobs, table, unmeasured
from tests.fixtures.runs import MS

US = 1_000
BATCH, HEADS, LENGTH, WIDTH = 2, 2, 128, 16
KERNEL = 10 * US  # every kernel's length
BF16 = "c10::BFloat16"

Build = Callable[[Any], tuple[Any, Any]]


def profiled(folder: Path, build: Build, shapes: bool = True) -> pd.DataFrame:
    """Trace forward and backward of what `build` gives of torch, a module and its input, and find attention in it."""
    torch = pytest.importorskip("torch")
    module, x = build(torch)
    run = lambda: module(x).sum().backward()  # noqa: E731
    return operators.profiled(torch, folder, run, kernel=KERNEL, shapes=shapes).once(attention)


def self_attention(how: str) -> Build:
    """Build a self-attention of torch: its scores by hand, or by one of torch's own ways."""

    def build(torch: Any) -> tuple[Any, Any]:
        width = HEADS * WIDTH
        project, mask = torch.nn.Linear(width, 3 * width), torch.ones(LENGTH, LENGTH).tril() == 0
        out = torch.nn.Linear(width, width)

        def forward(x: Any) -> Any:
            q, k, v = project(x).view(BATCH, LENGTH, 3, HEADS, WIDTH).permute(2, 0, 3, 1, 4)
            if how == "math":
                with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
                    y = torch.nn.functional.scaled_dot_product_attention(q, k, v)
            else:
                scores = ((q @ k.transpose(-2, -1)) / WIDTH**0.5).tanh()
                scores = scores.masked_fill(mask, float("-inf"))
                y = torch.nn.functional.dropout(scores.softmax(-1), 0.1) @ v
            return out(y.transpose(1, 2).reshape(BATCH, LENGTH, width))

        return forward, torch.randn(BATCH, LENGTH, width)

    return build


def router(torch: Any) -> tuple[Any, Any]:
    """Build a softmax of a router, between a product and a batched one, and one of a classifier, after the last."""
    route, experts = torch.nn.Linear(32, 4), torch.nn.Parameter(torch.randn(4, 32, 256))

    def forward(x: Any) -> Any:
        weights = route(x).softmax(-1)
        y = torch.bmm(x.expand(4, 256, 32), experts)
        classes = (y * weights.t()[:, :, None]).sum(0).softmax(-1)
        return torch.nn.functional.nll_loss(classes.log(), torch.zeros(256, dtype=torch.long))

    return forward, torch.randn(256, 32)


def test_scores_by_hand_are_found_forward_and_backward(tmp_path: Path) -> None:
    frame = profiled(tmp_path, self_attention("by hand"))
    assert sorted(frame["passes"]) == ["backward", "forward"]
    assert set(frame["shape"]) == {f"{BATCH * HEADS}x{LENGTH}x{WIDTH} {BATCH * HEADS}x{LENGTH}x{WIDTH}"}
    assert frame["calls"].to_list() == [1, 1]
    (forward,) = frame[frame["passes"] == "forward"].to_dict("records")
    # Two products, scaling, its own function, the mask, the softmax, dropout: seven kernels at the least.
    assert forward["ns"] >= 7 * KERNEL
    assert {"aten::_softmax", "aten::bmm", "aten::tanh"} <= set(forward["between"].split())
    assert (frame["math"] == 0).all()
    # In float32, of whose fused kernels nobody gives the speed.
    assert forward["dtype"] == "float32"
    assert math.isnan(forward["fused_ns"])


@pytest.mark.parametrize("shapes", [True, False])
def test_the_softmax_of_a_router_or_a_classifier_is_no_attention(tmp_path: Path, shapes: bool) -> None:
    assert profiled(tmp_path, router, shapes).empty


def test_sdpa_without_a_fused_kernel_is_told_as_such(tmp_path: Path) -> None:
    frame = profiled(tmp_path, self_attention("math"))
    assert frame.set_index("passes")["math"].to_dict() == {"forward": 1, "backward": 0}


def counted(*batched: tuple[str, int]) -> dict[str, Any]:
    shapes = [
        {"operator": "aten::bmm", "dtype": "bfloat16", "shape": shape, "calls": calls, "flops": 1, "bytes": 1}
        for shape, calls in batched
    ]
    return {"flops": {"state": "counted", "total": 1, "shapes": shapes}}


def test_without_shapes_those_of_the_counted_step_count(tmp_path: Path) -> None:
    traced = profiled(tmp_path, self_attention("by hand"), shapes=False)
    assert set(traced["shape"]) == {""}
    assert traced["fused_ns"].isna().all()
    whole = json.loads((tmp_path / "trace.json").read_text())
    other = ("9x64x64 9x64x7", 1)
    for name, shapes, seen in (
        (
            "one",
            [("4x128x16 4x16x128", 2), ("4x128x128 4x128x16", 3), ("4x16x128 4x128x128", 1), other],
            {"4x128x16 4x128x16"},
        ),
        # Of two layers, 512 places, heads 32 wide: the second makes what the first takes, too.
        (
            "gradients",
            [("16x512x512 16x512x32", 6), ("16x512x32 16x32x512", 4), ("16x32x512 16x512x512", 2)],
            {"16x512x32 16x512x32"},
        ),
        ("none that fit each other", [other], set()),
    ):
        facts = {"device": {"type": "cuda", "name": A100}, **counted(*shapes)}
        frame = operators.rank_of(runs.recorded(tmp_path / name, (whole, [], facts))).once(attention)
        assert set(frame["shape"]) == seen, name
        assert set(frame["dtype"]) == {"bfloat16"} if seen else frame.empty


def on_a_device(called: Sequence[tuple[str, Any]], device: str = A100) -> dict[str, Any]:
    """Return a step whose operators each launch a kernel of 10 ms."""
    events: list[Any] = [traces.step(0, 0, 90 * MS)]
    for n, (name, dims) in enumerate(called):
        start = n * 50 * US
        events.append(traces.op(name, start, 40 * US, **{"Input Dims": dims, "Input type": [BF16] * len(dims)}))
        events += traces.launched("kernel", start + US, 900 * US + n * 10 * MS, 10 * MS, n + 1)
    return traces.trace(*events, world_size=1, device=device)


@pytest.mark.parametrize(
    ("batch", "length", "products", "backward", "least_s"),
    [
        (16, 4096, 2, False, 2 * 16 * 4096**2 * (64 + 32) / 312e12),
        (16, 4096, 5, True, 2 * 16 * 4096**2 * (3 * 64 + 2 * 64) / 312e12),
        # Queries, keys, values and the result, of 2 bytes, are moved once; backward their gradients as well.
        (16384, 128, 2, False, 16384 * (128 + 128) * (64 + 32) * 2 / 2.039e12),
        (16384, 128, 5, True, 16384 * (128 + 128) * (64 + 64) * 2 * 2 / 2.039e12),
    ],
    ids=["arithmetic", "arithmetic backward", "memory", "memory backward"],
)
def test_what_a_fused_kernel_takes(
    tmp_path: Path, batch: int, length: int, products: int, backward: bool, least_s: float
) -> None:
    makes = ("aten::bmm", [[batch, length, 64], [batch, 64, length]])
    takes = ("aten::bmm", [[batch, length, length], [batch, length, 64 if backward else 32]])
    softmax = ("aten::_softmax_backward_data" if backward else "aten::_softmax", [takes[1][0]])
    called = [takes, makes, softmax, takes, takes] if backward else [makes, softmax, takes]
    (row,) = runs.rank_of(tmp_path, on_a_device(called)).once(attention).to_dict("records")
    assert (row["passes"], row["ns"]) == (
        "backward" if backward else "forward",
        (products if backward else 3) * 10 * MS,
    )
    assert row["fused_ns"] == pytest.approx(least_s / FUSED_SHARE * 1e9)


@pytest.mark.parametrize(
    ("device", "torch", "share"),
    [
        (A100, None, 0.25),
        (A100, (2, 1), 0.25),
        (A100, (2, 2), 0.5),
        ("NVIDIA H100 80GB HBM3", (2, 9), 0.35),
        ("NVIDIA GeForce RTX 4090", (2, 9), 0.5),
        ("AMD Instinct MI300X", (2, 9), 0.25),
        ("NVIDIA B200", (2, 9), 0.25),
    ],
)
def test_which_share_of_its_peak_a_fused_kernel_reaches(
    device: str, torch: tuple[int, int] | None, share: float
) -> None:
    assert fused_share(device, torch) == share


# ---- the rule ------------------------------------------------------------------------------------------------------


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
    inner = attended(length, 64, between)
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


def attended(length: int, width: int, between: Sequence[str]) -> list[tuple[str, Any]]:
    """Return the operators of 16 heads of attention, with the shapes of its products."""
    makes, takes = [[16, length, width], [16, width, length]], [[16, length, length], [16, length, width]]
    return [("aten::bmm", makes), *((name, []) for name in between), ("aten::_softmax", []), ("aten::bmm", takes)]


def by_math(folder: Path, width: int, *between: str) -> Path:
    """Write SDPA that found no fused kernel: its operators lie within its own."""
    events: list[Any] = [traces.op("aten::_scaled_dot_product_attention_math", 0, 900 * US)]
    for place, (name, dims) in enumerate(attended(1024, width, between)):
        args = {"Input Dims": dims, "Input type": [BF16] * 2} if dims else {}
        events.append(traces.op(name, (1 + place * 100) * US, 80 * US, **args))
        events += traces.launched(name, (2 + place * 100) * US, (2 + place * 5000) * US, 5 * MS, place + 1)
    events += [traces.call("cudaStreamSynchronize", 2 * MS, 37 * MS, 99)]
    made = traces.trace(traces.step(0, 0, 40 * MS), *events, world_size=1, device=A100)
    return runs.foreign(folder / "traces", made)


def on_a_cpu(folder: Path, drop: Sequence[str] = (), known: bool = True, left: float | None = None) -> Path:
    """Record a product, scaling, a mask, the softmax and a product, and their gradients, of 2 ms each."""
    forward = ["aten::bmm", "aten::div", "aten::masked_fill", "aten::_softmax", *drop, "aten::bmm"]
    between = ["aten::_softmax_backward_data", "aten::masked_fill", "aten::div"]
    called = operators.times([*forward, *["aten::bmm"] * 2, *between, *["aten::bmm"] * 2], 2 * MS)
    shapes = [("16x512x64 16x64x512", 2), ("16x512x512 16x512x64", 3), ("16x64x512 16x512x512", 1)]
    facts: dict[str, Any] = counted(*shapes) if known else {}
    if left is not None:
        facts["flops"] = {**facts.get("flops", {}), "flows": [{"kind": "masked", "used": left}]}
    return operators.job(folder, *called, on_cpu=True, **facts)


gpu, cpu, sdpa = jobs(trained), jobs(on_a_cpu), jobs(by_math)


def of(model: dict[str, Any], *says: str, never: Sequence[str] = ()) -> Case:
    return found(gpu(models=[model]), None, *says, never=never)


# Two products of 16 × 4096² × 64 at a share of 312 TFLOP/s.
LEAST = 2 * 16 * 4096**2 * 128 / 312e12 * 1e9
CALL, MADE = "scaled_dot_product_attention(q, k, v", 'attn_implementation="sdpa"` where'
UNKNOWN = ["how fast a fused kernel is on this device", "takes 6"]
TOLD = counted(("16x4096x64 16x64x4096", 1), ("16x4096x4096 16x4096x64", 1))
CASES = {
    "what a fused kernel leaves": found(
        trained,
        25 * MS - 4 * LEAST,
        f"{CALL}, is_causal=True or attn_mask=…)",
        sharp=1e-3,
        settings=[[], [("attn_implementation", None, "sdpa"), ("need_weights", None, False)]],
        rows=[("forward", "16x4096x64 16x4096x64", "bfloat16", 1, 25 * MS, pytest.approx(4 * LEAST))],
        numerics=[False, False],
    ),
    # The second FlashAttention is faster than the host launches five operators, 0.1 ms apart.
    "no sooner than the host launches": found(
        gpu(versions={"torch": "2.4.0"}),
        24.5 * MS,
        sharp=1e-4,
        rows=[("forward", "16x4096x64 16x4096x64", "bfloat16", 1, 25 * MS, pytest.approx(2 * LEAST))],
    ),
    "transformers by its attention": of({"class": "GPT2LMHeadModel", "attention": "eager"}, MADE, "is eager"),
    "transformers by its name": of({"class": "BertForSequenceClassification"}, MADE, "BertForSequenceClassification"),
    "transformers that calls sdpa": of({"class": "GPT2LMHeadModel", "attention": "sdpa"}, CALL, never=[MADE]),
    "a library that fuses it where it is asked for": found(
        gpu(
            calls=[{"kind": "softmax", "file": "t.py", "line": 1, "via": "Attend.forward (x_transformers/attend.py:6)"}]
        ),
        None,
        "attn_flash=True",
    ),
    "softmax of the script's own": found(
        gpu(calls=[{"kind": "softmax", "file": "t.py", "line": 1}]), None, CALL, never=["attn_flash"]
    ),
    "a model of the script's own": of({"class": "Transformer"}, CALL, never=[MADE]),
    # On a CPU modules and nodes of the backward pass stand between the products, too.
    "modules and views between": found(
        gpu(between=("(Dropout)", "nn.Module:", "MulBackward0", "aten::view", "aten::softmax", "aten::mul")),
        None,
        "scaled_dot_product_attention(q, k, v)",
    ),
    "a function of the scores": found(gpu(between=("aten::tanh", "aten::mul")), None, *("flex_attention", "tanh")),
    "fused": clear(gpu(fused=True)),
    "short sequences": clear(gpu(length=127)),
    "a late host": clear(gpu(waits=False)),
    "an unknown device": unmeasured(gpu(device="Some GPU 9"), *UNKNOWN),
    "a device without it": unmeasured(gpu(device="Tesla V100-SXM2-16GB", dtype="c10::Half"), *UNKNOWN),
    "float32": unmeasured(gpu(dtype="float"), *UNKNOWN),
    # Five kernels of 0.1 ms in 40 ms: fused, it would save no more.
    "an unknown device, where it is short": clear(gpu(device="Some GPU 9", took=100 * US), pytest.approx(0.0125)),
    "no shapes": unmeasured(gpu(shapes=False), "record_shapes=True"),
    "shapes of a counted step": found(gpu(shapes=False, **TOLD)),
    "too wide": found(sdpa(512), None, "512 wide"),
    "an odd width": found(sdpa(36), None, "no multiple of 8"),
    "the widest": found(sdpa(256), None, "found no fused kernel. `"),
    "an added mask": found(sdpa(64, "aten::add"), None, "a mask"),
    # Two products of five operators forward, four of seven backward; 15 % longer than the products alone.
    "a CPU": found(on_a_cpu, (5 + 7 - 6 * 1.15) * 2 * MS, "measured on a CPU"),
    # Of these 24 ms, nine in ten scores are masked; of 40 % a fused kernel saves more than these.
    "a window": found(cpu(left=0.1), 0.9 * 24 * MS, "90 % of all", "own block of keys", at_most=True),
    "a window, without shapes": found(cpu(known=False, left=0.2), 0.8 * 24 * MS, at_most=True),
    "dropout on a CPU": clear(cpu(["aten::native_dropout"])),
    "a CPU without shapes": unmeasured(cpu(known=False), "neither traced"),
}


@table({unfused_attention: CASES})
def test_what_a_fused_kernel_gains(tmp_path: Path, rule: Rule, case: Case) -> None:
    check(rule, case, tmp_path)


LONG = "1x16x4096x64"
FLASH = "aten::_scaled_dot_product_flash_attention"
CUDNN, EFFICIENT = "aten::_scaled_dot_product_cudnn_attention", "aten::_scaled_dot_product_efficient_attention"
WITHOUT, MASKS = f"{LONG} {LONG} {LONG}", f"{LONG} {LONG} {LONG} 4096x4096"
SCRIPT = """
def forward(q, k, v, mask):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
"""
CAUSAL = f"{SCRIPT}mask = torch.tril(torch.ones(n, n))"


def masked(
    folder: Path,
    *shapes: str,
    operator: str = CUDNN,
    dtype: str = "bfloat16",
    device: str = A100,
    source: str = CAUSAL,
    trains: bool = True,
    text: str = "return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)",
) -> Path:
    """Record attention of 10 ms, the conversion of its mask of 1 ms, and its backward pass of 20 ms."""
    events: list[Any] = [traces.step(0, 0, 100 * MS), traces.op("aten::scaled_dot_product_attention", 0, 500 * US)]
    # On its way there through autocast it is called again.
    events.append(traces.op("aten::scaled_dot_product_attention", 10 * US, 480 * US))
    backward = [(f"{operator}_backward", 700 * US, 20)] if trains else []
    done = MS
    work = [("aten::where", 50 * US, 1), (operator, 210 * US, 10), *backward, ("aten::mm", 900 * US, 30)]
    for number, (name, at, ms) in enumerate(work, start=1):
        events += [traces.op(name, at, 90 * US), *traces.launched(name, at + 5 * US, done, ms * MS, number)]
        done += ms * MS
    events.append(traces.call("cudaStreamSynchronize", 2 * MS, 97 * MS, 99))
    counts = [{"operator": operator, "dtype": dtype, "shape": s, "calls": 1, "flops": 1, "bytes": 1} for s in shapes]
    line = {"phase": "forward", "after": "", "file": "train.py", "line": 3, "function": "forward", "source": text}
    flops = {"shapes": counts, "lines": [{**line, "calls": 1, "operators": {operator: 1}}]}
    trace = traces.trace(*events, world_size=1, device=device)
    run = runs.recorded(
        folder / "run", (trace, [], {**runs.GPU, "device": {"type": "cuda", "name": device}, "flops": flops})
    )
    kept = {"format": 1, "files": {"train.py": {"sha256": "", "text": source}}}
    (run / "ranks/00000/sources.json").write_text(json.dumps(kept))
    return run


# Of 31 ms, FlashAttention needs half the FLOPs of two products forward and of five backward.
HALF, ASKED = 4 * LEAST / 2, "is_causal=True)` instead of the mask, which is causal (train.py:4)"
on_gpu = jobs(masked)
MASKED = {
    "a causal mask": found(
        on_gpu(MASKS),
        31 * MS - 3.5 * HALF,
        ASKED,
        rows=[(CUDNN, MASKS, "bfloat16", 1, 31 * MS, pytest.approx(3.5 * HALF))],
        at_most=False,
        where=[("train.py", 3), ("train.py", 4)],
        numerics=[False],
    ),
    "memory-efficient attention": found(on_gpu(MASKS, operator=EFFICIENT), 31 * MS - 3.5 * HALF, ASKED),
    "without a backward pass": found(on_gpu(MASKS, trains=False), 11 * MS - HALF, ASKED),
    "another mask": found(
        on_gpu(MASKS, source=f"{SCRIPT}mask = padded(x)"), None, "where the mask is causal", at_most=True, never=[ASKED]
    ),
    "no copy of the script": found(
        on_gpu(MASKS, source="x ="), None, "flex_attention", at_most=True, where=[("train.py", 3)]
    ),
    # Of other keys than queries is_causal would mean another mask, and nothing is known to be left out.
    "cross-attention": found(
        on_gpu(f"{LONG} 1x16x2048x64 1x16x2048x64 4096x2048"), 31 * MS - 3.5 * HALF, at_most=True, never=[ASKED]
    ),
    # Of two such calls a mask is given to one.
    "half of it without a mask": found(on_gpu(MASKS, WITHOUT), 15.5 * MS - 3.5 * HALF),
    "no mask": clear(on_gpu(WITHOUT)),
    "a library's model": clear(on_gpu(MASKS, text="loss = model(**batch).loss")),
    "flash attention": clear(on_gpu(WITHOUT, operator=FLASH)),
    "float32, which flash attention does not take": clear(on_gpu(MASKS, dtype="float32")),
    "a head that is too wide": clear(on_gpu(MASKS.replace("x64", "x512"))),
    "short sequences": clear(on_gpu("64x16x64x64 64x16x64x64 64x16x64x64 64x64")),
    "as fast as flash attention": clear(on_gpu(MASKS.replace("1x16", "64x16"))),
    "no shapes": unmeasured(on_gpu(), "were not counted"),
    "an unknown device": unmeasured(on_gpu(MASKS, device="Some GPU 9"), "takes 31", "is not known"),
}


@table({masked_attention: MASKED})
def test_what_attention_with_a_mask_loses(tmp_path: Path, rule: Rule, case: Case) -> None:
    check(rule, case, tmp_path)
