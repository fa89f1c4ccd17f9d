"""The settings that advice cites, picked from what the recorder saw."""

from pathlib import Path
from typing import Any

from dlprof.analysis import settings
from dlprof.analysis.engine import Measured
from dlprof.analysis.timeline.steps import step_means
from tests.fixtures import runs, traces
from tests.fixtures.runs import MS


def run_with(folder: Path, *facts: dict[str, Any]) -> Measured:
    light = [runs.light(n, MS) for n in range(10)]
    return runs.measured(runs.recorded(folder / "run", *((None, light, f) for f in facts)), step_means)


def test_the_training_loader_is_told_from_the_validation_loader(tmp_path: Path) -> None:
    loaders = [{"role": "validation", "num_workers": 9}, {"role": "train", "num_workers": 3}]
    run = run_with(tmp_path, {}, {"loaders": loaders})
    assert settings.training_loader(run)["num_workers"] == 3
    assert settings.training_loader(run, 0) == {}


def test_the_largest_model_and_optimizer_are_meant(tmp_path: Path) -> None:
    models = [{"class": "Head", "parameters": 5}, {"class": "Net", "parameters": 50}]
    run = run_with(tmp_path, {"models": models, "optimizers": [{"class": "SGD", "parameters": 3}]})
    assert settings.model(run)["class"] == "Net"
    assert settings.optimizer(run)["class"] == "SGD"


def test_ranks_of_a_host_share_its_cores(tmp_path: Path) -> None:
    cpu = {"count": 16, "affinity": 16}
    run = run_with(tmp_path, *({"host": "a", "cpu": cpu} for _ in range(4)), {"host": "b", "cpu": cpu})
    assert settings.cores_per_rank(run, 0) == 4
    assert settings.cores_per_rank(run, 4) == 16


def test_the_version_of_torch_is_two_numbers_or_none(tmp_path: Path) -> None:
    said: tuple[dict[str, Any], ...] = ({"versions": {"torch": "2.13.0a0+git1"}}, {"versions": {"torch": None}}, {})
    run = run_with(tmp_path, *said)
    assert [settings.torch_version(run, r) for r in range(3)] == [(2, 13), None, None]


def test_the_allocators_variable_is_the_one_that_is_set_else_the_one_that_torch_has(tmp_path: Path) -> None:
    new, old = {"torch": "2.9.0"}, {"torch": "2.8.0"}
    set_old = {"PYTORCH_CUDA_ALLOC_CONF": "backend:native", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    set_new = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    run = run_with(
        tmp_path, {"versions": new}, {"versions": old}, {}, {"versions": new, "env": set_old}, {"env": set_new}
    )
    assert [settings.allocator(run, r) for r in range(5)] == [
        ("PYTORCH_ALLOC_CONF", None),
        ("PYTORCH_CUDA_ALLOC_CONF", None),
        ("PYTORCH_CUDA_ALLOC_CONF", None),
        ("PYTORCH_CUDA_ALLOC_CONF", "backend:native"),
        ("PYTORCH_ALLOC_CONF", "expandable_segments:True"),
    ]


def test_a_run_on_the_cpu_is_known_as_such(tmp_path: Path) -> None:
    assert settings.on_cpu(run_with(tmp_path / "a", {"device": {"type": "cpu"}}))
    both = run_with(tmp_path / "b", {"device": {"type": "cuda"}}, {"device": {"type": "cpu"}})
    assert (settings.on_cpu(both), settings.on_gpu(both)) == (False, True)
    unknown = run_with(tmp_path / "c", {})
    assert (settings.on_cpu(unknown), settings.on_gpu(unknown)) == (False, False)


def test_a_containers_quota_counts_where_it_is_less_than_the_cores(tmp_path: Path) -> None:
    several = [{"host": "a", "cpu": {"count": 16, "affinity": 16, "quota": q}} for q in (3.5, None, 40.0)]
    steps = [runs.light(0, runs.MS)]
    run = runs.measured(runs.recorded(tmp_path / "run", *((None, steps, facts) for facts in several)))
    assert [settings.cores(run, r) for r in (0, 1, 2)] == [3.5, 16, 16]
    assert [settings.cores_per_rank(run, r) for r in (0, 1)] == [1, 5]


def test_a_trace_that_lists_no_device_is_of_the_cpu_unless_its_backend_is_another_devices(tmp_path: Path) -> None:
    told: dict[str, dict[str, Any]] = {
        "gloo": {"device": "", "backend": "gloo"},
        "alone": {"device": "", "rank": None},
        "another": {"device": "", "backend": "mtia:hccl,cpu:gloo"},
        "gpu": {"backend": "gloo"},
    }
    made = {name: runs.foreign(tmp_path / name, traces.training(3, **keys)) for name, keys in told.items()}
    measured = {name: runs.measured(path, step_means) for name, path in made.items()}
    on_cpu = {name: settings.on_cpu(run) for name, run in measured.items()}
    assert on_cpu == {"gloo": True, "alone": True, "another": False, "gpu": False}
    assert {name: settings.on_gpu(run) for name, run in measured.items()} == {
        name: not on for name, on in on_cpu.items()
    }
