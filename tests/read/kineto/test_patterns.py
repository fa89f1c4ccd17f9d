"""The table of patterns, on names from real traces and libraries."""

import pytest

from dlprof import schema
from dlprof.read.kineto import patterns


@pytest.mark.parametrize(
    ("category", "name", "expected"),
    [
        ("kernel", "ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)", "communication"),
        ("Kernel", "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "communication"),
        ("kernel", "void rcclKernel<1>(int)", "communication"),
        ("kernel", "void ncclDevKernel_Generic_4(ncclDevComm*)", "communication"),
        ("kernel", "void vllm::cross_device_reduce_1stage<__half, 2>(RankData*)", "communication"),
        ("kernel", "void deep_ep::internode::dispatch<false, 4>(int4*)", "communication"),
        ("kernel", "void deep_ep::internode_ll::combine<true>(void*)", "communication"),
        ("kernel", "void deep_ep::intranode::combine<__nv_bfloat16, 4>(int)", "communication"),
        ("kernel", "void dpsk::ep::internode::dispatch_ll<true, 3, 10, 7168>(void*, float*)", "communication"),
        ("kernel", "void deep_ep::elastic::dispatch_impl<true, false, 24>(void*)", "communication"),
        ("kernel", "void deep_ep::elastic::hybrid_combine_impl<true, 24>(void*)", "communication"),
        ("kernel", "void deep_ep::elastic::combine_reduce_epilogue_impl<true>(void*)", "kernel"),
        ("kernel", "void deep_ep::elastic::dispatch_copy_epilogue_impl<true>(void*)", "kernel"),
        ("kernel", "void deep_ep::layout::get_dispatch_layout<256, 32, 8>(long const*)", "kernel"),
        ("kernel", "void hybrid_ep::dispatch_kernel<uint16_t>(hybrid_ep::param)", "communication"),
        ("kernel", "void mori::moe::EpDispatchIntraNodeKernel<__hip_bfloat16>(int)", "communication"),
        ("kernel", "nvshmemi_transfer_rma", "communication"),
        ("kernel", "mscclpp::allreduce6<float>", "communication"),
        ("kernel", "oneccl_allreduce_medium", "communication"),
        ("kernel", "ncclSymkDevKernel_AllReduce_RSxLDMC_AGxSTMC_sum_bf16(ncclSymkDevWorkArgs4K)", "communication"),
        ("kernel", "kuserbuffers_pushrecv(int, int, int, int*, int*, int)", "communication"),
        ("kernel", "void userbuffers_fp16_sum_inplace_gpu_rw<8>(int, int, int)", "communication"),
        ("kernel", "hipLaunchByPtr_kernel", "kernel"),
        ("kernel", "void at::native::reduce_kernel<512, 1>(at::native::ReduceOp<float>)", "kernel"),
        ("kernel", "void gather_kernel<float>(int)", "kernel"),
        ("kernel", "void at::native::vectorized_elementwise_kernel<4>(int)", "kernel"),
        ("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", "copy"),
        ("Memcpy", "Memcpy DtoD (Device -> Device)", "copy"),
        ("Memset", "Memset (Device)", "set"),
        ("cuda_sync", "Event Sync", "sync"),
        ("gpu_user_annotation", "ProfilerStep#3", "annotation"),
        ("gpu_user_annotation", "nccl:all_reduce", "annotation"),
    ],
)
def test_device_work_is_told_apart(category: str, name: str, expected: str) -> None:
    assert patterns.kind_of(category, name) == ("device", expected)


@pytest.mark.parametrize(
    ("category", "name", "expected"),
    [
        ("cpu_op", "aten::mm", "op"),
        ("Operator", "aten::mm", "op"),
        ("cpu_op", "c10d::allreduce_", "communication"),
        ("cpu_op", "_c10d_functional::all_gather_into_tensor", "communication"),
        ("cpu_op", "c10d_functional::wait_tensor", "communication"),
        ("cpu_op", "record_param_comms", "communication"),
        ("user_annotation", "gloo:all_reduce", "communication"),
        ("user_annotation", "horovod:all_reduce", "communication"),
        ("user_annotation", "nccl:_all_gather_base", "communication"),
        ("user_annotation", "nccl::not_a_mark", "annotation"),
        ("user_annotation", "FSDP::all_gather (layers.0)", "annotation"),
        ("user_annotation", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", "fetch"),
        ("Operator", "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", "fetch"),
        ("user_annotation", "dlprof::fetch", "fetch"),
        ("Operator", "ProfilerStep#12", "annotation"),
        ("Operator", "Optimizer.step#SGD.step", "annotation"),
        ("user_annotation", "## forward ##", "annotation"),
        ("cuda_runtime", "cudaLaunchKernel", "runtime"),
        ("cuda_driver", "cuLaunchKernel", "runtime"),
        ("Runtime", "cudaMemcpyAsync", "runtime"),
        ("xpu_runtime", "urEnqueueKernelLaunch", "runtime"),
        ("python_function", "train.py(12): main", "python"),
    ],
)
def test_host_work_is_told_apart(category: str, name: str, expected: str) -> None:
    assert patterns.kind_of(category, name) == ("host", expected)


def test_what_no_pattern_knows_is_told_from_what_has_no_rows() -> None:
    assert patterns.kind_of("Trace", "PyTorch Profiler (0)") is None
    assert patterns.NO_ROWS.fullmatch("Trace")
    assert patterns.kind_of("quantum", "entangle") is None
    assert not patterns.NO_ROWS.fullmatch("quantum")


def test_every_pattern_gives_a_declared_kind() -> None:
    assert {p.kind for p in patterns.PATTERNS} <= set(schema.KINDS)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("allreduce", "all_reduce"),
        ("allreduce_coalesced", "all_reduce"),
        ("_allgather_base", "all_gather"),
        ("all_gather_into_tensor", "all_gather"),
        ("ALLGATHER", "all_gather"),
        ("_reduce_scatter_base", "reduce_scatter"),
        ("alltoallv", "all_to_all"),
        ("all_to_all", "all_to_all"),
        ("broadcast", "broadcast"),
        ("_reduce_oop", "reduce"),
        ("gather", "gather"),
        ("scatter", "scatter"),
        ("send", "send"),
        ("recv_anysource", "recv"),
        ("barrier", "barrier"),
        ("c10d::allreduce_", "all_reduce"),
        ("c10d::_reduce_scatter_base_", "reduce_scatter"),
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)", "all_reduce"),
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "reduce_scatter"),
        ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclWorkElem)", "send_recv"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "send_recv"),
        ("ncclSymkDevKernel_ReduceScatter_LL_sum_bf16(ncclSymkDevWorkArgs4K)", "reduce_scatter"),
        ("ncclSymkDevKernel_AllReduce_RSxLDMC_AGxSTMC_sum_bf16(ncclSymkDevWorkArgs4K)", "all_reduce"),
        ("_c10d_functional::wait_tensor", ""),
        ("nccl:coalesced", ""),
    ],
)
def test_collectives_have_one_name_each(text: str, expected: str) -> None:
    assert patterns.collective_of(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Memcpy HtoD (Pageable -> Device)", ("HtoD", "pageable")),
        ("Memcpy DtoH (Device -> Pinned)", ("DtoH", "pinned")),
        ("Memcpy HtoD (Host -> Device)", ("HtoD", "")),
        ("Memcpy DtoD (Device -> Device)", ("DtoD", "")),
        ("Memcpy PtoP (Device -> Device)", ("PtoP", "")),
        ("HtoD", ("HtoD", "")),
        ("CopyDeviceToHost", ("DtoH", "")),
        ("Memcpy", ("", "")),
    ],
)
def test_copies_tell_direction_and_memory(text: str, expected: tuple[str, str]) -> None:
    assert patterns.copy_of(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Float", ("float32", 4)),
        ("float", ("float32", 4)),
        ("c10::BFloat16", ("bfloat16", 2)),
        ("c10::Half", ("float16", 2)),
        ("Long", ("int64", 8)),
        ("long int", ("int64", 8)),
        ("Byte", ("uint8", 1)),
        ("Float8_e4m3fn", ("float8_e4m3fn", 1)),
        ("TensorList", ("TensorList", 0)),
    ],
)
def test_element_types_have_one_name_and_a_size(text: str, expected: tuple[str, int]) -> None:
    assert patterns.element_type(text) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("rank-34.Jul_15_10_52_41.1074.pt.trace.json.gz", 34),
        ("rank_3_trace.json", 3),
        ("rank12.json", 12),
        ("worker0.1623143089861.pt.trace.json.gz", 0),
        ("trace_rank7.json", 7),
        ("resnet50_workers4.json", None),
        ("frank3.json", None),
        ("node_1234.1623143089861.pt.trace.json", None),
    ],
)
def test_the_rank_stands_in_the_name_or_not(name: str, expected: int | None) -> None:
    assert patterns.rank_in(name) == expected
