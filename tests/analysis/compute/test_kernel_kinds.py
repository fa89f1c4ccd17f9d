"""The kinds of kernels, by names as devices and libraries give them."""

from __future__ import annotations

import pandas as pd
import pytest

from dlprof.analysis.compute.kernel_kinds import kind_of
from dlprof.analysis.engine import RankData
from dlprof.analysis.timeline import host
from dlprof.read.run import open_run
from tests.fixtures.places import TRACES

ATEN = "void at::native::vectorized_elementwise_kernel<4, at::native::{}, std::array<char*, 2ul> >(int)"

NAMES = {
    "matrix products": [
        "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_bias_TNT",
        "void cutlass::Kernel2<cutlass_80_simt_sgemm_128x256_8x4_nt_align1>(Params)",
        "Cijk_Ailk_Bjlk_BBS_BH_MT128x128x32",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float>(float)",
        "triton_tem_fused_mm_3",
    ],
    "convolution": [
        "sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x64",
        "void implicit_convolve_sgemm<__nv_bfloat16, __nv_bfloat16, 128, 5, 5>(int)",
        "void cudnn::winograd_nonfused::winogradForwardData4x4<float, float>(Params)",
        "igemm_wrw_gtcx3_nhwc_bf16_bx0_ex1_bt128x128x32",
        "void at::native::im2col_kernel<float>(long)",
        "cask_cudnn::computeOffsetsKernel(cask_cudnn::ComputeOffsetsParams)",
    ],
    "attention": [
        "fmha_cutlassB_f32_aligned_64x64_k64_dropout_sm80(Params)",
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x64",
        "void cudnn::fusion::compute_dot_do_o_specialized<true, 64>(void const*)",
        "void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128> >(Params)",
        "triton_tem_fused_flex_attention_2",
    ],
    "normalization": [
        "void at::native::batch_norm_backward_kernel<c10::BFloat16, float, float, int>(int)",
        "void cudnn::bn_fw_tr_1C11_kernel_NCHW<float, float, 512, true, 1>(float)",
        "void at::native::(anonymous namespace)::GammaBetaBackwardCUDAKernelTemplate<float, float>(long)",
        "MIOpenBatchNormFwdTrainSpatial",
        "triton_per_fused_add_native_layer_norm_5",
        "triton_red_fused_add_mean_mul_pow_rsqrt_1",
    ],
    "elementwise operators": [
        ATEN.format("CUDAFunctor_add<float>"),
        ATEN.format("GeluCUDAKernelImpl(at::TensorIteratorBase&)"),
        ATEN.format("(anonymous namespace)::masked_fill_kernel(at::TensorIterator&)"),
        "void at::native::(anonymous namespace)::fused_dropout_kernel_vec<float, float, unsigned int, 1, 4, bool>(T)",
        "triton_poi_fused_add_native_layer_norm_backward_7",
        "_swiglu_forward_kernel",
    ],
    "reductions": [
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::NormTwoOps<float, float> > >(R)",
        "void cub::DeviceScanKernel<cub::DeviceScanPolicy<int>::Policy600, int*>(int*)",
        "triton_red_fused_sum_4",
    ],
    "softmax and loss": [
        "void (anonymous namespace)::softmax_warp_forward<float, float, float, 10, true>(float*)",
        "void at::native::(anonymous namespace)::nll_loss_forward_reduce_cuda_kernel_2d<float, float, long>(float*)",
        "void cunn_ClassNLLCriterion_updateOutput_kernel<float, float>(float*)",
        "liger_cross_entropy_kernel",
        "triton_red_fused__log_softmax_9",
    ],
    "layout and type changes": [
        "void cudnn::engines_precompiled::nchwToNhwcKernel<__nv_bfloat16, __nv_bfloat16, float, false, true>(P)",
        "batched_transpose_32x32_half",
        ATEN.format("direct_copy_kernel_cuda(at::TensorIteratorBase&)"),
        ATEN.format("bfloat16_copy_kernel_cuda(at::TensorIteratorBase&)"),
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy<float, unsigned int, 2, 128, 1>(float*)",
        "triton_poi_fused__to_copy_clone_transpose_3",
    ],
    "pooling and resizing": [
        "void at::native::(anonymous namespace)::max_pool_backward_nchw<float, float>(float const*)"
    ],
    "embedding, gather and sort": [
        "void at::native::(anonymous namespace)::embedding_backward_feature_kernel<float, float, long>(long const*)",
        "void at::native::vectorized_gather_kernel<16, long>(char*, char*, long*)",
        "void cub::DeviceRadixSortOnesweepKernel<cub::DeviceRadixSortPolicy<long, int, int>::Policy800>(int*)",
        "split_embedding_backward_codegen_rowwise_adagrad_unweighted_kernel_cta_per_row_1",
    ],
    "copies and fills": [ATEN.format("FillFunctor<float>"), "__amd_rocclr_fillBufferAligned"],
    "optimizer kernels": [
        "void multi_tensor_apply_kernel<TensorListMetadata<4>, AdamFunctor<float>, float, float>(int)",
        "void at::native::multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>, FusedAdamMathFunctor<float>>(F)",
    ],
    "other": ["my_kernel", "triton__0d1d2d3d"],
}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in NAMES.items() for name in names])
def test_a_name_shows_the_kind(kind: str, name: str) -> None:
    assert kind_of(name) == kind


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
    assert kind_of(NAMES["layout and type changes"][0], operator) == "layout and type changes"


def real() -> list[str]:
    files = [*TRACES.glob("h200/g*"), *TRACES.glob("gpu_async/*"), *TRACES.glob("r*"), *TRACES.glob("d*_*")]
    return sorted(str(path.relative_to(TRACES)) for path in files)


@pytest.mark.skipif(not TRACES.is_dir(), reason="the reference traces are not here (../shared/traces)")
@pytest.mark.parametrize("name", real())
def test_hardly_any_kernel_of_a_real_job_is_of_no_kind(name: str) -> None:
    work = pd.DataFrame(RankData(open_run(TRACES / name).ranks[0]).table("spans"))
    work = work[host.is_kind(work, "kernel")]
    other = [kind_of(str(kernel)) == "other" for kernel in work["name"]]
    assert len(work) > 100
    assert work["dur_ns"][other].sum() < 0.05 * work["dur_ns"].sum()
