"""What kernels multiply on, by the names that libraries gave them in real traces and in their own sources."""

import gzip
import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from dlprof.analysis.compute.kernels import UNITS, kind_of, unit_of
from dlprof.analysis.engine import RankData
from dlprof.analysis.timeline import host
from dlprof.read.run import open_run
from tests.fixtures.places import TRACES

# Traces of V100, RTX 2080 Ti, A100, H100, B200, MI210, MI250 and MI300X; what no trace at hand holds is from the
# libraries' sources: FlashAttention 3 and 4, cuDNN's attention, DeepGEMM, CUTLASS 3, hipBLASLt's XF32, xFormers.
NAMES = {
    "tensor": (
        "volta_h884gemm_256x64_ldg8_tn",
        "turing_fp16_s1688gemm_fp16_128x128_ldg8_f2f_tn",
        "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn",
        "void cutlass::Kernel2<cutlass_75_tensorop_bf16_s1688gemm_bf16_128x128_nn_align1>(cutlass_75_tensorop_bf16",
        "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_32x1_nn_align8>(cutlass",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel",
        "void cutlass__5x_cudnn::Kernel<cutlass_tensorop_bf16_s16816fprop_optimized_bf16_256x64_32x4_nhwc_align8>",
        "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT",
        "nvjet_sm100_qqtst_mma_128x256x64_4_64x32x256_cga2x1x1_2cta",
        "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128, 128, 4, false, false",
        "void flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<128, 64, 64, 8, 4, 2, 2, false",
        "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::CollectiveMainloopFwd",
        "kernel_cutlass_kernel_flash_attncuteflash_fwd_sm100FlashAttentionForwardSm100_object_at__tensor0000o11",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_kernel0_0",
        "fmhaSm100aKernel_QkvE4m3OBfloat16H64PagedKvCausalP16VarSeqQ128Kv128PersistentContext",
        "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<cutlass::bfloat16_t",
        "bmm_MxE4m3_MxE2m1MxE4m3_Fp32_t128x16x256u2_s3_et128x16_m128x16x32_cga1x1x1_16dp256b_rM_TN_transOut",
        "bmm_Bfloat16_MxE2m1MxE4m3_Fp32_t128x16x256u2_s3_et128x16_m128x16x32_cga1x1x1",
        "void deep_gemm::sm90_fp8_gemm_1d2d_impl<(cute::UMMA::Major)1, 0u, 4096u, 7168u, 1u, 128u, 128u>",
        "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cutlass::gemm::GroupProblemShape<cute::tuple"
        "<int, int, int> >, cutlass::gemm::collective::CollectiveMma<cutlass::gemm::MainloopSm90ArrayTmaGmmaWarp"
        "SpecializedFP8<4, cute::tuple<cute::C<2>, cute::C<1>, cute::C<1> > >, cutlass::float_e4m3_t",
        "Cijk_Alik_Bljk_BBS_BH_Bias_HAS_SAV_UserArgs_MT16x16x256_MI16x16x1_SN_LDSB1_AFC1_AFEM1_AFEM1",
        "Cijk_Ailk_Bljk_B_BS_BH_Bias_HA_S_SAV_UserArgs_MT64x288x64_MI16x16x1_SN_LDSB1_AFC1_AFEM1",
        "Cijk_Ailk_Bljk_BBS_BH_MT128x128x64_MI16x16x16x1_SN_1LDSB0_APM1_AF0EM1_AF1EM1_AMAS3_ASE",
        "Cijk_Alik_Bljk_HHS_BH_MT128x128x32_MI32x32x8x1_SE_1LDSB0_APM1_AF0EM8_AF1EM1_AMAS3_ASAE01",
        "Cijk_Alik_Bljk_F8F8S_BH_Bias_HAS_SAB_SAV_UserArgs_MT256x256x128_MI16x16x1_SN_LDSB1",
        "igemm_wrw_gtcx3_nhwc_bf16_bx0_ex1_bt128x64x32_wt32x32x8_ws1x1_wr1x2_ta1x4x1x4_1x8x1x32",
        "igemm_fwd_gtcx2_nhwc_bf16_bx0_ex1_bt256x64x8_wt64x16x4_ws1x1_wr2x2_ta1x1x8x1_1x8x1x32_tb1x1x2x1_1x8x1x32_me",
        "_ZN2ck16tensor_operation6device12_GLOBAL__N_139kernel_grouped_conv_fwd_xdl_cshuffle_v3INS_28GridwiseGemm_xdl_"
        "cshuffle_v3INS_13tensor_layout4gemm8RowMajorENS6_11ColumnMajorES7_ttfttNS0_12element_wise11PassThroughESA_SA_",
        "_ZN2ck16tensor_operation6device12_GLOBAL__N_149kernel_grouped_conv_fwd_multiple_abd_xdl_cshuffleINS_34Gridwise"
        "GemmMultipleD_xdl_cshuffleIDF16bDF16bDF16bfDF16bNS_5TupleIJEEEDF16bNS0_12element_wise11PassThroughES8_S8_Li1",
        "_ZN2ck16tensor_operation6device37kernel_batched_gemm_xdlops_bwd_weightINS_47GridwiseGemm_bk0mk1_bk0nk1_mn_"
        "xdlops_bwd_weightILi64EttftLNS_25InMemoryDataOperationEnumE1ENS_16TensorDescriptorINS_5TupleIJNS_5EmbedI",
        "_ZN7ck_tile6kentryILi2ENS_38FmhaBatchPrefillWithPagedKVCacheKernelINS_40BlockFmhaBatchPrefillPipelineQRKSVS",
        "void paged_attention_ll4mi_QKV_mfma16_kernel<0, __hip_bfloat16, __hip_bfloat16, (vllm::Fp8KVCacheDataType)0>",
    ),
    "tf32": (
        "void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_64x64_32x6_tn_align4>(cutlass_80_tensorop_s1688gemm",
        "void cutlass_cudnn_infer::Kernel<cutlass_tensorop_s1688dgrad_optimized_tf32_64x128_32x3_nhwc_align4>(cutlass",
        "sm80_xmma_fprop_implicit_gemm_indexed_tf32f32_tf32f32_f32_nhwckrsc_nchw_tilesize128x128x16_stage4",
        "sm90_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x32_warpgroupsize1x1x1_execute_segment_k_off_kernel",
        "_ZN19cutlass_cudnn_train6KernelINS_4conv6kernel23ImplicitGemmConvolutionINS1_11threadblock22ImplicitGemmMulti"
        "stageINS_4gemm9GemmShapeILi128ELi128ELi32EEENS4_52Conv2dWgradOutputGradientTileAccessIteratorOptimizedINS_11"
        "MatrixShapeILi128ELi32EEENS_10tfloat32_tENS_9transform29PitchLinearWarpRakedThreadMap",
        "Cijk_Ailk_Bjlk_S_MX_B_Bias_HA_S_SAV_UserArgs_MT16x16x512_MI16x16x1_SN_LDSB1",
        "fmha_cutlassF_f32_aligned_64x128_gmem_sm80(PyTorchMemEffAttention::AttentionKernel<float, cutlass::arch::Sm80",
        "void deep_gemm::sm90_tf32_hc_prenorm_gemm_impl<24u, 7168u, 64u, 32u, 64u>",
    ),
    "float32": (
        "ampere_sgemm_128x64_tn",
        "volta_sgemm_32x32_sliced1x4_nt",
        "volta_scudnn_128x64_relu_interior_nn_v1",
        "cudnn_infer_ampere_scudnn_128x64_relu_xregs_large_nn_v1",
        "cudnn_volta_scudnn_winograd_128x128_ldg1_ldg4_relu_tile148t_nt_v1",
        "void cudnn::cnn::wgrad_alg0_engine<float, 128, 6, 7, 3, 3, 5, false, 512>(int",
        "void cudnn::detail::dgrad_engine<float, 512, 6, 5, 3, 3, 3, false>(int, int, int, float const*",
        "void implicit_convolve_sgemm<float, float, 1024, 6, 7, 3, 3, 5, 1, false, true, true>(int",
        "void cudnn::winograd_nonfused::winogradForwardData4x4<float, float>(cudnn::winograd_nonfused::Winograd",
        "void cudnn::winograd::generateWinogradTilesKernel<0, float, float>(cudnn::winograd::GenerateWinogradTiles",
        "void gemmSN_NN_kernel<float, 256, 4, 2, 8, 4, 4, false>(cublas",
        "void gemmk1_kernel<int, float, 256, 5, false, false, false, false, cublasGemvTensorStridedBatched<float>",
        "std::enable_if<!(false), void>::type internal::gemvx::kernel<int, int, float, float, float, float, false",
        "void cutlass::Kernel2<cutlass_80_simt_sgemm_128x32_8x5_nn_align1>(cutlass_80_simt_sgemm_128x32_8x5_nn_align1",
        "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize32x32x8_stage3_warpsize1x2x1_ffma_aligna4_alignc4",
        "void magma_sgemmEx_kernel<float, float, float, false, false, 6, 3, 5, 3, 3>(int, int, int, Tensor",
        "void sgemm_largek_lds64<true, true, 6, 3, 4, 5, 2, 66>(float*, float const*, float const*, int",
        "void fft2d_r2c_32x32<float, false, 5u, true>(float2*, float const*, int",
        "fmha_cutlassF_f32_aligned_64x64_rf_sm70(PyTorchMemEffAttention::AttentionKernel<float, cutlass::arch::Sm70",
        "Cijk_Ailk_Bljk_S_B_Bias_HA_S_SAV_UserArgs_MT16x16x128_MI16x16x1_SN_LDSB1_AFC1_AFEM1",
        "Cijk_Alik_Bljk_SB_Bias_AS_SAV_UserArgs_MT64x16x32_MI16x16x1_SN_LDSB0_AFC1_AFEM1_ISA90a",
        "igemm_fwd_gtcx3_nhwc_fp32_bx0_ex0_bt128x128x16_wt32x32x2_ws1x1_wr2x2_ta1x4x2x1_1x4x1x64",
    ),
    "unknown": (
        "triton_tem_fused_addmm_relu_0",
        "_matmul_ogs_NNT_bf16xbf16xmxfp4_128x128x128x1_swiglu",
        "fused_moe_kernel",
        "attn_fwd",
        "bwd_kernel_dk_dv",
        "kernel_unified_attention_2d",
        "sage_fwd",
        "_attn_fwd",
        "matmul_kernel",
        "volta_dgemm_64x64_nn",
        "void cutlass::Kernel2<cutlass_80_tensorop_d884gemm_64x64_16x4_nn_align1>(cutlass_80_tensorop_d884gemm",
        "void gemv2T_kernel_val<int, int, __nv_bfloat16, __nv_bfloat16, __nv_bfloat16, float, 128, 16, 4, 4, false",
        "void at::native::(anonymous namespace)::conv_depthwise2d_forward_kernel<3, float, int>(at::Generic",
    ),
    "": (
        "void at::native::vectorized_elementwise_kernel<4, at::native::AddFunctor<float>>",
        "void at::native::(anonymous namespace)::softmax_warp_forward<c10::BFloat16, c10::BFloat16, float, 9, false>",
        "void cudnn::bn_bw_1C11_kernel_new<float, float, float2, 512, true, 1>(float",
        "void cudnn::ops::nchwToNhwcKernel<float, float, float, false, true, (cudnnKernelDataType_t)2>(cudnn::ops",
        "void cudnn::cnn::reduce_wgrad_nchw_helper<float, float>(void*, void const*, float, int, int)",
        "cask_cudnn_train::computeWgradSplitKOffsetsKernel(cask_cudnn_train::ComputeSplitKOffsetsParams)",
        "void splitKreduce_kernel<32, 16, int, float, float, float, float, true, false, false>(cublasSplitKParams",
        "Cijk_S_PostGSU16_VW4_Bias_AS_SAV_UserArgs",
        "void pytorch_flash::flash_bwd_dot_do_o_kernel<true, pytorch_flash::Flash_bwd_kernel_traits<64, 128, 128, 8>>",
        "void flash_fwd_splitkv_combine_kernel<Flash_fwd_kernel_traits<128, 64, 128, 4, false, false>>",
        "void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16, unsigned char, (vllm::Fp8KVCacheDataType)1>",
        "triton_poi_fused_add_cos_sin_0",
        "triton_poi_fused_addmm_gelu_view_15",
        "triton_red_fused__unsafe_view_add_addmm_mul_native_layer_norm_split_unsqueeze_19",
        "triton_poi_fused__scaled_dot_product_flash_attention_cat_transpose_view_10",
        "triton__0d1d2d3d4d5d",
        "SubTensorOpWithScalar1d",
        "batched_transpose_32x32_half",
        "Im2d2Col_v2",
        "void split_embedding_codegen_forward_unweighted_kernel<c10::Half, c10::Half, float, false, long, 2ul>(at::Gen",
        "void fbgemm_gpu::permute_2D_data_kernel<false, int, int, decltype(nullptr)>(int, int",
        "void cub::DeviceRadixSortOnesweepKernel<cub::DeviceRadixSortPolicy<long, int, int>::Policy800, false",
        "MIOpenBatchNormFwdTrainSpatial",
    ),
}


