"""Kernels by their names, launchers and times, and what shorter ones would gain."""

from __future__ import annotations

import gzip
import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from dlprof.analysis.compute.kernels import UNITS, callers, kernels, kind_of, larger_batches, outer_operators, unit_of
from dlprof.analysis.compute.operators import tensor_cores
from dlprof.analysis.engine import RankData
from dlprof.analysis.timeline import host
from dlprof.errors import NotMeasured
from dlprof.read.run import open_run
from tests.fixtures import runs, traces
from tests.fixtures.places import TRACES
from tests.fixtures.runs import MS

A100 = "NVIDIA A100-SXM4-80GB"

# By kind and unit, in traces of V100, RTX 2080 Ti, A100, H100, B200, MI210, MI250 and MI300X; what no trace at hand
# holds is from the libraries' sources: FlashAttention 3, cuDNN's attention, DeepGEMM, CUTLASS 3, xFormers. Long names
# are cut down to what tells.
NAMES = {
    ("attention", ""): """
        void pytorch_flash::flash_bwd_dot_do_o_kernel<true, pytorch_flash::Flash_bwd_kernel_traits<64, 128, 128,
        void flash_fwd_splitkv_combine_kernel<Flash_fwd_kernel_traits<128, 64, 128, 4, false, false>>
        void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16, unsigned char, (vllm::Fp8KVCacheDataType)1>
        void cudnn::fusion::compute_dot_do_o_specialized<true, 64>(void const*)
    """,
    ("attention", "float32"): """
        fmha_cutlassF_f32_aligned_64x64_rf_sm70(PyTorchMemEffAttention::AttentionKernel<float, cutlass::arch::Sm7
    """,
    ("attention", "tensor"): """
        void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128, 128, 4, false, false
        void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::CollectiveMainloop
        _ZN7ck_tile6kentryILi2ENS_38FmhaBatchPrefillWithPagedKVCacheKernelINS_40BlockFmhaBatchPrefillPipelineQRKS
        void paged_attention_ll4mi_QKV_mfma16_kernel<0, __hip_bfloat16, __hip_bfloat16, (vllm::Fp8KVCacheDataType
    """,
    ("attention", "tf32"): """
        fmha_cutlassF_f32_aligned_64x128_gmem_sm80(PyTorchMemEffAttention::AttentionKernel<float, cutlass::arch::
    """,
    ("attention", "unknown"): """
        bwd_kernel_dk_dv
        kernel_unified_attention_2d
        sage_fwd
        _attn_fwd
    """,
    ("convolution", ""): """
        void cudnn::cnn::reduce_wgrad_nchw_helper<float, float>(void*, void const*, float, int, int)
        cask_cudnn_train::computeWgradSplitKOffsetsKernel(cask_cudnn_train::ComputeSplitKOffsetsParams)
        Im2d2Col_v2
    """,
    ("convolution", "float32"): """
        volta_scudnn_128x64_relu_interior_nn_v1
        void cudnn::cnn::wgrad_alg0_engine<float, 128, 6, 7, 3, 3, 5, false, 512>(int
        void cudnn::winograd_nonfused::winogradForwardData4x4<float, float>(cudnn::winograd_nonfused::Winograd
        void cudnn::winograd::generateWinogradTilesKernel<0, float, float>(cudnn::winograd::GenerateWinogradTiles
        void fft2d_r2c_32x32<float, false, 5u, true>(float2*, float const*, int
        igemm_fwd_gtcx3_nhwc_fp32_bx0_ex0_bt128x128x16_wt32x32x2_ws1x1_wr2x2_ta1x4x2x1_1x4x1x64
    """,
    ("convolution", "tensor"): """
        igemm_wrw_gtcx3_nhwc_bf16_bx0_ex1_bt128x64x32_wt32x32x8_ws1x1_wr1x2_ta1x4x1x4_1x8x1x32
        sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x64
    """,
    ("convolution", "tf32"): """
        sm80_xmma_fprop_implicit_gemm_indexed_tf32f32_tf32f32_f32_nhwckrsc_nchw_tilesize128x128x16_stage4
        _ZN19cutlass_cudnn_train6KernelINS_4conv…Conv2dWgradOutputGradient…NS_10tfloat32_tENS_9transform29Pitch
    """,
    ("convolution", "unknown"): """
        void at::native::(anonymous namespace)::conv_depthwise2d_forward_kernel<3, float, int>(at::Generic
    """,
    ("copies and fills", ""): """
        void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, std::array<char*, 2ul>
        __amd_rocclr_fillBufferAligned
    """,
    ("elementwise operators", ""): """
        void at::native::vectorized_elementwise_kernel<4, at::native::AddFunctor<float>>
        triton_poi_fused_addmm_gelu_view_15
        triton_poi_fused__scaled_dot_product_flash_attention_cat_transpose_view_10
        void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl(at::TensorIteratorBase&)
        void at::native::(anonymous namespace)::fused_dropout_kernel_vec<float, float, unsigned int, 1, 4, bool>(
        _swiglu_forward_kernel
    """,
    ("embedding, gather and sort", ""): """
        void fbgemm_gpu::permute_2D_data_kernel<false, int, int, decltype(nullptr)>(int, int
        void at::native::vectorized_gather_kernel<16, long>(char*, char*, long*)
        split_embedding_backward_codegen_rowwise_adagrad_unweighted_kernel_cta_per_row_1
    """,
    ("layout and type changes", ""): """
        SubTensorOpWithScalar1d
        void cudnn::engines_precompiled::nchwToNhwcKernel<__nv_bfloat16, __nv_bfloat16, float, false, true>(P)
        batched_transpose_32x32_half
        void at::native::vectorized_elementwise_kernel<4, at::native::bfloat16_copy_kernel_cuda(at::TensorIterato
        void at::native::(anonymous namespace)::CatArrayBatchedCopy<float, unsigned int, 2, 128, 1>(float*)
        triton_poi_fused__to_copy_clone_transpose_3
    """,
    ("matrix products", ""): """
        Cijk_S_PostGSU16_VW4_Bias_AS_SAV_UserArgs
        void cublasLt::splitKreduce_kernel<32, 16, int, float>(float)
    """,
    ("matrix products", "float32"): """
        void gemmSN_NN_kernel<float, 256, 4, 2, 8, 4, 4, false>(cublas
        std::enable_if<!(false), void>::type internal::gemvx::kernel<int, int, float, float, float, float, false
        sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize32x32x8_stage3_warpsize1x2x1_ffma_aligna4_alignc4
        Cijk_Ailk_Bljk_S_B_Bias_HA_S_SAV_UserArgs_MT16x16x128_MI16x16x1_SN_LDSB1_AFC1_AFEM1
    """,
    ("matrix products", "tensor"): """
        volta_h884gemm_256x64_ldg8_tn
        turing_fp16_s1688gemm_fp16_128x128_ldg8_f2f_tn
        ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn
        nvjet_sm100_qqtst_mma_128x256x64_4_64x32x256_cga2x1x1_2cta
        bmm_MxE4m3_MxE2m1MxE4m3_Fp32_t128x16x256u2_s3_et128x16_m128x16x32_cga1x1x1_16dp256b_rM_TN_transOut
        void deep_gemm::sm90_fp8_gemm_1d2d_impl<(cute::UMMA::Major)1, 0u, 4096u, 7168u, 1u, 128u, 128u>
        void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<…MainloopSm90ArrayTmaGmmaWarpSpecializedFP8<4
        Cijk_Alik_Bljk_BBS_BH_Bias_HAS_SAV_UserArgs_MT16x16x256_MI16x16x1_SN_LDSB1_AFC1_AFEM1_AFEM1
        Cijk_Alik_Bljk_F8F8S_BH_Bias_HAS_SAB_SAV_UserArgs_MT256x256x128_MI16x16x1_SN_LDSB1
    """,
    ("matrix products", "tf32"): """
        void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_64x64_32x6_tn_align4>(cutlass_80_tensorop_s1688gemm
        Cijk_Ailk_Bjlk_S_MX_B_Bias_HA_S_SAV_UserArgs_MT16x16x512_MI16x16x1_SN_LDSB1
    """,
    ("matrix products", "unknown"): """
        fused_moe_kernel
        matmul_kernel
        volta_dgemm_64x64_nn
        void cutlass::Kernel2<cutlass_80_tensorop_d884gemm_64x64_16x4_nn_align1>(cutlass_80_tensorop_d884gemm
        void gemv2T_kernel_val<int, int, __nv_bfloat16, __nv_bfloat16, __nv_bfloat16, float, 128, 16, 4, 4, false
    """,
    ("normalization", ""): """
        void cudnn::bn_bw_1C11_kernel_new<float, float, float2, 512, true, 1>(float
        MIOpenBatchNormFwdTrainSpatial
        void cudnn::bn_fw_tr_1C11_kernel_NCHW<float, float, 512, true, 1>(float)
        void at::native::(anonymous namespace)::GammaBetaBackwardCUDAKernelTemplate<float, float>(long)
        triton_per_fused_add_native_layer_norm_5
    """,
    ("optimizer kernels", ""): """
        void multi_tensor_apply_kernel<TensorListMetadata<4>, AdamFunctor<float>, float, float>(int)
        void at::native::multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>, FusedAdamMathFunctor<floa
    """,
    ("other", ""): """
        my_kernel
    """,
    ("pooling and resizing", ""): """
        void at::native::(anonymous namespace)::max_pool_backward_nchw<float, float>(float const*)
    """,
    ("reductions", ""): """
        void at::native::reduce_kernel<512, 1, ReduceOp<float, NormTwoOps<float, float> > >(R)
        void cub::DeviceScanKernel<cub::DeviceScanPolicy<int>::Policy600, int*>(int*)
        triton_red_fused_sum_4
    """,
    ("softmax and loss", ""): """
        void at::native::(anonymous namespace)::softmax_warp_forward<c10::BFloat16, c10::BFloat16, float, 9, fals
        void at::native::(anonymous namespace)::nll_loss_forward_reduce_cuda_kernel_2d<float, float, long>(float*
        void cunn_ClassNLLCriterion_updateOutput_kernel<float, float>(float*)
        liger_cross_entropy_kernel
        triton_red_fused__log_softmax_9
    """,
}


