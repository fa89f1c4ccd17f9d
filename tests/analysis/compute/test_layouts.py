"""Which kernels depend on the memory format, by their names, and what they cost a step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dlprof.analysis.compute.layouts import nchw, passes_in_nhwc
from tests.fixtures import runs, traces
from tests.fixtures.runs import MS

NAN = float("nan")


@pytest.mark.parametrize(
    ("name", "passes"),
    [
        ("void cudnn::ops::nchwToNhwcKernel<float, float, float, false, true, (cudnnKernelDataType_t)2>", 0),
        ("void cudnn::engines_precompiled::nhwcToNchwKernel<__nv_bfloat16, __nv_bfloat16, float, true, false>", 0),
        ("void at::native::batch_norm_collect_statistics_kernel<at::native::Var, c10::BFloat16, float, int>", 1),
        ("void at::native::batch_norm_transform_input_kernel<c10::BFloat16, float, float, true, int>", 2),
        ("void at::native::batch_norm_backward_reduce_kernel<c10::Half, float, float, int>", 2),
        ("void at::native::batch_norm_backward_elemt_kernel<c10::Half, float, float, int>", 3),
        ("void at::native::batch_norm_backward_kernel<c10::BFloat16, float, float, int>", 5),
        ("void at::native::batch_norm_transform_input_channels_last_kernel<c10::BFloat16, float, float, 4>", NAN),
        ("void at::native::batch_norm_backward_elemt_channels_last_kernel<4, c10::BFloat16, float, float>", NAN),
        ("void cudnn::bn_fw_tr_1C11_kernel_NCHW<float, float, int, 512, true, 1, true>", NAN),
        ("sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x64", NAN),
        ("void at::native::(anonymous namespace)::max_pool_backward_nchw<c10::BFloat16, float, int>", NAN),
    ],
)
def test_what_stands_for_a_kernel_in_nhwc(name: str, passes: float) -> None:
    np.testing.assert_equal(passes_in_nhwc(name), passes)


def test_the_costs_are_those_of_a_mean_step(tmp_path: Path) -> None:
    """Two steps, of which the second has a conversion more; what was launched before the first counts in none."""
    images = ([8, 16, 32, 32], [8, 16, 32, 32], [16, 16, 3, 3])
    tensor, converts = "sm80_xmma_dgrad_implicit_gemm_bf16bf16", "cudnn::ops::nchwToNhwcKernel<float>"
    norm = "at::native::batch_norm_collect_statistics_kernel<c10::BFloat16>"
    events = [traces.launched(converts, -10_000, 0, 10_000, 99)]
    for n in range(2):
        at = n * 2 * MS
        events += [
            [traces.step(n, at, 2 * MS)],
            traces.product(
                "aten::convolution_backward", at, tensor, at + 20_000, MS // 2, 5 * n + 1, *images, dtype="half"
            ),
            traces.launched(norm, at + 30_000, at + MS, 200_000, 5 * n + 2),
            *(
                traces.launched(converts, at + 40_000 + k, at + MS + 300_000, 10_000, 5 * n + 3 + k)
                for k in range(n + 1)
            ),
        ]
    (row,) = runs.rank_of(tmp_path, traces.trace(*events)).once(nchw).to_dict("records")
    assert (row["norm_ns"], row["convert_ns"], row["dimensions"], row["against"]) == (200_000, 15_000, 4, "")
    # One pass over 131,072 elements, on an H100 of 3.35 TB/s.
    assert row["left_ns"] == pytest.approx(131_072 * 4 / (0.8 * 3350) + 18_000 / 8)
