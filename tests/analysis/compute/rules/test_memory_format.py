"""Convolutions in NCHW: found with what NHWC would take, on a GPU and on a CPU; left alone where it would not pay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.compute.rules.memory_format import RULE
from dlprof.analysis.diagnosis import diagnose
from dlprof.analysis.rules import RULES
from dlprof.read.run import open_run
from dlprof.result import Setting
from tests.fixtures import runs, traces
from tests.fixtures.asking import ask
from tests.fixtures.readings import SECOND
from tests.fixtures.runs import MS

A100 = "NVIDIA A100-SXM4-80GB"  # 2,039 GB/s
H200 = Path(__file__).parents[5] / "shared/traces/h200"

IMAGES = ([64, 64, 56, 56], [64, 64, 56, 56], [64, 64, 3, 3])  # a convolution's output, input and weight
NORM = "void at::native::batch_norm_{}_kernel<c10::BFloat16, float, float, int>"
TO_NHWC = "void cudnn::engines_precompiled::nchwToNhwcKernel<__nv_bfloat16, __nv_bfloat16, float, false, true>"
TO_NCHW = "void cudnn::engines_precompiled::nhwcToNchwKernel<__nv_bfloat16, __nv_bfloat16, float, true, false>"
ON_TENSOR_CORES = "sm80_xmma_dgrad_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x64"

# Operator, kernel and ns of each kernel of a step, in order.
Work = Sequence[tuple[str, str, int]]
CONVOLUTION: Work = [  # the longest first: the host is ahead of what follows
    ("aten::convolution_backward", ON_TENSOR_CORES, 2 * MS),
    ("aten::convolution_backward", TO_NHWC, MS // 2),
    ("aten::convolution_backward", TO_NCHW, MS // 2),
]
NORMS: Work = [
    ("aten::native_batch_norm", NORM.format("collect_statistics"), MS),
    ("aten::native_batch_norm", NORM.format("transform_input"), MS // 2),
    ("aten::native_batch_norm_backward", NORM.format("backward"), 2 * MS),
]
LAUNCH = 30_000  # from one to the next: so much the replay may wait for one


def trained(
    folder: Path,
    work: Work = (*CONVOLUTION, *NORMS),
    shapes: Sequence[list[int]] = IMAGES,
    device: str = A100,
    **facts: Any,
) -> Path:
    """Write four steps in which a host launches some kernels and waits for them."""
    events: list[Any] = []
    at = correlation = 0
    for n in range(4):
        begin = start = at + LAUNCH
        for operator, kernel, dur in work:
            told = shapes if operator == "aten::convolution_backward" else ()
            events += traces.product(operator, at, kernel, start, dur, correlation, *told, dtype="c10::BFloat16")
            at, start, correlation = at + LAUNCH, start + dur, correlation + 1
        events += [traces.call("cudaStreamSynchronize", at, start - at, 10_000 + n)]
        events += [traces.step(n, begin - LAUNCH, start - begin + LAUNCH)]
        at = start
    made = traces.trace(*events, world_size=1, device=device)
    of_gpu = {"device": {"type": "cuda", "name": device}, **facts}
    return runs.recorded(folder / "run", (made, [], of_gpu)) if facts else runs.foreign(folder, made)


def left(passes: float, elements: int) -> float:
    """Return what so many passes over an activation take in NHWC on an A100, ns."""
    return passes * (elements * 4 / (0.8 * 2039e9) * 1e9 + 18_000 / 8)


ELEMENTS = 64 * 64 * 56 * 56


@pytest.mark.parametrize(
    ("work", "shapes", "gained"),
    [
        pytest.param((*CONVOLUTION, *NORMS), IMAGES, 4.5 * MS - left(8, ELEMENTS), id="norms and conversions"),
        pytest.param(CONVOLUTION, IMAGES, MS, id="conversions alone"),
        pytest.param((*CONVOLUTION, *NORMS[:2]), IMAGES, 2.5 * MS - left(3, ELEMENTS), id="forward pass alone"),
        # A norm before each convolution, which reads four times what that writes.
        pytest.param(
            (*CONVOLUTION, *NORMS),
            ([64, 64, 28, 28], *IMAGES[1:]),
            4.5 * MS - left(8, ELEMENTS),
            id="norms of what is read",
        ),
        # What NHWC needs for these is more than they take now.
        pytest.param(
            [*CONVOLUTION, *((op, kernel, 10_000) for op, kernel, _ in NORMS)], IMAGES, MS, id="norms that gain nothing"
        ),
    ],
)
def test_what_the_norms_for_nhwc_leave_and_conversions_are_saved(
    tmp_path: Path, work: Work, shapes: Sequence[list[int]], gained: float
) -> None:
    found = ask(RULE, trained(tmp_path, work, shapes))
    assert found.state == "found"
    assert found.saving_ns == pytest.approx(gained, abs=2 * LAUNCH)
    assert [change.settings for change in found.changes] == [
        (Setting("memory_format", "contiguous_format", "channels_last"),)
    ]


CALLED = "loss = F.cross_entropy(self.net(batch[0]), y)"
CALLS = [
    {"kind": "model", "file": "net.py", "line": 3, "via": "Trainer (fit.py:1)"},
    {"kind": "model", "file": "train.py", "line": 8},
    {"kind": "optimizer", "file": "train.py", "line": 9},
    {"kind": "forward", "file": "train.py", "line": 18, "column": 31, "end_column": 49, "source": CALLED},
]


@pytest.mark.parametrize(
    ("calls", "advice"),
    [
        (
            CALLS,
            "`self.net = self.net{to}` after train.py:8, and `x = x{to}` before train.py:18",
        ),
        (
            [{**CALLS[3], "source": "out = model(images)", "column": 6, "end_column": 19}, *CALLS[2:3]],
            "`model = model{to}` before the optimizer is made, train.py:9,"
            " and `images = images{to}` before train.py:18",
        ),
        (
            [*CALLS, {"kind": "ddp", "file": "train.py", "line": 10}],
            "`model = model{to}` after train.py:8, and `x = x{to}` before train.py:18",
        ),
        ([], "`model = model{to}`, and `x = x{to}`"),
    ],
)
def test_both_lines_are_named_as_the_script_would_write_them(
    tmp_path: Path, calls: list[Mapping[str, Any]], advice: str
) -> None:
    found = ask(RULE, trained(tmp_path, models=[{"channels_last": False}], calls=calls))
    assert found.advice[0] == advice.replace("{to}", ".to(memory_format=torch.channels_last)")


def test_volumes_have_a_format_of_their_own(tmp_path: Path) -> None:
    volumes = ([4, 64, 16, 56, 56], [4, 64, 16, 56, 56], [64, 64, 3, 3, 3])
    found = ask(RULE, trained(tmp_path, shapes=volumes))
    assert "model.to(memory_format=torch.channels_last_3d)" in found.advice[0]
    assert found.saving_ns == pytest.approx(4.5 * MS - left(8, ELEMENTS), abs=2 * LAUNCH)


GROUPED = ([64, 64, 56, 56], [64, 64, 56, 56], [64, 8, 3, 3])
TRANSPOSED = ([64, 32, 112, 112], [64, 64, 56, 56], [64, 32, 2, 2])
GROUPED_TRANSPOSED = ([64, 32, 112, 112], [64, 64, 56, 56], [64, 4, 2, 2])
DEPTHWISE = ([64, 64, 56, 56], [64, 64, 56, 56], [64, 1, 3, 3])
ON_FLOAT32 = [(op, name.replace(ON_TENSOR_CORES, "ampere_scudnn_128x64_relu"), ns) for op, name, ns in CONVOLUTION]
IN_NHWC = [(op, name.replace("_kernel", "_channels_last_kernel"), ns) for op, name, ns in NORMS]
ALONE = CONVOLUTION[:1]


@pytest.mark.parametrize(
    ("state", "why", "of"),
    [
        ("found", "", {"shapes": DEPTHWISE}),
        ("found", "", {"shapes": TRANSPOSED}),
        ("clear", "grouped", {"shapes": GROUPED}),
        ("clear", "grouped", {"shapes": GROUPED_TRANSPOSED}),
        ("clear", "group or instance norms", {"work": (*CONVOLUTION, *NORMS, ("aten::native_group_norm", "norm", MS))}),
        ("clear", "without tensor cores", {"work": (*ON_FLOAT32, *NORMS)}),
        ("clear", "the model is in channels_last", {"models": [{"channels_last": True}]}),
        ("clear", "takes 0 %", {"work": (*ALONE, *IN_NHWC)}),
        # cuDNN's own batch norm is not known to gain.
        ("clear", "takes 0 %", {"work": (*ALONE, ("aten::cudnn_batch_norm", "cudnn::bn_fw_tr_1C11_kernel_NCHW", MS))}),
        ("not_measured", "shapes", {"shapes": ()}),
        ("not_measured", "AMD", {"device": "AMD Instinct MI300X"}),
        ("does_not_apply", "nothing convolves", {"work": [("aten::mm", "sm80_xmma_gemm_bf16bf16", MS)]}),
    ],
)
def test_where_channels_last_pays(tmp_path: Path, state: str, why: str, of: dict[str, Any]) -> None:
    answer = ask(RULE, trained(tmp_path, **of))
    assert (answer.state, why in (answer.summary or answer.why)) == (state, True)


def test_of_a_device_of_unknown_bandwidth_the_conversions_count_alone(tmp_path: Path) -> None:
    found = ask(RULE, trained(tmp_path, device="NVIDIA Some GPU 9"))
    assert found.saving_ns == pytest.approx(MS, abs=2 * LAUNCH)
    assert "What batch norm gains is not known" in found.sure


def test_a_host_that_launches_too_late_gains_nothing(tmp_path: Path) -> None:
    late = [(op, kernel, LAUNCH // 3) for op, kernel, _ in (*CONVOLUTION, *NORMS)]
    assert ask(RULE, trained(tmp_path, late)).state == "clear"


# ---- on a CPU ------------------------------------------------------------------------------------------------------

CPU_WORK = {
    "aten::mkldnn_convolution": 200 * MS,
    "aten::native_batch_norm": 100 * MS,
    "aten::native_batch_norm_backward": 50 * MS,
    "aten::max_pool2d_with_indices": 30 * MS,
    "aten::max_pool2d_with_indices_backward": 10 * MS,
    "aten::convolution_backward": 300 * MS,
}


def computed(folder: Path, weight: list[int], **facts: Any) -> Path:
    """Record a rank on a CPU of 40 steps of 900 ms, of which 4 are traced; each has the operators of CPU_WORK once."""
    events: list[Any] = []
    for n in range(10, 14):
        events.append(traces.step(n, at := n * SECOND, 900 * MS))
        for name, dur in CPU_WORK.items():
            backward = name == "aten::convolution_backward"
            args = {"Input Dims": [*IMAGES[:2], weight], "Input type": ["float"] * 3} if backward else {}
            events.append(traces.op(name, at, dur, **args))
            at += dur + 1_000
    log = [runs.light(n, 900 * MS, profiled=int(10 <= n < 14)) for n in range(40)]
    made = traces.trace(*events, world_size=1, backend="gloo", device="")
    return runs.recorded(folder / "run", (made, log, {**runs.CPU, **facts}))


@pytest.mark.parametrize("weight", [[1024, 1024, 1, 1], [1024, 1024, 3, 3]])
def test_a_cpu_gains_norms_pooling_and_reorders_less_the_copies_of_gradients(tmp_path: Path, weight: list[int]) -> None:
    found = ask(RULE, computed(tmp_path, weight))
    gone = 100 * MS * (0.67 + 0.8) + 50 * MS * 0.2 + 40 * MS * 0.85
    copied = 0.55 * 100 * MS / ELEMENTS * 1024**2 * 9 if weight[2] > 1 else 0.0
    assert found.state == "found"
    assert found.saving_ns == pytest.approx(gone - copied, rel=0.005)
    assert "try" in found.sure


# ---- recorded on one H200, with the truth in README.md there -------------------------------------------------------


@pytest.mark.skipif(not H200.is_dir(), reason="needs ../shared/traces/h200")
def test_a_resnet_in_nchw_is_told_so_first_with_both_lines_and_its_next_step() -> None:
    result = diagnose(open_run(H200 / "g02_resnet_layout"), RULES, jobs=1)
    first = next(o for o in result.outcomes if o.state == "found")
    assert first.id == "memory_format"
    assert first.advice[0] == (
        "`model = model.to(memory_format=torch.channels_last)` before the optimizer is made, g02_resnet_layout.py:15,"
        " and `images = images.to(memory_format=torch.channels_last)` before g02_resnet_layout.py:18"
    )
    assert result.window is not None
    then = result.window.step_ns - first.saving_ns
    assert then == pytest.approx(29.54 * MS, rel=0.15)
    assert abs(then - 29.54 * MS) <= 2 * first.noise_ns


@pytest.mark.skipif(not H200.is_dir(), reason="needs ../shared/traces/h200")
@pytest.mark.parametrize(
    "name", ["g04_optimizer_loop", "g05_loader", "g06_grad_norm_items", "g07_pageable", "g14_synchronize"]
)
def test_other_causes_are_not_laid_to_the_format(name: str) -> None:
    assert ask(RULE, H200 / name).state == "clear"
