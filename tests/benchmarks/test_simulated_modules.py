"""Of simulated jobs the tree of modules is what was launched for them, and findings name those that were planted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import dlprof
from dlprof.analysis.modules.sums import OUTSIDE
from dlprof.analysis.modules.tree import IDLE
from dlprof.result.figures import InModule
from simulator import folder
from simulator.faults import FAULTS
from simulator.faults.fault import base
from simulator.job import Job, Recording
from simulator.play import work_by_module


def test_a_transformer_is_its_blocks_and_its_head(tmp_path: Path) -> None:
    job = replace(base(3), modules=True)
    simulation = folder.write(tmp_path / "run", job, Recording(form="torch-2.13"))
    run = dlprof.open(tmp_path / "run")
    tree = run.frame("module_means").set_index("path")
    assert tree.loc["", "kind"] == "Transformer"
    assert tree.loc["block*", "modules"] == job.model.blocks
    numbers = run.frame("window_steps")["step"]
    (rank,) = simulation.ranks
    launched = [work for stream in rank.work.values() for work in stream]
    expected = work_by_module(launched, range(int(numbers.min()), int(numbers.max()) + 1))

    def within(start: str, part: str = "") -> float:
        return sum(ns for (path, of), ns in expected.items() if path.startswith(start) and part in ("", of))

    assert tree.loc["block*", "device_ns"] == pytest.approx(within("block"), rel=1e-6)
    assert tree.loc["block*.up", "device_ns"] == pytest.approx(
        sum(within(f"block{n}.up") for n in range(job.model.blocks)), rel=1e-6
    )
    assert tree.loc["head", "backward_ns"] == pytest.approx(within("head", "backward"), rel=1e-6)
    outside = sum(ns for (path, _), ns in expected.items() if path == OUTSIDE)
    assert tree.loc["", "device_ns"] == pytest.approx(within("") - outside, rel=1e-6)
    # With what is outside, and what the device idles, that is the step.
    top = tree[tree["depth"] == 0]
    assert IDLE in set(top["kind"])
    assert top["ns"].sum() == pytest.approx(float(run.frame("window_steps")["dur_ns"].mean()), rel=1e-4)


def planted(name: str) -> Job:
    (fault,) = (f for f in FAULTS if f.name == name)
    return replace(fault.make(5), modules=True)


def found_in(tmp_path: Path, name: str, rule: str) -> tuple[InModule, ...]:
    """Return the modules that a rule's finding names in the job of a fault."""
    folder.write(tmp_path / "run", planted(name), Recording())
    (found,) = (o for o in dlprof.open(tmp_path / "run").result.found if o.id == rule)
    return found.modules


def test_products_in_float32_are_in_the_layers_that_multiply(tmp_path: Path) -> None:
    modules = found_in(tmp_path, "float32", "fp32_matmul")
    assert {one.path for one in modules} == {"block*.up", "block*.down", "block*.qkv", "head"}
    assert modules[0].kind == "Linear"
    assert sum(one.share for one in modules) == pytest.approx(0.93, abs=0.05)


@pytest.mark.parametrize(("name", "rule"), [("unfused_attention", "unfused_attention"), ("tiny_kernels", "host_bound")])
def test_what_the_blocks_do_is_in_them(tmp_path: Path, name: str, rule: str) -> None:
    first = found_in(tmp_path, name, rule)[0]
    assert first.path == "block*"
    assert first.share > 0.8


def test_what_the_script_does_between_modules_is_in_none(tmp_path: Path) -> None:
    assert found_in(tmp_path, "slow_python", "step_python") == ()
    result = dlprof.open(tmp_path / "run").result
    assert [o.id for o in result.found if not o.training] == ["step_python"]