@pytest.mark.parametrize(("kind", "unit"), NAMES)
def test_a_name_shows_the_kind_and_the_unit(kind: str, unit: str) -> None:
    names = [line.strip() for line in NAMES[kind, unit].strip().splitlines()]
    assert {name: (kind_of(name), unit_of(name)) for name in names} == dict.fromkeys(names, (kind, unit))
    assert not unit or unit in UNITS


@pytest.mark.parametrize(
    ("operator", "kind"),
    [
        ("aten::mm", "matrix products"),
        ("aten::cudnn_convolution", "convolution"),
        ("aten::_scaled_dot_product_attention_math", "attention"),
    ],
)
def test_whose_product_it_is_says_the_operator(operator: str, kind: str) -> None:
    assert kind_of("nvjet_sm90_tst_64x8_64x16_4x1_v_bz_TNT", operator) == kind
    assert kind_of("batched_transpose_32x32_half", operator) == "layout and type changes"


REAL = sorted(
    str(path.relative_to(TRACES))
    for glob in ("h200/g0[12]*", "h200/g10*", "gpu_async/*", "r*", "d*_*")
    for path in TRACES.glob(glob)
)
SMALL = ("gpu_async/mi300_resnet.json.gz", "h200/g01_gpt_fp32", "resnet_rtx2080ti")  # makers and years; all are slow


