"""What the rules of computing make of jobs whose answer is known: products, the optimizer, and chains of operators."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.compute.rules import (
    float64_compute,
    fp32_matmul,
    growing_cat,
    misaligned_shapes,
    one_hot_input,
    recurrent_loop,
    unfused_activation,
    unfused_loss,
    unfused_norm,
    unfused_optimizer,
)
from dlprof.analysis.estimate import Rule
from simulator import folder as simulated
from simulator.faults import FAULTS
from simulator.faults.fault import recording
from tests.fixtures import operators, runs, traces
from tests.fixtures.operators import times
from tests.fixtures.processors import PRODUCTS, SPLIT, computing
from tests.fixtures.recurrent import GRU, LSTM, RNN, network
from tests.fixtures.ruled import Case, check, table
from tests.fixtures.runs import MS

US = 1_000
A100, V100, H100 = "NVIDIA A100-SXM4-80GB", "Tesla V100-SXM2-16GB", "NVIDIA H100 80GB HBM3"
SGEMM, ON_TENSOR_CORES = "ampere_sgemm_128x64_tn", "ampere_bf16_s16816gemm_bf16_128x128"


def multiplied(
    folder: Path,
    kernel: str = SGEMM,
    *shapes: list[int],
    dtype: str = "float",
    device: str = A100,
    took: int = 6 * MS,
    waits: bool = True,
    operator: str = "aten::mm",
    **facts: Any,
) -> Path:
    """Write three steps of 10 ms, of which a product takes 6; the host waits for the rest, or launches it too late."""
    events: list[Any] = []
    told = {"Input Dims": [*shapes], "Input type": [dtype] * len(shapes)} if shapes else {}
    for n in range(3):
        t = n * 10 * MS
        events += [traces.step(n, t, 10 * MS), traces.op(operator, t, 20 * US, **told)]
        events += traces.launched(kernel, t + 5 * US, t + 10 * US, took, 3 * n + 1)
        after = t + 50 * US if waits else t + took
        events += traces.launched("elementwise", after, t + took + 10 * US, 9 * MS - took, 3 * n + 2)
        events += [traces.call("cudaStreamSynchronize", t + 100 * US, 9 * MS, 3 * n + 3)] if waits else []
    made = traces.trace(*events, world_size=1, device=device)
    if not facts:
        return runs.foreign(folder, made)
    return runs.recorded(folder / "run", (made, [], {"device": {"type": "cuda", "name": device}, **facts}))


def on_cpu(folder: Path, **facts: Any) -> Path:
    """Record steps without a trace."""
    return runs.recorded(folder / "run", (None, [runs.light(n, 10 * MS) for n in range(30)], {**runs.CPU, **facts}))


# ---- products in float32 -------------------------------------------------------------------------------------------

AUTOCAST = [("autocast_enabled", None, True), ("autocast_dtype", None, "bfloat16")]
OFF = [("autocast_enabled", False, True), ("autocast_dtype", None, "bfloat16")]
IEEE: dict[str, Any] = {
    "matmul": {"matmul_fp32_precision": "ieee", "conv_fp32_precision": "ieee", "fp32_precision": "none"},
    "versions": {"torch": "2.9.1+cu128"},
}
AMD = "Cijk_Ailk_Bljk_S_B_Bias_HA_S_SAV_UserArgs_MT16x16x128_MI16x16x1_SN_LDSB1_AFC1"

FLOAT32 = {
    "on a GPU, where tensor cores leave an eighth": Case(
        lambda p: multiplied(
            p,
            autocast={"enabled": False},
            matmul={"float32_precision": "highest", "cudnn_allow_tf32": False},
        ),
        "found",
        6 * MS * (1 - 19.5 / 156),  # 19.5 TFLOP/s in float32, half of 312 in bfloat16
        sharp=1e-6,
        says=["16 times as fast in bfloat16", "autocast is off", "cudnn.allow_tf32"],
        settings=[OFF, [("float32_precision", "highest", "high")], [("allow_tf32", False, True)]],
        rows=[("aten::mm", None, 1, 6 * MS)],
        numerics=[True] * 3,
    ),
    "TF32 by the names of torch 2.9": Case(
        lambda p: multiplied(p, **IEEE),
        "found",
        says=['cuda.matmul.fp32_precision = "tf32"', 'is "ieee"', 'cudnn.conv.fp32_precision = "tf32"'],
        settings=[AUTOCAST, [("fp32_precision", "ieee", "tf32")], [("fp32_precision", "ieee", "tf32")]],
    ),
    "AMD's by its type codes, with the variable that TF32 needs": Case(
        lambda p: multiplied(p, AMD, device="AMD Instinct MI300X"),
        "found",
        6 * MS * (1 - 163.4 / (1307.4 / 2)),
        sharp=1e-6,
        settings=[AUTOCAST, [("float32_precision", None, "high"), ("HIPBLASLT_ALLOW_TF32", None, "1")]],
        never=["without tensor cores"],
    ),
    "a device without bfloat16 has to scale": Case(
        lambda p: multiplied(p, "volta_sgemm_128x64_tn", device=V100),
        "found",
        6 * MS * (1 - 15.7 / 62.5),
        says=["torch.float16", "GradScaler"],
        settings=[[("autocast_enabled", None, True), ("autocast_dtype", None, "float16")]],
    ),
    "from a twentieth of the step on": Case(lambda p: multiplied(p, took=MS * 6 // 10), "found", 0.525 * MS),
    "less is left alone, with what it would save": Case(
        lambda p: multiplied(p, took=MS * 45 // 100), "clear", share=pytest.approx(0.045 * (1 - 0.125))
    ),
    "16 bits": Case(lambda p: multiplied(p, ON_TENSOR_CORES), "clear", share=0),
    "TF32": Case(lambda p: multiplied(p, "cutlass_80_tensorop_s1688gemm_64x64_tn_align4"), "clear", share=0),
    "an unknown unit is said": Case(
        lambda p: multiplied(p, "triton_tem_fused_mm_0"), "clear", share=0, says=["67 % of the kernels"]
    ),
    "a late host": Case(lambda p: multiplied(p, waits=False), "clear", share=0, says=["the host launches no faster"]),
    "an unknown device": Case(lambda p: multiplied(p, device="Some GPU 9"), "not_measured", says=["Some GPU 9"]),
    "a CPU without a trace": Case(on_cpu, "not_measured"),
    "on a CPU with units for bfloat16": Case(
        lambda p: computing(p, units=["avx2", "amx_bf16"], autocast={"enabled": False}),
        "found",
        PRODUCTS * (1 - 1 / 2.5),
        says=['torch.autocast("cpu", torch.bfloat16)'],
        settings=[OFF],
        rows=[("aten::addmm",)],
        numerics=[True],
    ),
    "on a CPU under autocast": Case(
        lambda p: computing(p, units=["amx_bf16"], autocast={"enabled": True, "dtype": "bfloat16"}), "clear", 0
    ),
    "on a CPU a model in bfloat16": Case(
        lambda p: computing(p, units=["amx_bf16"], models=[{"dtypes": {"bfloat16": 9}}]), "clear", 0
    ),
    "a CPU without units": Case(lambda p: computing(p, units=["avx2", "avx512f"]), "does_not_apply"),
}

# ---- products in float64 -------------------------------------------------------------------------------------------

SQUARE = [1024, 1024], [1024, 1024]
FLAT = [8192, 8192], [8192, 1]  # as many bytes as numbers that it multiplies
# No sheet has the RTX's peak in float64: it is at half of that in float32, 2 × 1024³ FLOPs in 6 ms.
RTX, OF_RTX = "NVIDIA GeForce RTX 4090", 2 * 1024**3 / (128 * 2.52e9 * 256 / 2) / 6e-3


def double(folder: Path, device: str, shapes: Any = SQUARE, dtype: str = "double", **how: Any) -> Path:
    return multiplied(folder, "gemm", *shapes, dtype=dtype, device=device, **how)


def counted(*dtypes: str, operator: str = "aten::addmm") -> dict[str, Any]:
    """Return the facts of a step whose products were counted, as many FLOPs in each type."""
    shape = {"operator": operator, "shape": "64 64x64 64x64", "calls": 1, "flops": 524_288, "bytes": 98_304}
    line = {"phase": "forward", "after": "forward", "file": "train.py", "line": 7, "function": "forward"}
    line |= {"source": "return x @ w", "operators": {operator: 1}}
    return {"flops": {"state": "counted", "shapes": [{**shape, "dtype": d} for d in dtypes], "lines": [line]}}


def convolving(folder: Path) -> Path:
    operator = "aten::_slow_conv2d_forward"
    each = [[traces.step(n, n * 100 * MS, 99 * MS), traces.op(operator, n * 100 * MS, 90 * MS)] for n in range(3)]
    made = traces.trace(*each, world_size=1, backend="gloo", device="")
    steps = [runs.light(n, 100 * MS) for n in range(30)]
    return runs.recorded(folder, (made, steps, {**runs.CPU, **counted("float64", operator="aten::convolution")}))


TO_FLOAT32 = [[("dtype", "float64", "float32")]]
FLOAT64 = {
    "a GPU's peaks": Case(
        lambda p: double(p, V100),
        "found",
        6 * MS * (1 - 7.8 / 15.7),
        sharp=1e-3,
        says=["`mm`"],
        settings=TO_FLOAT32,
        rows=[("aten::mm",)],
        numerics=[True],
    ),
    "a GPU's memory": Case(lambda p: double(p, V100, FLAT), "found", 3 * MS, sharp=1e-3),
    "memory where tensor cores take float64": Case(lambda p: double(p, A100, FLAT), "found", 3 * MS, sharp=1e-3),
    "a GPU without a peak in float64": Case(lambda p: double(p, RTX), "found", 6 * MS * (1 - OF_RTX), sharp=1e-3),
    "tensor cores that multiply float64 as fast": Case(lambda p: double(p, A100), "clear", 0, says=["60 %"]),
    "a late host": Case(lambda p: double(p, V100, waits=False), "clear"),
    "float32 on a GPU": Case(lambda p: double(p, V100, dtype="float"), "clear", says=["no product is in float64"]),
    "float32 on a CPU": Case(lambda p: computing(p, **counted("float32")), "clear", says=["no product is in float64"]),
    "an unknown device": Case(lambda p: double(p, "Some GPU 9"), "not_measured", says=["Some GPU 9"]),
    "on a CPU half of all that is large": Case(
        lambda p: computing(p, **counted("float64")), "found", (PRODUCTS + SPLIT) / 2, where=[("train.py", 7)]
    ),
    "on a CPU half of the products in it": Case(
        lambda p: computing(p, **counted("float64", "float32")), "found", PRODUCTS / 4
    ),
    "a CPU's convolutions": Case(convolving, "found", 0.8 * 90 / 99 * 100 * MS, sharp=0.02),
    "without types": Case(computing, "not_measured", says=["neither traced"]),
    "without a trace": Case(lambda p: computing(p, traced=False), "not_measured"),
    "a GPU is not judged by its host": Case(
        lambda p: computing(p, **counted("float64"), device={"type": "cuda", "name": V100}),
        "not_measured",
        says=["no work of a device"],
    ),
}

# ---- sizes that tensor cores do not like ---------------------------------------------------------------------------

ODD = [4096, 1022], [1022, 4099]
SCALED = [16384, 1024], [1024, 4104], [1], [1]


def sized(folder: Path, shapes: Any = ODD, dtype: str = "c10::BFloat16", **how: Any) -> Path:
    return multiplied(folder, ON_TENSOR_CORES, *shapes, dtype=dtype, **how)


MISALIGNED = {
    "as long as a good size takes at half of the peak": Case(
        sized,
        "found",
        6 * MS - 2 * 4096 * 1022 * 4099 / 156e12 * 1e9,
        sharp=1e-6,
        says=["of 8, better of 64: 4099 → 4104 or 4160"],
        rows=[("aten::mm", "4096x1022 1022x4099", "bfloat16", 1, 6 * MS)],
        settings=[[]],
        numerics=[True],
    ),
    "any batch": Case(lambda p: sized(p, ([4091, 1024], [1024, 4096])), "clear", share=0),
    "ten classes": Case(lambda p: sized(p, ([4096, 1024], [1024, 10])), "clear", share=0),
    "an odd one that is fast": Case(lambda p: sized(p, took=228 * US), "clear", share=pytest.approx(8e-4, abs=1e-4)),
    "an unknown device": Case(lambda p: sized(p, device="Some GPU 9"), "not_measured", says=["Some GPU 9"]),
    "an unknown device, where it is short": Case(
        lambda p: sized(p, device="Some GPU 9", took=MS // 10), "clear", share=pytest.approx(0.01)
    ),
    "8 bits want multiples of 16": Case(
        lambda p: sized(p, SCALED, "c10::Float8_e4m3fn", operator="aten::_scaled_mm", device=H100),
        "found",
        6 * MS - 2 * 16384 * 1024 * 4104 / (1979e12 / 2) * 1e9,
        sharp=1e-6,
        says=["of 16, better of 64: 4104 → 4112 or 4160"],
    ),
    "which suit 16 bits": Case(lambda p: sized(p, SCALED[:2]), "clear"),
    "float32": Case(lambda p: sized(p, dtype="float"), "not_measured"),
    "without shapes": Case(lambda p: sized(p, ()), "not_measured", says=["record_shapes=True"]),
}

# ---- the optimizer -------------------------------------------------------------------------------------------------


def optimized(folder: Path, took: int = 4 * MS, **told: Any) -> Path:
    """Record a CPU whose optimizer takes 4 of 10 ms."""
    settings = {"class": "AdamW", "fused": None, "foreach": False, "parameters": 50} | told
    steps = [runs.light(n, 10 * MS, optimizer_ns=took) for n in range(30)]
    return runs.recorded(folder / "run", (None, steps, {**runs.CPU, "optimizers": [settings]}))


def optimized_on_gpu(folder: Path, **models: Any) -> Path:
    """Record steps of 5 ms, of which 0.6 ms lie before the optimizer, whose host takes 4.4 ms."""
    events: list[Any] = []
    for n in range(3):
        t, c = 5 * n * MS, 1 + 10 * n
        events += [
            traces.step(n, t, 5 * MS),
            traces.launched("gemm", t, t + 5 * US, 595 * US, c),
            traces.annotation("Optimizer.step#SGD.step", t + 600 * US, 4_400 * US),
            traces.launched("multi_tensor_apply", t + 4_695 * US, t + 4_700 * US, 100 * US, c + 1),
            traces.launched("multi_tensor_apply", t + 4_710 * US, t + 4_800 * US, 195 * US, c + 2),
        ]
    optimizers = [{"class": "SGD", "fused": None, "foreach": None, "parameters": 60}]
    facts = {"device": {"type": "cuda", "name": A100}, "optimizers": optimizers, **models}
    return runs.recorded(folder / "run", (traces.trace(*events, world_size=1), [], facts))


OPTIMIZER = {
    "a quarter is left on a CPU": Case(
        optimized,
        "found",
        3 * MS,
        share=pytest.approx(0.3),
        says=["50 parameter tensors", "foreach is False"],
        settings=[[("fused", None, True)]],
        rows=[("now", 4.0 * MS), ("fused, as predicted", 1.0 * MS)],
        ranks=[0],
    ),
    "on a GPU its host takes 0.45 ms and 1.6 µs a tensor": Case(
        optimized_on_gpu, "found", 5 * MS - (600 + 450 + 60 * 1.6) * US, sharp=0.02
    ),
    "a fused one": Case(lambda p: optimized(p, fused=True), "clear", share=0),
    "a class without one": Case(lambda p: optimized(p, **{"class": "Lion"}), "does_not_apply", says=["no fused Lion"]),
    "an AdamW of the script's own": Case(lambda p: optimized(p, takes=["foreach"]), "does_not_apply"),
    "one that takes it": Case(lambda p: optimized(p, takes=["fused", "foreach"]), "found"),
    "one that nobody has timed": Case(
        lambda p: optimized(p, **{"class": "Adagrad"}), "not_measured", says=["--set optimizer.fused=True"]
    ),
    "a short one": Case(lambda p: optimized(p, MS // 10, **{"class": "SGD"}), "clear", share=pytest.approx(0.007)),
    "settings that are not known": Case(lambda p: runs.foreign(p, traces.training(3)), "not_measured"),
}

# ---- chains of operators: on a GPU or a CPU, behind them 20 ms of a product ----------------------------------------


def calls(*called: operators.Named, **how: Any) -> Any:
    return lambda folder: operators.job(folder, *called, **how)


def chain(forward: str, backward: str = "", ns: int = MS, back_ns: int = MS) -> list[operators.Named]:
    back = [f"{name}Backward0" for name in backward.split()]
    return times([f"aten::{name}" for name in forward.split()], ns) + times(back, back_ns)


RISING = [n * MS // 10 for n in range(1, 11)]


def cats(*each: int, work: int = MS // 10, read: bool = False, on_cpu: bool = False) -> Any:
    called = [one for ns in each for one in (("aten::tanh", ns if read else work), ("aten::cat", ns))]
    return calls(*called, on_cpu=on_cpu)


GROWING = {
    "what the last call leaves": Case(
        cats(*RISING), "found", 4.5 * MS, sharp=0.02, says=["append the pieces to a list"], rows=[("forward", 10)]
    ),
    "on a CPU": Case(cats(*RISING, on_cpu=True), "found", 4.5 * MS, sharp=0.02),
    "even calls": Case(cats(*[MS // 2] * 10), "clear", share=0),
    "falling calls": Case(cats(*RISING[::-1]), "clear", share=0),
    "eight calls": Case(cats(*RISING[:8]), "found", 2.8 * MS, sharp=0.02),
    "seven": Case(cats(*RISING[:7]), "clear", share=0),
    "a loop that reads what there is": Case(cats(*RISING, read=True), "clear", share=0),
    "short ones": Case(cats(*(n // 20 for n in RISING), work=10 * US), "clear", share=pytest.approx(0.01, abs=0.002)),
}

ONE_HOT = [("aten::one_hot", 4 * MS), ("aten::to", 3 * MS), ("aten::matmul", 2 * MS), ("aten::matmul", MS)]
ROWS = [*ONE_HOT, *times(["MmBackward0"] * 2, MS), ("MmBackward0", 2 * MS)]


# 1,000 rows of 1,000 words, 100 wide: the product moves 1.2 million values, of which the chosen rows are a sixth;
# backward the matrix too.
def rows_of(shape: str = "1000x1000 1000x100", values: int = 1_000_000) -> dict[str, Any]:
    row = {"operator": "aten::mm", "dtype": "float32", "shape": shape, "calls": 1, "flops": 1, "bytes": 1}
    return {"state": "counted", "total": 1, "shapes": [row], "one_hot": [{"values": values, "classes": 1_000}]}


EMBEDDED = (4 + 3 + 2 + 2 - 2 * (1 / 6 + 1 / 3)) * MS
INPUT = {
    "what an embedding leaves": Case(
        calls(*ROWS, flops=rows_of()), "found", EMBEDDED, sharp=0.02, says=["embedding(index, weight)"]
    ),
    "on a CPU": Case(calls(*ROWS, on_cpu=True, flops=rows_of()), "found", EMBEDDED, sharp=0.02),
    "without shapes the product stays": Case(calls(*ROWS), "found", 7 * MS, sharp=0.02),
    "another product's shape": Case(calls(*ROWS, flops=rows_of("64x64 64x64")), "found", 7 * MS, sharp=0.02),
    "other one-hot rows": Case(calls(*ROWS, flops=rows_of(values=7_000)), "found", 7 * MS, sharp=0.02),
    # Where backward functions are not as many as products, none is taken for another.
    "one gradient less": Case(calls(*ROWS[:-1], flops=rows_of()), "found", (9 - 2 / 6) * MS, sharp=0.02),
    "embedding": Case(calls(("aten::embedding", MS), ONE_HOT[2]), "clear", share=0),
    "targets": Case(calls(ONE_HOT[0], ("aten::mul", MS), ONE_HOT[2]), "clear", share=0),
    "rows with other features": Case(calls(ONE_HOT[0], ("aten::cat", MS), ONE_HOT[2]), "clear", share=0),
}

GATES = {"phase": "forward", "after": "forward", "file": "train.py", "line": 22, "function": "Cell.forward"}
LINES = [{**GATES, "source": "x.tanh()", "calls": 9, "operators": {"aten::tanh": 9}}]


def loop(body: str, *says: str) -> Case:
    """Return 40 turns: the host launches an operator in 10 µs; what is left are two kernels of 3 µs a turn, or one."""
    flops = {"state": "counted", "total": 1, "lines": LINES}
    size = len(body.split())
    says = (*says, "make_graphed_callables", f"{40 * size:,} small operators")
    gain = 40 * (size * 10 - min(2, size) * 3) * US
    where = [("train.py", 22)]
    return Case(lambda p: network(p, body, 40, flops=flops), "found", gain, sharp=0.15, says=says, where=where)


DEEP, TRANSFORMER = "addmm mul tanh add", "layer_norm addmm bmm softmax bmm addmm add layer_norm addmm gelu addmm add"
RECURRENT = {
    "an LSTM": loop(LSTM, "`nn.LSTM("),
    "a GRU": loop(GRU, "`nn.GRU("),
    "an RNN": loop(RNN, "`nn.RNN("),
    "a cell": loop("lstm_cell", "instead of its cell"),
    "few turns": Case(lambda p: network(p, LSTM, 15), "clear"),
    "a deep network has weights for each layer": Case(lambda p: network(p, DEEP, 40, 80), "clear"),
    "the same with the weights of one": Case(lambda p: network(p, DEEP, 40, 39), "found"),
    "a transformer": Case(lambda p: network(p, TRANSFORMER, 24), "clear"),
    "layers without gates": Case(lambda p: network(p, "addmm relu", 100), "clear"),
    "parameters that are not known": Case(lambda p: network(p, LSTM, 40, None), "not_measured", says=["parameters"]),
}

BY_TANH, BY_ERF = "mul pow mul add mul tanh add mul", "mul div erf add mul"
ACTIVATION = {
    "by tanh": Case(
        calls(*chain(BY_TANH, "Mul Add Tanh Mul Add Mul Pow Mul")),
        "found",
        8 * (2 - 0.11 - 0.10) * MS,
        says=['gelu(x, approximate="tanh")'],
    ),
    "by erf": Case(calls(*chain(BY_ERF, "Mul Add Erf Div Mul")), "found", 5 * (2 - 0.18 - 0.15) * MS, says=["gelu(x)"]),
    "a fused one": Case(calls(("aten::gelu", 5 * MS), ("GeluBackward0", 9 * MS)), "clear", share=0),
}

BY_MEAN = chain("mean var sub add sqrt div mul add", "Add Mul Div Sqrt Add Sub Var Mean", MS // 2)
NORM = {
    # Of 4 ms forward 17 % are left, of 8 ms backward 15 %.
    "layer norm": Case(
        calls(*BY_MEAN),
        "found",
        (4 * 0.83 + 8 * 0.85) * MS,
        says=["layer_norm", "torch.compile"],
        rows=[
            ("mean and variance", "backward", 1, 8, pytest.approx(8 * MS), pytest.approx(1.2 * MS)),
            ("mean and variance", "forward", 1, 8),
        ],
    ),
    "on a CPU": Case(calls(*BY_MEAN, on_cpu=True), "found", 12 * 0.85 * MS, sharp=0.02),
    # PyTorch's own is made of the same operators there.
    "a mean of squares on a CPU": Case(calls(*chain("pow mean add rsqrt mul mul"), on_cpu=True), "clear", share=0),
    "a mean of squares": Case(calls(*chain("pow mean add rsqrt mul mul")), "found", 6 * 0.72 * MS, says=["rms_norm"]),
    "a fused one": Case(calls(("aten::layer_norm", 5 * MS), ("NativeLayerNormBackward0", 9 * MS)), "clear", share=0),
    "a short one": Case(
        calls(*chain("mean var sub add sqrt div mul add", ns=30 * US)), "clear", share=pytest.approx(0.009, abs=2e-3)
    ),
}

LOG = chain("softmax log index", "Index Log Softmax", 2 * MS, 2 * MS)
PLAIN = [("aten::cross_entropy_loss", 5 * MS), ("NllLossBackward0", MS), ("LogSoftmaxBackward0", 5 * MS)]
LOSS = {
    "the log of a softmax": Case(
        calls(*LOG),
        "found",
        6 * MS,
        sharp=0.02,
        says=["cross_entropy(logits, target)"],
        rows=[("the log of a softmax",)] * 2,
        numerics=[False],
    ),
    "on a CPU": Case(calls(*LOG, on_cpu=True), "found", 6 * MS, sharp=0.02),
    "a float32 copy": Case(
        calls(("aten::to", 2 * MS), *PLAIN, ("ToCopyBackward0", 2 * MS)),
        "found",
        15 * 0.67 * MS,
        says=["torch.compile"],
        numerics=[False, True],
    ),
    "a float32 copy on a CPU": Case(
        calls(("aten::to", 2 * MS), *PLAIN, ("ToCopyBackward0", 2 * MS), on_cpu=True), "clear", share=0
    ),
    "cross entropy": Case(calls(*PLAIN), "clear", share=0),
    "a cast of something small": Case(calls(*PLAIN, ("ToCopyBackward0", MS // 10)), "clear"),
    "few classes": Case(calls(*((name, ns // 20) for name, ns in LOG)), "clear", share=pytest.approx(0.0135, abs=2e-3)),
}

CASES = {
    fp32_matmul: FLOAT32,
    float64_compute: FLOAT64,
    misaligned_shapes: MISALIGNED,
    unfused_optimizer: OPTIMIZER,
    growing_cat: GROWING,
    one_hot_input: INPUT,
    recurrent_loop: RECURRENT,
    unfused_activation: ACTIVATION,
    unfused_norm: NORM,
    unfused_loss: LOSS,
}


@table(CASES)
def test_what_a_rule_says(tmp_path: Path, rule: Rule, case: Case) -> None:
    check(rule, case, tmp_path)


def test_a_job_that_runs_ahead_has_as_many_forward_as_backward_passes(tmp_path: Path) -> None:
    """The first traced step is not steady: its forward pass takes no place of a steady one's."""
    fault = next(f for f in FAULTS if f.name == "cast_loss")
    job = fault.make(1)
    simulated.write(tmp_path / "run", job, recording(job, fault.name))
    rows = [("a float32 copy of the logits", "backward", 1), ("a float32 copy of the logits", "forward", 1)]
    check(unfused_loss.RULE, Case(lambda p: p / "run", "found", rows=rows), tmp_path)