@pytest.mark.parametrize(("unit", "name"), [(unit, name) for unit, names in NAMES.items() for name in names])
def test_a_name_tells_the_unit_or_that_it_does_not(unit: str, name: str) -> None:
    assert unit_of(name) == unit


def test_every_answer_but_nothing_has_words() -> None:
    assert set(UNITS) == set(NAMES) - {""}


def _launched(path: Path) -> list[tuple[str, str, str]]:
    """Read a trace's kernels with the operator that launched each: kernel, operator, type of its first operand."""
    found: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    ops = {}
    for event in found["traceEvents"]:
        args = event.get("args") or {}
        if event.get("cat") == "cpu_op" and "External id" in args:
            ops[args["External id"]] = (event["name"], str((args.get("Input type") or [""])[0]))
    return [
        (event["name"], *ops.get((event.get("args") or {}).get("External id"), ("", "")))
        for event in found["traceEvents"]
        if event.get("cat") == "kernel"
    ]


@pytest.mark.skipif(not TRACES.is_dir(), reason="the real traces are not here")
def test_on_a_real_trace_names_agree_with_what_the_operators_were_given() -> None:
    """An MI300X that trains ResNet in bfloat16: products and convolutions, and the operators that multiply nothing."""
    rows = _launched(TRACES / "gpu_async" / "mi300_resnet.json.gz")
    products = [(k, t) for k, o, t in rows if o in ("aten::mm", "aten::addmm", "aten::miopen_convolution")]
    assert len(products) > 100
    assert {t for _, t in products} == {"c10::BFloat16"}
    units = {k: unit_of(k) for k, _ in products}
    assert set(units.values()) == {"tensor", ""}  # "": layout and scaling around a convolution
    assert all("transpose" in k or k.startswith("SubTensorOp") for k, unit in units.items() if not unit)
    others = {unit_of(k) for k, o, _ in rows if o in ("aten::add_", "aten::clamp_min", "aten::miopen_batch_norm")}
    assert others == {""}


# The same, by what they do.
ATEN = "void at::native::vectorized_elementwise_kernel<4, at::native::{}, std::array<char*, 2ul> >(int)"

OF_KIND = {
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
        "void at::native::reduce_kernel<512, 1, ReduceOp<float, NormTwoOps<float, float> > >(R)",
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
        "void at::native::multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>, FusedAdamMathFunctor<float>>",
    ],
    "other": ["my_kernel", "triton__0d1d2d3d"],
}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in OF_KIND.items() for name in names])
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
    assert kind_of(OF_KIND["layout and type changes"][0], operator) == "layout and type changes"


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
