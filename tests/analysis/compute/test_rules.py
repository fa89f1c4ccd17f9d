"""What the rules of computing make of jobs whose answer is known: products, the optimizer, and chains of operators."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from dlprof.analysis.compute.products import own_functions
from dlprof.analysis.compute.rules import (
    float64_compute,
    fp32_matmul,
    growing_cat,
    misaligned_shapes,
    needless_products,
    one_hot_input,
    recurrent_loop,
    unfused_activation,
    unfused_loss,
    unfused_norm,
    unfused_optimizer,
)
from dlprof.analysis.engine import Maybe
from dlprof.analysis.estimate import Rule
from simulator import folder as simulated
from simulator.faults import FAULTS
from simulator.faults.fault import recording
from tests.fixtures import operators, runs, traces
from tests.fixtures.asking import ask
from tests.fixtures.operators import times
from tests.fixtures.processors import PRODUCTS, SPLIT, computing
from tests.fixtures.recurrent import GRU, LSTM, RNN, network
from tests.fixtures.ruled import Case, check, clear, found, inapplicable, jobs, table, unmeasured
from tests.fixtures.runs import MS

US = 1_000
A100, V100, H100 = "NVIDIA A100-SXM4-80GB", "Tesla V100-SXM2-16GB", "NVIDIA H100 80GB HBM3"
SGEMM, HALF = "ampere_sgemm_128x64_tn", "ampere_bf16_s16816gemm_bf16_128x128"
TENSILE = "Cijk_Ailk_Bljk_S_B_Bias_HA_S_SAV_UserArgs_MT16x16x128_MI16x16x1_SN_LDSB1_AFC1"


def multiplied(
    folder: Path,
    kernel: str = SGEMM,
    shapes: Any = (),
    dtype: str = "float",
    *,
    device: str = A100,
    took: int = 6 * MS,
    waits: bool = True,
    operator: str = "aten::mm",
    then: str = "elementwise",
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
        events += traces.launched(then, after, t + took + 10 * US, 9 * MS - took, 3 * n + 2)
        events += [traces.call("cudaStreamSynchronize", t + 100 * US, 9 * MS, 3 * n + 3)] if waits else []
    made = traces.trace(*events, world_size=1, device=device)
    if not facts:
        return runs.foreign(folder, made)
    return runs.recorded(folder / "run", (made, [], {"device": {"type": "cuda", "name": device}, **facts}))


gpu, cpu = jobs(multiplied), jobs(computing)


def untraced(folder: Path) -> Path:
    return runs.recorded(folder / "run", (None, [runs.light(n, 10 * MS) for n in range(30)], runs.CPU))


# ---- products in float32 -------------------------------------------------------------------------------------------

CAST: list[Any] = [("autocast_enabled", None, True), ("autocast_dtype", None, "bfloat16")]
OFF: list[Any] = [("autocast_enabled", False, True), CAST[1]]
OLD = {"autocast": {"enabled": False}, "matmul": {"float32_precision": "highest", "cudnn_allow_tf32": False}}
IEEE = {
    "matmul": {"matmul_fp32_precision": "ieee", "conv_fp32_precision": "ieee", "fp32_precision": "none"},
    "versions": {"torch": "2.9.1+cu128"},
}
TO_TF32: list[Any] = [("fp32_precision", "ieee", "tf32")]
HALF_OF_AMD: list[Any] = [("float32_precision", None, "high"), ("HIPBLASLT_ALLOW_TF32", None, "1")]


def counted(*dtypes: str, operator: str = "aten::addmm", sizes: str = "64 64x64 64x64") -> dict[str, Any]:
    """Return the facts of a step whose products were counted, as many FLOPs in each type."""
    shape = {"operator": operator, "shape": sizes, "calls": 1, "flops": 524_288, "bytes": 98_304}
    line = {"phase": "forward", "after": "forward", "file": "train.py", "line": 7, "function": "forward"}
    line |= {"source": "return x @ w", "operators": {operator: 1}}
    return {"flops": {"state": "counted", "shapes": [{**shape, "dtype": d} for d in dtypes], "lines": [line]}}


FLOAT32 = {
    # 19.5 TFLOP/s in float32, half of 312 in bfloat16.
    "on a GPU": found(
        gpu(**OLD),
        6 * MS * (1 - 19.5 / 156),
        *("16 times as fast in bfloat16", "autocast is off", "cudnn.allow_tf32"),
        settings=[OFF, [("float32_precision", "highest", "high")], [("allow_tf32", False, True)]],
        rows=[("aten::mm", None, 1, 6 * MS)],
        numerics=[True] * 3,
        training=[False] * 3,
    ),
    "TF32 by the names of torch 2.9": found(
        gpu(**IEEE),
        None,
        *('cuda.matmul.fp32_precision = "tf32"', 'is "ieee"', 'cudnn.conv.fp32_precision = "tf32"'),
        settings=[CAST, TO_TF32, TO_TF32],
    ),
    "convolutions that have TF32 need no change": found(
        gpu(matmul={"float32_precision": "highest", "cudnn_allow_tf32": True}),
        settings=[CAST, [("float32_precision", "highest", "high")]],
    ),
    "convolutions of a job of which nothing else is known have a setting of their own": found(
        gpu(operator="aten::cudnn_convolution"),
        None,
        "torch.backends.cudnn.conv.fp32_precision",
        settings=[CAST, [("allow_tf32", None, True)]],
        never=["float32_matmul_precision"],
    ),
    "AMD's by its type codes, with the variable that TF32 needs": found(
        gpu(TENSILE, device="AMD Instinct MI300X"),
        6 * MS * (1 - 163.4 / (1307.4 / 2)),
        settings=[CAST, HALF_OF_AMD],
        never=["without tensor cores"],
    ),
    "a device without bfloat16 has to scale": found(
        gpu("volta_sgemm_128x64_tn", device=V100),
        6 * MS * (1 - 15.7 / 62.5),
        *("torch.float16", "GradScaler"),
        settings=[[CAST[0], ("autocast_dtype", None, "float16")]],
    ),
    "from a twentieth of the step on": found(gpu(took=600 * US), 525 * US),
    "less is left alone, with what it would save": clear(gpu(took=450 * US), pytest.approx(0.045 * (1 - 0.125))),
    "16 bits": clear(gpu(HALF)),
    "TF32, which 16 bits are faster than": found(
        gpu("cutlass_80_tensorop_s1688gemm_64x64_tn_align4"),
        6 * MS * 0.4,
        *("2 times as fast in bfloat16", "Matrix products run in TF32"),
        settings=[CAST],
        never=["without tensor cores"],
    ),
    "a GPU whose 16 bits are twice as fast": found(
        gpu(device="NVIDIA GeForce RTX 4090"),
        6 * MS * 0.4,
        "Estimated at 83 %",
        settings=[CAST, [("float32_precision", None, "high")]],
    ),
    "an unknown unit is said": clear(gpu("triton_tem_fused_mm_0"), 0, "67 % of the kernels"),
    "a late host": clear(gpu(waits=False), 0, "the host launches no faster"),
    "an unknown device": unmeasured(gpu(device="Some GPU 9"), "Some GPU 9"),
    "a CPU without a trace": unmeasured(untraced),
    "on a CPU with units for bfloat16": found(
        cpu(units=["avx2", "amx_bf16"], autocast={"enabled": False}),
        PRODUCTS * (1 - 1 / 2.5),
        'torch.autocast("cpu", torch.bfloat16)',
        settings=[OFF],
        rows=[("aten::addmm",)],
    ),
    "on a CPU with AVX-512's": found(cpu(units=["avx512_bf16"]), PRODUCTS * (1 - 1 / 1.7) - 23 * US, training=[True]),
    "on a CPU products with two columns": found(
        cpu(units=["avx512_bf16"], **counted("float32", sizes="2 64x64 64x2")), PRODUCTS * (1 - 1 / 1.7) - 23 * US
    ),
    "on a CPU products with a vector": clear(
        cpu(units=["avx512_bf16"], **counted("float32", sizes="1 64x64 64x1")), 0, "would be only"
    ),
    "on a CPU a function of the script's": found(
        cpu(units=["avx512_bf16"], named=("Mine", "MineBackward", "Scatter", "ScatterBackward", "Other")),
        None,
        "; where `Mine` has no `@torch.amp.custom_fwd",
    ),
    "on a CPU that rounds to bfloat16": clear(cpu(units=["amx_bf16"], matmul={"cpu_matmul_fp32_precision": "bf16"})),
    "a CPU whose units are not known": unmeasured(cpu(), "not recorded"),
    "on a CPU under autocast": clear(cpu(units=["amx_bf16"], autocast={"enabled": True, "dtype": "bfloat16"})),
    "on a CPU a model in bfloat16": clear(cpu(units=["amx_bf16"], models=[{"dtypes": {"bfloat16": 9}}])),
    "a CPU without units": inapplicable(cpu(units=["avx2", "avx512f"])),
}

# ---- products in float64 -------------------------------------------------------------------------------------------

SQUARE = [1024, 1024], [1024, 1024]
FLAT = [8192, 8192], [8192, 1]  # as many bytes as numbers that it multiplies
# No sheet has the RTX's peak in float64: it is at half of that in float32, 2 × 1024³ FLOPs in 6 ms.
RTX, OF_RTX = "NVIDIA GeForce RTX 4090", 2 * 1024**3 / (128 * 2.52e9 * 256 / 2) / 6e-3


def convolving(folder: Path, operator: str = "aten::_slow_conv2d_forward") -> Path:
    each = [[traces.step(n, n * 100 * MS, 99 * MS), traces.op(operator, n * 100 * MS, 90 * MS)] for n in range(3)]
    made = traces.trace(*each, world_size=1, backend="gloo", device="")
    steps = [runs.light(n, 100 * MS) for n in range(30)]
    return runs.recorded(folder, (made, steps, {**runs.CPU, **counted("float64", operator="aten::convolution")}))


def double(device: str, shapes: Any = SQUARE, dtype: str = "double", **how: Any) -> Any:
    return gpu("gemm", shapes, dtype, device=device, **how)


FLOAT64 = {
    "a GPU's peaks": found(
        double(V100),
        6 * MS * (1 - 7.8 / 15.7),
        "`mm`",
        settings=[[("dtype", "float64", "float32")]],
        rows=[("aten::mm",)],
        numerics=[True],
    ),
    "a GPU's memory": found(double(V100, FLAT), 3 * MS),
    "memory where tensor cores take float64": found(double(A100, FLAT), 3 * MS),
    "a GPU without a peak in float64": found(double(RTX), 6 * MS * (1 - OF_RTX)),
    # In 6 ms it reaches little of its peak, and is as far from TF32's: 156 TFLOP/s, not half of that.
    "TF32 where it is allowed": found(double(A100, matmul={"allow_tf32": True}), 6 * MS * (1 - 19.5 / 156)),
    "half of other kernels where all is in float64": found(
        double(V100, then="void at::native::vectorized_elementwise_kernel<2, at::native::CUDAFunctor_add<double> >"),
        6 * MS * (1 - 7.8 / 15.7) + 3 * MS / 2,
    ),
    "tensor cores that multiply float64 as fast": clear(double(A100), 0, "60 %"),
    "a late host": clear(double(V100, waits=False), None),
    "float32 on a GPU": clear(double(V100, dtype="float")),
    "float32 on a CPU": clear(cpu(**counted("float32"))),
    "an unknown device": unmeasured(double("Some GPU 9"), "Some GPU 9"),
    "on a CPU half of all that is large": found(
        cpu(**counted("float64")), (PRODUCTS + SPLIT) / 2, where=[("train.py", 7)]
    ),
    "on a CPU half of the products in it": found(cpu(**counted("float64", "float32")), PRODUCTS / 4),
    "a CPU's convolutions": found(convolving, 0.8 * 90 / 99 * 100 * MS, sharp=0.02),
    "no product at all": clear(partial(convolving, operator="aten::sin")),
    "without types": unmeasured(computing, "neither traced"),
    "without a trace": unmeasured(cpu(traced=False)),
    "a GPU is not judged by its host": unmeasured(
        cpu(**counted("float64"), device={"type": "cuda", "name": V100}), "no work of a device"
    ),
}

# ---- sizes that tensor cores do not like ---------------------------------------------------------------------------

ODD, SCALED = ([4096, 1022], [1022, 4099]), ([16384, 1024], [1024, 4104], [1], [1])


def sized(shapes: Any = ODD, dtype: str = "c10::BFloat16", **how: Any) -> Any:
    return gpu(HALF, shapes, dtype, **how)


MISALIGNED = {
    "as long as a good size takes at half of the peak": found(
        sized(),
        6 * MS - 2 * 4096 * 1022 * 4099 / 156e12 * 1e9,
        "of 8, better of 64: 4099 → 4104 or 4160",
        sharp=1e-6,
        rows=[("aten::mm", "4096x1022 1022x4099", "bfloat16", 1, 6 * MS)],
        numerics=[True],
    ),
    "any batch": clear(sized(([4091, 1024], [1024, 4096]))),
    "ten classes": clear(sized(([4096, 1024], [1024, 10]))),
    "an odd one that is fast": clear(sized(took=228 * US), pytest.approx(8e-4, abs=1e-4)),
    "an unknown device": unmeasured(sized(device="Some GPU 9"), "Some GPU 9"),
    "an unknown device, where it is short": clear(sized(device="Some GPU 9", took=MS // 10), pytest.approx(0.01)),
    "8 bits want multiples of 16": found(
        sized(SCALED, "c10::Float8_e4m3fn", operator="aten::_scaled_mm", device=H100),
        6 * MS - 2 * 16384 * 1024 * 4104 / (1979e12 / 2) * 1e9,
        "of 16, better of 64: 4104 → 4112 or 4160",
        sharp=1e-6,
    ),
    "which suit 16 bits": clear(sized(SCALED[:2])),
    "float32": unmeasured(sized(dtype="float")),
    "without shapes": unmeasured(sized(()), "record_shapes=True"),
}

# ---- the optimizer -------------------------------------------------------------------------------------------------


def optimized(folder: Path, kind: str = "AdamW", took: int = 4 * MS, **told: Any) -> Path:
    """Record a CPU whose optimizer takes 4 of 10 ms."""
    settings = {"class": kind, "fused": None, "foreach": False, "parameters": 50} | told
    steps = [runs.light(n, 10 * MS, optimizer_ns=took) for n in range(30)]
    return runs.recorded(folder / "run", (None, steps, {**runs.CPU, "optimizers": [settings]}))


def optimized_on_gpu(folder: Path) -> Path:
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
    facts = {"device": {"type": "cuda", "name": A100}, "optimizers": optimizers}
    return runs.recorded(folder / "run", (traces.trace(*events, world_size=1), [], facts))


optimizer = jobs(optimized)
GROUPS = {"parameter_groups": 50, "distinct_groups": 5}
OPTIMIZER = {
    "a quarter is left on a CPU": found(
        optimized,
        3 * MS,
        *("50 parameter tensors", "foreach is False"),
        share=pytest.approx(0.3),
        settings=[[("fused", None, True)]],
        rows=[("now", 4.0 * MS), ("fused, as predicted", 1.0 * MS)],
        ranks=[0],
    ),
    "on a GPU its host takes 0.45 ms and 1.6 µs a tensor": found(
        optimized_on_gpu, 5 * MS - (600 + 450 + 60 * 1.6) * US, sharp=0.02
    ),
    "a fused one": clear(optimizer(fused=True)),
    "a class without one": inapplicable(optimizer("Lion"), "no fused Lion"),
    "an AdamW of the script's own": inapplicable(optimizer(takes=["foreach"])),
    "one that takes it": found(optimizer(takes=["fused", "foreach"])),
    "one that nobody has timed": unmeasured(optimizer("Adagrad"), "--set optimizer.fused=True"),
    "a short one": clear(optimizer("SGD", MS // 10), pytest.approx(0.007)),
    # Of 50 groups 45 have the settings of another one. Lists of single tensors gain by fewer of them; a loop does not.
    "many groups of lists": found(
        optimizer(foreach=True, **GROUPS), 4 * MS * 0.9, "5 groups in place of 50", at_most=True, settings=[[]]
    ),
    "many groups, fused": found(optimizer(fused=True, **GROUPS), 4 * MS * 0.9, at_most=True),
    "many groups in a loop": found(
        *(optimizer(**GROUPS), 3 * MS, "5 groups in place of 50"), settings=[[("fused", None, True)]], at_most=False
    ),
    "groups of other settings": clear(optimizer(fused=True, **GROUPS | {"distinct_groups": 26})),
    "settings that are not known": unmeasured(lambda p: runs.foreign(p, traces.training(3))),
}

# ---- chains of operators: on a GPU or a CPU, behind them 20 ms of a product ----------------------------------------

calls = jobs(operators.job)


def chain(forward: str, backward: str = "", ns: int = MS, back_ns: int = MS) -> list[operators.Named]:
    back = [f"{name}Backward0" for name in backward.split()]
    return times([f"aten::{name}" for name in forward.split()], ns) + times(back, back_ns)


RISING = [n * MS // 10 for n in range(1, 11)]


GROWN = [one for ns in RISING for one in (("aten::tanh", MS // 10), ("aten::cat", ns))]
HELD = [*GROWN[:15], ("aten::cat", 4 * MS), *GROWN[16:]]


def cats(*each: int, work: int = MS // 10, read: bool = False, on_cpu: bool = False) -> Any:
    called = [one for ns in each for one in (("aten::tanh", ns if read else work), ("aten::cat", ns))]
    return calls(*called, on_cpu=on_cpu)


GROWING = {
    "what the last call leaves": found(
        cats(*RISING), 4.5 * MS, "append the pieces to a list", sharp=0.02, rows=[("forward", 10)]
    ),
    "on a CPU": found(cats(*RISING, on_cpu=True), 4.5 * MS, sharp=0.02),
    "two loops": found(calls(*GROWN, ("aten::add", MS), *GROWN), 9 * MS, sharp=0.02),
    # One call that is held up for 4 ms in place of 0.8, forward, and the backward functions of all.
    "one that is held up": found(
        calls(*HELD, *times(["CatBackward0"] * 10 + ["MmBackward0"], US), on_cpu=True), (4.5 - 0.8 + 4) * MS
    ),
    "eight calls": found(cats(*RISING[:8]), 2.8 * MS, sharp=0.02),
    "seven": clear(cats(*RISING[:7])),
    "even calls": clear(cats(*[MS // 2] * 10)),
    "falling calls": clear(cats(*RISING[::-1])),
    "a loop that reads what there is": clear(cats(*RISING, read=True)),
    "short ones": clear(cats(*(n // 20 for n in RISING), work=10 * US), pytest.approx(0.01, abs=0.002)),
}

ONE_HOT = [("aten::one_hot", 4 * MS), ("aten::to", 3 * MS), ("aten::matmul", 2 * MS), ("aten::matmul", MS)]
ROWS = [*ONE_HOT, *times(["MmBackward0"] * 2, MS), ("MmBackward0", 2 * MS)]


# 1,000 rows of 1,000 words, 100 wide: the product moves 1.2 million values, of which the chosen rows are a sixth;
# backward the matrix too.
def of_rows(shape: str = "1000x1000 1000x100", values: int = 1_000_000) -> dict[str, Any]:
    row = {"operator": "aten::mm", "dtype": "float32", "shape": shape, "calls": 1, "flops": 1, "bytes": 1}
    return {"state": "counted", "total": 1, "shapes": [row], "one_hot": [{"values": values, "classes": 1_000}]}


EMBEDDED = (4 + 3 + 2 + 2 - 2 * (1 / 6 + 1 / 3)) * MS
INPUT = {
    "what an embedding leaves": found(calls(*ROWS, flops=of_rows()), EMBEDDED, "embedding(index, weight)", sharp=0.02),
    "on a CPU": found(calls(*ROWS, on_cpu=True, flops=of_rows()), EMBEDDED, sharp=0.02),
    "without shapes the product stays": found(calls(*ROWS), 7 * MS, sharp=0.02),
    "another product's shape": found(calls(*ROWS, flops=of_rows("64x64 64x64")), 7 * MS, sharp=0.02),
    "other one-hot rows": found(calls(*ROWS, flops=of_rows(values=7_000)), 7 * MS, sharp=0.02),
    # Where backward functions are not as many as products, none is taken for another.
    "one gradient less": found(calls(*ROWS[:-1], flops=of_rows()), (9 - 2 / 6) * MS, sharp=0.02),
    "embedding": clear(calls(("aten::embedding", MS), ONE_HOT[2])),
    "targets": clear(calls(ONE_HOT[0], ("aten::mul", MS), ONE_HOT[2])),
    "rows with other features": clear(calls(ONE_HOT[0], ("aten::cat", MS), ONE_HOT[2])),
}

GATES = {"phase": "forward", "after": "forward", "file": "train.py", "line": 22, "function": "Cell.forward"}
LINES = [{**GATES, "source": "x.tanh()", "calls": 9, "operators": {"aten::tanh": 9}}]
recurrent = jobs(network)


def loop(body: str, says: str) -> Case:
    """Return 40 turns: the host launches an operator in 10 µs; what is left are two kernels of 3 µs a turn, or one."""
    job = recurrent(body, 40, flops={"state": "counted", "total": 1, "lines": LINES})
    size = len(body.split())
    small = f"{40 * size:,} small operators"
    gain = 40 * (size * 10 - min(2, size) * 3) * US
    return found(job, gain, says, "make_graphed_callables", small, sharp=0.15, where=[("train.py", 22)])


DEEP, TRANSFORMER = "addmm mul tanh add", "layer_norm addmm bmm softmax bmm addmm add layer_norm addmm gelu addmm add"
RECURRENT = {
    "an LSTM": loop(LSTM, "`nn.LSTM("),
    "a GRU": loop(GRU, "`nn.GRU("),
    "an RNN": loop(RNN, "`nn.RNN("),
    "a cell": loop("lstm_cell", "instead of its cell"),
    "few turns": clear(recurrent(LSTM, 15)),
    "a deep network has weights for each layer": clear(recurrent(DEEP, 40, 80)),
    "the same with the weights of one": found(recurrent(DEEP, 40, 39)),
    "a transformer": clear(recurrent(TRANSFORMER, 24)),
    "layers without gates": clear(recurrent("addmm relu", 100)),
    "parameters that are not known": unmeasured(recurrent(LSTM, 40, None), "parameters"),
}

BY_TANH = chain("mul pow mul add mul tanh add mul", "Mul Add Tanh Mul Add Mul Pow Mul")
BY_ERF = chain("mul div erf add mul", "Mul Add Erf Div Mul")
ACTIVATION = {
    "by tanh": found(calls(*BY_TANH), 8 * (2 - 0.11 - 0.10) * MS, 'gelu(x, approximate="tanh")'),
    "by erf": found(calls(*BY_ERF), 5 * (2 - 0.18 - 0.15) * MS, "gelu(x)"),
    "on a CPU": found(calls(*BY_TANH, on_cpu=True), 8 * (2 - 0.33 - 0.38) * MS),
    "by erf on a CPU": found(calls(*BY_ERF, on_cpu=True), 5 * (2 - 0.20 - 0.18) * MS),
    "a fused one": clear(calls(("aten::gelu", 5 * MS), ("GeluBackward0", 9 * MS))),
}

BY_MEAN = chain("mean var sub add sqrt div mul add", "Add Mul Div Sqrt Add Sub Var Mean", MS // 2)
BY_SQUARES = chain("pow mean add rsqrt mul mul")
FORM = "mean and variance"
NORM = {
    # Of 4 ms forward 17 % are left, of 8 ms backward 15 %.
    "layer norm": found(
        calls(*BY_MEAN),
        (4 * 0.83 + 8 * 0.85) * MS,
        *("layer_norm", "torch.compile"),
        rows=[(FORM, "backward", 1, 8, pytest.approx(8 * MS), pytest.approx(1.2 * MS)), (FORM, "forward", 1, 8)],
    ),
    "on a CPU": found(calls(*BY_MEAN, on_cpu=True), 12 * 0.85 * MS, sharp=0.02),
    # PyTorch's own is made of the same operators there.
    "a mean of squares on a CPU": clear(calls(*BY_SQUARES, on_cpu=True)),
    "a mean of squares": found(calls(*BY_SQUARES), 6 * 0.72 * MS, "rms_norm"),
    "a fused one": clear(calls(("aten::layer_norm", 5 * MS), ("NativeLayerNormBackward0", 9 * MS))),
    "a short one": clear(calls(*((name, ns * 6 // 100) for name, ns in BY_MEAN[:8])), pytest.approx(0.009, abs=2e-3)),
}

LOG = chain("softmax log index", "Index Log Softmax", 2 * MS, 2 * MS)
PLAIN = [("aten::cross_entropy_loss", 5 * MS), ("NllLossBackward0", MS), ("LogSoftmaxBackward0", 5 * MS)]
COPIED = [("aten::to", 2 * MS), *PLAIN, ("ToCopyBackward0", 2 * MS)]
LOSS = {
    "the log of a softmax": found(
        calls(*LOG),
        6 * MS,
        "cross_entropy(logits, target)",
        sharp=0.02,
        rows=[("the log of a softmax",)] * 2,
        numerics=[False],
    ),
    "on a CPU": found(calls(*LOG, on_cpu=True), 6 * MS, sharp=0.02),
    "a float32 copy": found(calls(*COPIED), 15 * 0.67 * MS, "torch.compile", numerics=[False, True]),
    "a float32 copy on a CPU": clear(calls(*COPIED, on_cpu=True)),
    "cross entropy": clear(calls(*PLAIN)),
    "a cast of something small": clear(calls(*PLAIN, ("ToCopyBackward0", MS // 10))),
    "few classes": clear(calls(*((name, ns // 20) for name, ns in LOG)), pytest.approx(0.0135, abs=2e-3)),
}


def followed(kind: str, *, backward: int = 1, **more: Any) -> dict[str, Any]:
    """Return the counts of a step of one needless product of 4 ms, one of factors, and a convolution."""
    shapes = {"aten::addmm": "8 9x4 4x8", "aten::bmm": "48x4 4x64", "aten::convolution": "2x16x8x8 4x16x1x1"}
    count = {"dtype": "float32", "calls": 1, "flops": 1, "bytes": 1}
    flow = {"kind": kind, "file": "train.py", "line": 7, "function": "Head.forward", "source": "return self.head(x)"}
    flow |= count | {"operator": "aten::addmm", "shape": shapes["aten::addmm"], "used": 0.25} | more
    return {
        "state": "counted",
        "total": 4,
        "backward": backward,
        "shapes": [{"operator": name, "shape": shape, **count} for name, shape in shapes.items()],
        "moved": [{"operator": "aten::add", "bytes": 100}],
        "flows": [flow],
    }


HEAD, SCORED = ("aten::addmm", 4 * MS), ("aten::_log_softmax", 2 * MS)
OF_FACTORS: dict[str, Any] = {"factors": ["aten::bmm", "48x4 4x64"], "moved": {"aten::add": 50}}
SUMS: dict[str, Any] = {"operator": "aten::add", "shape": "", "flops": 0, "trains": False, "moved": {"aten::add": 50}}
LARGER: dict[str, Any] = {
    "operator": "aten::convolution",
    "shape": "2x16x8x8 4x16x1x1",
    "times": 4,
    "factors": ["aten::upsample_b", ""],
}
ENLARGED = [("aten::upsample_b", 4 * MS), ("aten::upsample_b_backward", 4 * MS), ("aten::convolution", 2 * MS)]


def convolved(kind: str, shape: str, flops: float) -> dict[str, Any]:
    """Return the counts of a step of a convolution, forward and backward, and of as large a layer."""
    layer = "8x16x600 16x16x3"
    sizes = {"aten::convolution": [shape, layer], "aten::convolution_backward": [f"1x1 {shape}", f"1x1 {layer}"]}
    flow = followed(kind, operator="aten::convolution", shape=shape, flops=int(flops), calls=1)
    count = {"dtype": "float32", "flops": int(flops), "bytes": 1, "calls": 1}
    shapes = [{"operator": name, "shape": one, **count} for name, of in sizes.items() for one in of]
    return flow | {"shapes": shapes}


# Two calls each of a step: the long one, and one of a layer.
CONVOLVED = [("aten::convolution", 8 * MS), ("aten::convolution", 2 * MS)]
CONVOLVED += [("aten::convolution_backward", 16 * MS), ("aten::convolution_backward", 4 * MS)]
LONG, BOX = "long_kernel", "separable"
# By half as much as the operations say: of the box 27 of 729, of the FFT by what it takes at least.
FORMS: dict[str, tuple[tuple[str, str, float], float, str]] = {
    "a filter as long as its input": ((LONG, "8x16x1199 16x1x600", 92e6), 24 * 0.98, "torch.fft.irfft"),
    "a filter over all channels": ((LONG, "8x4x8000 4x4x511", 1e9), 24 * 0.98, "511 taps"),
    "a box of three dimensions": ((BOX, "10x1x20x20x20 1x1x9x9x9", 117e6), 24 * (1 - 13.5 / 729), "9 x 9 x 9 taps"),
    "a window of three channels": ((BOX, "8x3x128x128 3x1x11x11", 95e6), 24 * (1 - 11 / 121), "another one of `k x 1`"),
}
# Where the other form was measured to be no faster, or nearly.
AS_GOOD: dict[str, tuple[str, str, float]] = {
    "64 channels with 63 taps": (LONG, "4x64x1000 64x64x63", 2.06e9),
    "64 channels with 127 taps": (LONG, "4x64x1000 64x64x127", 4.16e9),
    "a short signal": (LONG, "8x16x70 16x1x64", 0.11e6),
    "a long stride": (LONG, "8x1x16000 514x1x512", 0.42e9 / 4),
    "seven by seven of many channels": (BOX, "4x64x64x64 64x1x7x7", 51e6),
    "an unknown shape": (LONG, "", 1e6),
}
NEEDLESS = {
    "rows that are not used": found(
        calls(HEAD, flops=followed("unused_rows")), 9 * MS, "25 % of the result is used", where=[("train.py", 7)]
    ),
    "on a CPU": found(calls(HEAD, flops=followed("unused_rows"), on_cpu=True), 9 * MS, sharp=0.02),
    "without a backward pass": found(calls(HEAD, flops=followed("unused_rows", backward=0)), 3 * MS),
    "in a loss, with its softmax": found(
        calls(HEAD, SCORED, flops=followed("unused_rows", read_by="aten::nll_loss_forward")),
        (9 + 1.5) * MS,
        "`keep = labels != -100`",
        sharp=0.02,
    ),
    # The weight's gradient, three products of the factors, and half of what is added.
    "a weight of factors": found(
        calls(HEAD, ("aten::bmm", MS), ("aten::add", 2 * MS), flops=followed("low_rank", **OF_FACTORS)),
        (4 + 3 + 1) * MS,
        "`base(x) + scale",
        sharp=0.02,
    ),
    # Half of what is added. Of operators without shapes nothing is known, however long they take.
    "sums that are the same in every step": found(
        calls(("aten::embedding", 40 * MS), ("aten::add", 8 * MS), flops=followed("constant", **SUMS)),
        4 * MS,
        "before training",
        sharp=0.02,
    ),
    "one-hot rows": found(
        calls(("aten::scatter_", MS), ("aten::mean", MS), HEAD, flops=followed("one_hot")),
        (2 * 4 + 1) * MS,
        "weight[index]",
        sharp=0.02,
    ),
    "one-hot rows that another rule has": clear(calls(*ROWS, HEAD, flops=of_rows() | followed("one_hot"))),
    "what is enlarged first": found(
        calls(*ENLARGED, flops=followed("upsampled", **LARGER)), (6 + 4.5) * MS, "convolve first", sharp=0.02
    ),
    **{
        what: found(calls(*CONVOLVED, flops=convolved(*of), on_cpu=True), gone * MS, says, at_most=True, sharp=0.02)
        for what, (of, gone, says) in FORMS.items()
    },
    **{what: clear(calls(*CONVOLVED, flops=convolved(*of), on_cpu=True)) for what, of in AS_GOOD.items()},
    "a kind of a later recorder": clear(calls(HEAD, flops=followed("something_else"))),
    "another product": clear(calls(HEAD, flops=followed("unused_rows", shape="1x1 1x1"))),
    "nothing": clear(calls(HEAD, flops=followed("unused_rows") | {"flows": []})),
    "not followed": unmeasured(calls(HEAD, flops={"state": "counted", "total": 1}), "--flops on"),
}

CASES = {
    fp32_matmul: FLOAT32,
    float64_compute: FLOAT64,
    misaligned_shapes: MISALIGNED,
    needless_products: NEEDLESS,
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
    rows = [("a float32 copy of the logits", passes, 1) for passes in ("backward", "forward")]
    check(unfused_loss.RULE, found(lambda p: p / "run", rows=rows), tmp_path)


def test_a_needless_product_is_as_sure_as_the_computation_it_is_a_part_of(tmp_path: Path) -> None:
    run = runs.measured(calls(HEAD, flops=followed("unused_rows"))(tmp_path))
    products = pd.DataFrame({"rank": [0], "kind": ["unused_rows"], "gone_ns": [4e6]})
    parts = pd.DataFrame([{"rank": 0, "category": "computation", "ns": 10e6, "noise_ns": 2e6, "least_ns": 5e6}])
    nothing: Maybe[pd.DataFrame] = Maybe(lambda: None)  # type: ignore[arg-type, return-value]
    found = needless_products.check(products, nothing, nothing, nothing, Maybe(lambda: parts), run.job)
    assert (found.gone_ns, found.noise_ns, found.least_ns) == ({0: 4e6}, 0.4 * 2e6, 0.4 * 5e6)


def scaled(torch: Any, ahead: Callable[[Any], Any], back: Callable[[Any], Any]) -> Any:
    """Return what runs a function of the script's own, whose backward pass multiplies by what it saved, as pyGAT's."""

    class Scaled(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        @ahead
        def forward(ctx: Any, weight: Any, x: Any) -> Any:
            ctx.save_for_backward(weight.to_sparse())
            return torch.matmul(weight.to_sparse(), x)

        @staticmethod
        @back
        def backward(ctx: Any, grad: Any) -> Any:
            return None, ctx.saved_tensors[0].t().matmul(grad)

    def run(*, cast: bool = False) -> None:
        layer = torch.nn.Linear(4, 3)
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            out = Scaled.apply(torch.eye(6), layer(torch.ones(6, 4)))
        out.sum().backward()

    return run


def test_the_decorators_that_autocast_names_make_a_function_run_under_it(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    plain = scaled(torch, lambda f: f, lambda f: f)
    rank = operators.profiled(torch, tmp_path, plain)
    assert rank.once(own_functions)["function"].tolist() == ["Scaled"]
    job = computing(tmp_path / "run", units=["avx512_bf16"], named=("Scaled", "ScaledBackward"))
    text = ask(fp32_matmul.RULE, job).changes[0].text
    decorators = [eval(code, {"torch": torch}) for code in re.findall(r"`@([^`]+)`", text)]
    with pytest.raises(RuntimeError, match="BFloat16"):
        plain(cast=True)
    scaled(torch, *decorators)(cast=True)