@pytest.mark.skipif(not REAL, reason="the reference traces are not here (../shared/traces)")
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in SMALL)) for name in REAL])
def test_hardly_any_kernel_of_a_real_job_is_of_no_kind(name: str) -> None:
    work = pd.DataFrame(RankData(open_run(TRACES / name).ranks[0]).table("spans"))
    work = work[host.is_kind(work, "kernel")]
    other = [kind_of(str(kernel)) == "other" for kernel in work["name"]]
    assert len(work) > 100
    assert work["dur_ns"][other].sum() < 0.05 * work["dur_ns"].sum()


@pytest.mark.slow
@pytest.mark.skipif(not REAL, reason="the reference traces are not here (../shared/traces)")
def test_on_a_real_trace_names_agree_with_what_the_operators_were_given() -> None:
    """An MI300X that trains ResNet in bfloat16: products and convolutions, and the operators that multiply nothing."""
    events = json.loads(gzip.decompress((TRACES / "gpu_async/mi300_resnet.json.gz").read_bytes()))["traceEvents"]
    own = [(event, event.get("args") or {}) for event in events]
    ops = {args["External id"]: event for event, args in own if event.get("cat") == "cpu_op" and "External id" in args}
    launched = [
        (event["name"], ops.get(args.get("External id"))) for event, args in own if event.get("cat") == "kernel"
    ]
    by = {
        name: [(k, op) for k, op in launched if op and op["name"] == name] for name in {o["name"] for o in ops.values()}
    }
    products = [one for name in ("mm", "addmm", "miopen_convolution") for one in by[f"aten::{name}"]]
    assert len(products) > 100
    assert {op["args"]["Input type"][0] for _, op in products} == {"c10::BFloat16"}
    units = {k: unit_of(k) for k, _ in products}
    assert set(units.values()) == {"tensor", ""}  # "": layout and scaling around a convolution
    assert all("transpose" in k or k.startswith("SubTensorOp") for k, unit in units.items() if not unit)
    assert {
        unit_of(k) for name in ("add_", "clamp_min", "miopen_batch_norm") for k, _ in by.get(f"aten::{name}", [])
    } == {""}


