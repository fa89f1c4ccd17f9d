"""The settings that advice cites, picked from what the recorder saw."""

from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis import settings
from dlprof.analysis.engine import Measured
from dlprof.analysis.timeline.steps import step_means
from tests.fixtures import runs, traces
from tests.fixtures.runs import MS


def run_with(folder: Path, *facts: dict[str, Any]) -> Measured:
    light = [runs.light(n, MS) for n in range(10)]
    return runs.measured(runs.recorded(folder / "run", *((None, light, f) for f in facts)), step_means)


def test_the_training_loader_and_the_largest_model_and_optimizer_are_meant(tmp_path: Path) -> None:
    loaders = [{"role": "validation", "num_workers": 9}, {"role": "train", "num_workers": 3}]
    models = [{"class": "Head", "parameters": 5}, {"class": "Net", "parameters": 50}]
    optimizers = [{"class": "SGD", "parameters": 3}]
    run = run_with(tmp_path, {}, {"loaders": loaders, "models": models, "optimizers": optimizers})
    assert (settings.training_loader(run)["num_workers"], settings.training_loader(run, 0)) == (3, {})
    assert (settings.model(run)["class"], settings.optimizer(run)["class"]) == ("Net", "SGD")


def test_ranks_of_a_host_share_its_cores_of_which_a_containers_quota_may_leave_fewer(tmp_path: Path) -> None:
    cpu = {"count": 16, "affinity": 16}
    run = run_with(tmp_path / "a", *({"host": "a", "cpu": cpu} for _ in range(4)), {"host": "b", "cpu": cpu})
    assert [settings.cores_per_rank(run, r) for r in (0, 4)] == [4, 16]
    run = run_with(tmp_path / "b", *({"host": "a", "cpu": cpu | {"quota": q}} for q in (3.5, None, 40.0)))
    assert [settings.cores(run, r) for r in (0, 1, 2)] == [3.5, 16, 16]
    assert [settings.cores_per_rank(run, r) for r in (0, 1)] == [1, 5]


def test_the_version_of_torch_is_two_numbers_or_none(tmp_path: Path) -> None:
    run = run_with(tmp_path, {"versions": {"torch": "2.13.0a0+git1"}}, {"versions": {"torch": None}}, {})
    assert [settings.torch_version(run, r) for r in range(3)] == [(2, 13), None, None]


OLD, NEW = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"


def test_the_allocators_variable_is_the_one_that_is_set_else_the_one_that_torch_has(tmp_path: Path) -> None:
    new, old = {"versions": {"torch": "2.9.0"}}, {"versions": {"torch": "2.8.0"}}
    both = {OLD: "backend:native", NEW: "expandable_segments:True"}
    run = run_with(tmp_path, new, old, {}, {**new, "env": both}, {"env": {NEW: "expandable_segments:True"}})
    told = [(NEW, None), (OLD, None), (OLD, None), (OLD, "backend:native"), (NEW, "expandable_segments:True")]
    assert [settings.allocator(run, r) for r in range(5)] == told


@pytest.mark.parametrize(
    ("ranks", "on_cpu", "on_gpu"),
    [([{"device": {"type": "cpu"}}], 1, 0), ([{"device": {"type": t}} for t in ("cuda", "cpu")], 0, 1), ([{}], 0, 0)],
)
def test_a_run_on_the_cpu_is_known_as_such(
    tmp_path: Path, ranks: list[dict[str, Any]], on_cpu: int, on_gpu: int
) -> None:
    run = run_with(tmp_path, *ranks)
    assert (settings.on_cpu(run), settings.on_gpu(run)) == (on_cpu, on_gpu)


@pytest.mark.parametrize(
    ("keys", "on_cpu"),
    [
        ({"device": "", "backend": "gloo"}, True),
        ({"device": "", "rank": None}, True),
        ({"device": "", "backend": "mtia:hccl,cpu:gloo"}, False),
        ({"backend": "gloo"}, False),
    ],
)
def test_a_trace_that_lists_no_device_is_of_the_cpu_unless_its_backend_is_another_devices(
    tmp_path: Path, keys: dict[str, Any], on_cpu: bool
) -> None:
    run = runs.measured(runs.foreign(tmp_path, traces.training(3, **keys)), step_means)
    assert (settings.on_cpu(run), settings.on_gpu(run)) == (on_cpu, not on_cpu)
