"""Which modules compiled kernels are of: in code as Inductor writes it, and in jobs that it compiles for the CPU."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import dlprof
from dlprof.record.collectors.compiled import Compiled, around, innermost, is_inside, kept, parameters_of, read
from dlprof.record.hooks import uninstall
from tests.fixtures import worlds
from tests.fixtures.in_process import run_plainly, run_recorded
from tests.fixtures.jobs import rows

torch: Any = pytest.importorskip("torch", reason="recording needs torch")

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler on a CPU")

JOB = """
import sys, torch
from contextlib import nullcontext
from torch import nn
torch._dynamo.reset()
torch._dynamo.utils.counters.clear()
torch.manual_seed(0)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)
    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(32, 1)
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)

model = called = Net()
if HOW == "ddp":
    called = nn.parallel.DistributedDataParallel(model)
if HOW == "blocks":
    for block in model.blocks:
        block.compile()
else:
    called = torch.compile(called)
narrow = torch.autocast("cpu", torch.bfloat16) if HOW == "blocks" else nullcontext()
x, y = torch.randn(64, 32, requires_grad=True), torch.randn(64, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(10):
    optimizer.zero_grad()
    with narrow:
        loss = nn.functional.mse_loss(called(x).float(), y)
    loss.backward()
    optimizer.step()
left = loss.item(), torch._dynamo.utils.counters["stats"]["unique_graphs"]
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder in which Inductor finds what another test has compiled."""
    return tmp_path_factory.mktemp("inductor")


@needs_compiler
@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", ["blocks", *(pytest.param(how, marks=pytest.mark.slow) for how in ("whole", "ddp"))])
def test_products_are_of_the_layers_that_they_are_of(
    how: str, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache))
    text = JOB.replace("HOW", repr(how))
    layers = ["blocks.0"] if how == "blocks" else ["blocks.0", "blocks.1"]
    products = [f"{layer}.{name}" for layer in layers for name in ("up", "down")] + ["head"] * (how != "blocks")
    left = set()
    with worlds.of_one():
        # Compiled, and once more from Inductor's cache.
        for run in ("0", "1")[: 1 if how == "ddp" else 2]:
            left.add(run_recorded(tmp_path, text, run=run, window=(4, 1, 3))["left"])
            written = rows(tmp_path / run / "ranks/00000", "compiled")
            products_of = [row for row in written if row["operator"] in ("aten::mm", "aten::addmm")]
            # One forward, and back one for the weight and one for the input.
            assert sorted(row["module"] for row in products_of) == sorted(products * 3)
            known = {"", "blocks", *layers, *products, *(f"{one}.norm" for one in layers)}
            assert {row["before"] for row in products_of} <= known
        if how != "ddp":
            left.add(run_plainly(tmp_path, text)["left"])
    assert len(left) == 1  # the same losses, and as many graphs

    tree = dlprof.open(tmp_path / run).frame("module_tree").set_index("path")
    assert tree.loc["blocks.*.up", "modules"] == 2
    assert (tree.loc[["blocks.*.up", "blocks.*.down"], ["forward_ns", "backward_ns"]] > 0).all(axis=None)
    assert tree["fused"].sum() == 1
    assert not tree["compiled"].any()


def test_nothing_is_watched_where_no_trace_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper: Any = torch._TorchCompileInductorWrapper
    before = wrapper.__call__
    monkeypatch.setenv("DLPROF_WINDOW", "off")
    Compiled()
    assert wrapper.__call__ is before


def test_a_graph_of_another_make_is_compiled_all_the_same() -> None:
    wrapper: Any = torch._TorchCompileInductorWrapper
    before, asked = wrapper.__call__, []
    try:
        wrapper.__call__ = lambda _self, model, *_: asked.append(model)
        made = Compiled()
        compiler = wrapper("default", None, False)
        compiler("no graph", [])
        compiler("another one", [])
        assert asked == ["no graph", "another one"]
        assert "graph" in made._error
        assert made._open.graphs == made._graphs == []
    finally:
        uninstall()
        wrapper.__call__ = before


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