def test_a_kernel_has_its_unit_its_step_and_the_innermost_operator_that_launched_it(tmp_path: Path) -> None:
    made = traces.trace(
        traces.step(0, 0, MS),
        traces.step(1, MS, MS),
        traces.op("aten::linear", 0, 100_000),
        traces.op("aten::addmm", 10_000, 50_000),
        traces.launched("ampere_sgemm_128x64_tn", 20_000, 50_000, 200_000, 1),
        traces.launched("attn_fwd", MS + 20_000, MS + 50_000, 100_000, 2),
        traces.copy(MS + 300_000, 1_000, 8),
    )
    rank = runs.rank_of(tmp_path, made)
    frame, spans = rank.once(kernels), rank.table("spans")
    assert frame["name"].to_list() == spans["name"][frame.index].to_list() == ["ampere_sgemm_128x64_tn", "attn_fwd"]
    assert frame["unit"].to_list() == ["float32", "unknown"]
    assert frame["step"].to_list() == [0, 1]
    assert frame["dur_ns"].to_list() == [200_000, 100_000]
    launcher, none = frame["owner"]
    assert (spans["name"][launcher], none) == ("aten::addmm", -1)


def test_time_on_tensor_cores_and_what_16_bits_would_save(tmp_path: Path) -> None:
    # 2 × 4096³ FLOP: 7.05 ms at the float32 peak, 0.88 ms at half of bfloat16's. The host waits in the end.
    size = [4096, 4096]
    made = traces.trace(
        traces.step(0, 0, 20 * MS),
        traces.product("aten::mm", 0, "ampere_sgemm_128x128_tn", 10_000, 8 * MS, 1, size, size, dtype="float"),
        traces.op("aten::conv2d", 30_000, 20_000),
        traces.launched("sm80_xmma_fprop_implicit_gemm_tf32f32", 40_000, 8 * MS + 10_000, MS, 2),
        traces.launched("elementwise", 50_000, 9 * MS + 10_000, 1 * MS, 3),
        traces.call("cudaStreamSynchronize", 60_000, 10 * MS, 4),
        device=A100,
    )
    (row,) = runs.rank_of(tmp_path, made).once(tensor_cores).to_dict("records")
    assert (row["kernel_ns"], row["tensor_ns"], row["tf32_ns"], row["float32_ns"]) == (10 * MS, MS, MS, 8 * MS)
    assert row["unknown_ns"] == 0
    casts = 4 * 3 * 4096**2 / 2 / 2.039e12 * 1e9
    assert row["fp32_saved_ns"] == pytest.approx(8 * MS - 2 * 4096**3 / 156e12 * 1e9 - casts, rel=1e-4)
    assert row["aligned"] == 0


def test_attention_in_float32_counts_as_such_though_it_is_made_of_tf32(tmp_path: Path) -> None:
    made = traces.trace(
        traces.step(0, 0, 20 * MS),
        traces.launched("fmha_cutlassF_f32_aligned_64x64_rf_sm80(Params)", 10_000, 20_000, 8 * MS, 1),
        traces.launched("cutlass_80_tensorop_s1688gemm_128x128_16x5_tn_align4", 20_000, 9 * MS, MS, 2),
        traces.call("cudaStreamSynchronize", 60_000, 10 * MS, 4),
        device=A100,
    )
    (row,) = runs.rank_of(tmp_path, made).once(tensor_cores).to_dict("records")
    assert (row["float32_ns"], row["tf32_ns"]) == (8 * MS, MS)
    assert row["fp32_saved_ns"] == pytest.approx(8 * MS * 0.75, rel=0.01)  # as on an A100: 1,018 ms became 240
    assert row["tf32_saved_ns"] == pytest.approx(MS * 0.4, rel=0.01)


def steps_of(busy: int, optimizer: int = 0, *, python: bool = False) -> dict[str, Any]:
    """Make steps of 1 ms of host time, operators or the script's own: `busy` ns of computing, `optimizer` ns of it."""
    events: list[Any] = []
    for n in range(4):
        t, c = n * MS, 10 * n + 1
        events += [traces.step(n, t, MS), *traces.launched("gemm", t, t + 10_000, busy, c)]
        events += [] if python else [traces.op("aten::linear", t + 6_000, MS - 7_000)]
        if optimizer:
            events.append(traces.annotation("Optimizer.step#SGD.step", t + 20_000, 100_000))
            events += traces.launched("sgd", t + 30_000, t + 12_000 + busy, optimizer, c + 1)
    return traces.trace(*events, world_size=1)


