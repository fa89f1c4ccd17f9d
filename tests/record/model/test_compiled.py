"""Which modules compiled kernels are of, in jobs that Inductor compiles for the CPU."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

import dlprof
from dlprof.record.hooks import uninstall
from dlprof.record.model.compiled import Compiled
from tests.fixtures.jobs import environment, launch, record, tiny

pytest.importorskip("torch", reason="recording needs torch")

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler on a CPU")

JOB = """
    from contextlib import nullcontext

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
    if "blocks" in sys.argv:
        for block in model.blocks:
            block.compile()
    if "ddp" in sys.argv:
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        called = nn.parallel.DistributedDataParallel(model)
    if "blocks" not in sys.argv:
        called = torch.compile(called)
    narrow = torch.autocast("cpu", torch.bfloat16) if "autocast" in sys.argv else nullcontext()
    x, y = torch.randn(64, 32, requires_grad=True), torch.randn(64, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(10):
        optimizer.zero_grad()
        with narrow:
            loss = nn.functional.mse_loss(called(x).float(), y)
        loss.backward()
        optimizer.step()
    print(loss.item(), torch._dynamo.utils.counters["stats"]["unique_graphs"])
"""


def calls(folder: Path) -> list[dict[str, str]]:
    text = (folder / "ranks" / "00000" / "compiled.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("inductor")


@needs_compiler
@pytest.mark.long
@pytest.mark.parametrize("how", [("whole",), ("blocks", "autocast"), ("ddp",)], ids="-".join)
def test_products_are_of_the_layers_that_they_are_of(tmp_path: Path, cache: Path, how: tuple[str, ...]) -> None:
    # Of the whole model once compiled, and once from Inductor's cache.
    env = environment(TORCHINDUCTOR_CACHE_DIR=str(cache), TORCHINDUCTOR_COMPILE_THREADS="1")
    loop = tiny(tmp_path, JOB)
    layers = ["blocks.0"] if "blocks" in how else ["blocks.0", "blocks.1"]
    products = [f"{layer}.{name}" for layer in layers for name in ("up", "down")] + ["head"] * ("blocks" not in how)
    said = set()
    for again in range(2 if how == ("whole",) else 1):
        folder = tmp_path / str(again)
        said.add(record(loop, *how, folder=folder, options=["--window", "4,1,3"], env=env).stdout)
        rows = [row for row in calls(folder) if row["operator"] in ("aten::mm", "aten::addmm")]
        # One forward, and back one for the weight and one for the input.
        assert sorted(row["module"] for row in rows) == sorted(products * 3)
        assert {row["before"] for row in rows} <= {"", "blocks", *layers, *products, *(f"{one}.norm" for one in layers)}
    if how == ("whole",):
        said.add(launch([sys.executable, loop, *how], tmp_path, env=env).stdout)
    assert len(said) == 1  # the same losses, and as many graphs

    tree = dlprof.open(folder).frame("module_tree").set_index("path")
    assert tree.loc["blocks.*.up", "modules"] == 2
    assert (tree.loc[["blocks.*.up", "blocks.*.down"], ["forward_ns", "backward_ns"]] > 0).all(axis=None)
    assert tree["fused"].sum() == 1
    assert not tree["compiled"].any()


def test_nothing_is_watched_where_no_trace_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    torch: Any = pytest.importorskip("torch")
    wrapper: Any = torch._TorchCompileInductorWrapper
    before = wrapper.__call__
    monkeypatch.setenv("DLPROF_WINDOW", "off")
    Compiled()
    assert wrapper.__call__ is before


def test_a_graph_of_another_make_is_compiled_all_the_same() -> None:
    torch: Any = pytest.importorskip("torch")
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
