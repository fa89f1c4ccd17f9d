"""What generated code calls, on code written by hand as Inductor writes it."""

from __future__ import annotations

import pytest

from dlprof.record.model.compiled import around, innermost, is_inside, kept, parameters_of, read

# A linear layer, a GELU and a layer norm on a GPU: the product reads a copy of its weight in 16 bits.
FORWARD = """
# kernel path: /tmp/inductor/ab/kernel.py
# Topologically Sorted Source Nodes: [up, act, norm], Original ATen: [aten.view, aten.gelu, aten.native_layer_norm]
# Source node to ATen node mapping:
#   act => erf, mul
#   norm => rsqrt, var_mean
#   up => view_1
# Graph fragment:
#   %view_1 : Tensor "bf16[8, 4]" = call_function[target=torch.ops.aten.view.default](args = (%mm,), kwargs = {})
triton_per_fused_gelu_native_layer_norm_view_1 = async_compile.triton('triton_per_fused_gelu_1', '''
import triton
def call(args):
    extern_kernels.mm(nothing)
''', device_str='cuda')

async_compile.wait(globals())

class Runner:
    def __init__(self, partitions):
        self.partitions = partitions

    def call(self, args):
        primals_1, primals_2, primals_3, primals_4 = args
        args.clear()
        assert_size_stride(primals_1, (4, 4), (4, 1))
        with torch.cuda._DeviceGuard(0):
            buf0 = empty_strided_cuda((4, 4), (4, 1), torch.bfloat16)
            # Topologically Sorted Source Nodes: [up], Original ATen: [aten._to_copy]
            stream0 = get_raw_stream(0)
            triton_poi_fused__to_copy_0.run(primals_1, buf0, 16, stream=stream0)
            buf1 = empty_strided_cuda((8, 4), (4, 1), torch.bfloat16)
            # Topologically Sorted Source Nodes: [x, up], Original ATen: [aten.view, aten.t, aten.mm]
            extern_kernels.mm(primals_2, reinterpret_tensor(buf0, (4, 4), (1, 4), 0), out=buf1)
            # Topologically Sorted Source Nodes: [up, act, norm], Original ATen: [aten.view, aten.gelu]
            triton_per_fused_gelu_native_layer_norm_view_1.run(buf1, primals_3, primals_4, buf2, 8, stream=stream0)
            # Topologically Sorted Source Nodes: [attend], Original ATen: [aten._scaled_dot_product_flash_attention]
            buf3 = torch.ops.aten._scaled_dot_product_flash_attention.default(buf2, buf2, buf2)
            assert_size_stride(buf3, (8, 4), (4, 1), 'torch.ops.aten._scaled_dot_product_flash_attention.default')
        return (buf3, primals_2, primals_3, reinterpret_tensor(buf0, (4, 4), (4, 1), 0), )

def get_args():
    extern_kernels.mm(after, the, end)
"""
BACKWARD = """
def call(args):
    primals_2, primals_3, permute_5, tangents_1 = args
    # Topologically Sorted Source Nodes: [mm_1], Original ATen: [aten.mm]
    extern_kernels.mm(tangents_1, permute_5, out=buf0)
    cpp_fused_sum_2(buf0, buf1)
    extern_kernels.bias_addmm(buf0, primals_2, primals_2, out=buf4)
    return (reinterpret_tensor(buf4, (4, 4), (4, 1), 0), None, buf1, buf2, )
"""


def test_calls_are_in_order_with_the_names_of_their_operators() -> None:
    code = read(FORWARD)
    assert [call.operator for call in code.calls] == [
        "triton_poi_fused__to_copy_0",
        "aten::mm",
        "triton_per_fused_gelu_native_layer_norm_view_1",
        "aten::_scaled_dot_product_flash_attention",
    ]
    assert [call.fused for call in code.calls] == [True, False, True, False]
    # Of a kernel, what computes; of an operator, itself.
    assert [call.nodes for call in code.calls] == [("up",), ("up",), ("act", "norm"), ("attend",)]
    assert code.calls[1].makes == {"buf1"}
    assert code.calls[3].makes == {"buf3"}
    assert {"primals_2", "buf0", "buf1"} <= code.calls[1].tensors
    assert code.arguments == ("primals_1", "primals_2", "primals_3", "primals_4")
    assert code.returned == ("buf3", "primals_2", "primals_3", "buf0")
    assert not code.is_backward


def test_a_backward_graph_is_told_by_parameters_gradients_and_what_the_forward_one_kept() -> None:
    code = read(BACKWARD)
    assert code.is_backward
    assert [call.operator for call in code.calls] == ["aten::mm", "", "aten::addmm"]
    assert parameters_of(code) == {"primals_2": 1, "primals_3": 2, "buf4": 0, "buf1": 2, "buf2": 3}
    assert parameters_of(read(FORWARD)) == {f"primals_{n + 1}": n for n in range(4)}
    assert kept(code, read(FORWARD)) == {"primals_2": "primals_2", "primals_3": "primals_3", "permute_5": "buf0"}
    other = BACKWARD.replace("primals_3, permute_5", "primals_1, permute_5")
    assert kept(read(other), read(FORWARD)) == {}
    assert kept(read(FORWARD), read(FORWARD)) == {}


@pytest.mark.parametrize("text", ["", "def call(args):", "\x00'''", "def call(args):\n    return (((", FORWARD[:900]])
def test_code_of_another_make_has_no_calls(text: str) -> None:
    assert read(text).calls == ()


def test_the_innermost_module_around_several() -> None:
    assert innermost(["h.0", "h.0.norm"]) == "h.0.norm"
    assert innermost(["h.0.norm", "h.0.up", "h.0"]) == "h.0"
    assert innermost(["h.0", "h.1"]) == "h"
    assert innermost(["", "head"]) == "head"
    assert around(["h.0", "h.0.norm"]) == "h.0"
    assert around(["head", "h"]) == around([]) == ""
    assert is_inside("h.0.up", "h.0")
    assert not is_inside("h.01", "h.0")