# What the device computes and its optimizer, µs of a step of 1 ms of the host; how much less each batch takes of 2, 4
# and 8 times the size, µs; with 2 times and the forward pass computed again; the share of the step in which the device
# waits; and the smallest batch that fills it.
Gain = tuple[dict[str, Any], list[float], float, float, float]
BATCHES: dict[str, Gain] = {
    # Until the device takes longer than the host the step does not grow; then it takes 0.3 ms a batch for ever.
    "the host takes longer": (steps_of(busy=300_000), [500, 700, 700], 333, 0.7, 3.0),
    "the optimizer stays": (steps_of(busy=588_000, optimizer=390_000), [217, 314, 363], 21, 0.03, 1.0),
    "the optimizer stays while the host takes longer": (
        steps_of(busy=200_000, optimizer=300_000),
        [500, 725, 762],
        333,
        0.5,
        3.0,
    ),
    "the device works all the time": (steps_of(busy=988_000), [10, 10, 10], -317, 0.0, 1.0),
    "nine tenths": (steps_of(busy=905_000), [95, 95, 95], -207, 0.1, 1.0),
    "no batch fills it": (steps_of(busy=100_000), [500, 750, 875], 333, 0.9, math.nan),
    "Python may grow with the batch": (steps_of(busy=300_000, python=True), [0, 0, 0], 0, 0.7, math.nan),
}


@pytest.mark.parametrize("name", BATCHES)
def test_what_larger_batches_gain(name: str, tmp_path: Path) -> None:
    made, gains, again, waits, fills = BATCHES[name]
    path = runs.recorded(tmp_path / "run", (made, [], {"device": {"type": "cuda", "name": "NVIDIA H100"}}))
    row = {"at_ns": traces.BASE_NS, "step": 0, "device": 0, "allocated_bytes": 1_000, "reserved_bytes": 2_000}
    (path / "ranks/00000/memory.jsonl").write_text(json.dumps(row) + "\n")
    frame = RankData(open_run(path).ranks[0]).once(larger_batches).set_index("times")
    assert frame.index.tolist() == [1, 1.5, 2, 3, 4, 8]
    assert (frame.loc[[2, 4, 8], "gain_ns"] / 1_000).tolist() == pytest.approx(gains, abs=20)
    assert frame["again_ns"].tolist()[2] / 1_000 == pytest.approx(again, abs=20)
    assert frame["wait_share"].iloc[0] == pytest.approx(waits, abs=0.02)
    assert frame["fills"].iloc[0] == pytest.approx(fills, rel=0.02, nan_ok=True)


def test_without_a_replay_it_abstains(tmp_path: Path) -> None:
    rank = runs.rank_of(tmp_path, traces.trace(traces.step(0, 0, MS), traces.op("aten::mm", 0, MS), device=""))
    with pytest.raises(NotMeasured):
        rank.once(larger_batches)


@pytest.mark.parametrize("seed", range(2))
def test_a_call_is_of_the_innermost_operator_in_which_it_begins(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    events: list[traces.Event] = []

    def nested(start: int, end: int, tid: int, depth: int) -> None:
        while start + 10 < end and depth < 6:
            stop = rng.randint(start + 5, end)
            if rng.random() < 0.3:
                events.append(traces.call("cudaLaunchKernel", start, stop - start, len(events) + 1, tid=tid))
            else:
                events.append(traces.op(f"aten::op{depth}", start, stop - start, tid=tid))
            nested(start + rng.randint(0, 3), stop, tid, depth + 1)
            start = stop + rng.randint(0, 200)

    for tid in (traces.MAIN, traces.AUTOGRAD):
        nested(0, 20_000, tid, 0)
    data = runs.rank_of(tmp_path, traces.trace(*events, traces.kernel("gemm", 0, 5)))
    spans, on_device = data.table("spans"), data.once(host.is_on_device)
    calls = np.flatnonzero(host.is_kind(spans, "runtime"))
    assert len(calls) > 20
    start, lane = spans["start_ns"].to_numpy(), spans["lane"].cat.codes.to_numpy()
    end, is_op = start + spans["dur_ns"].to_numpy(), host.is_kind(spans, "op")

    def around(row: int) -> int:
        rows = np.arange(len(spans))
        inside = is_op & (lane == lane[row]) & (start <= start[row]) & (end > start[row]) & (rows < row)
        return int(rows[inside].max(initial=-1))

    outer = data.once(outer_operators)
    expected = [around(row) for row in calls.tolist()]
    assert sum(row >= 0 for row in expected) > 10
    assert callers(spans, on_device, outer, calls).tolist() == expected
    assert [outer[row] for row in np.flatnonzero(is_op)] == [around(row) for row in np.flatnonzero(is_op).tolist()]
