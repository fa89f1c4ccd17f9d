"""What doctor, NVML, pytest and nvidia-smi say, and what of it passes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import faults, jobs, modes, probes, ranks, rates, settings
from benchmarks.gpu.jobs import Ended
from benchmarks.gpu.outcome import Part


def failed(parts: Sequence[Part]) -> list[str]:
    return [part.name for part in parts if part.state == "failed"]


def ended(code: int | None, out: str = "", errors: str = "") -> Ended:
    return Ended((), code, 1.0, tuple((0.0, text) for text in out.splitlines()), errors)


def test_doctor_must_see_the_gpu_and_every_source_of_it() -> None:
    checks = [{"source": source, "works": True, "found": "yes", "remedy": ""} for source in probes.SOURCES]
    checks[1]["found"] = "2.11.0+cu130, sees 1 × NVIDIA H200"
    assert failed(probes.of_doctor({"checks": checks})) == []
    checks[1]["found"] = "2.11.0+cu130, built for GPUs and sees none"
    assert failed(probes.of_doctor({"checks": checks})) == ["doctor sees the GPU"]
    checks[3]["works"] = False
    assert "doctor: NVML" in failed(probes.of_doctor({"checks": checks}))
    assert "doctor: torch.profiler" in failed(probes.of_doctor({"checks": checks[:2]}))


def test_counters_that_answer_and_that_do_not() -> None:
    nvml: dict[str, Any] = {"power_w": 480.0, "gpm": {"tensor_busy": 0.7}}
    told: dict[str, Any] = {"events": {"kernel": 4}, "nvml": nvml}
    assert failed(probes.of_counters(told)) == []
    assert failed(probes.of_counters({**told, "events": {"kernel": 0}})) == ["kernels in torch's own trace"]
    assert failed(probes.of_counters({**told, "nvml": "nvidia-ml-py is not installed"})) == ["NVML"]
    old = {**nvml, "gpm": "not supported by this GPU: GPM needs Hopper or later"}
    assert [p.state for p in probes.of_counters({**told, "nvml": old})] == ["passed", "passed", "skipped"]
    assert failed(probes.of_counters({**told, "nvml": {**nvml, "gpm": "Insufficient Permissions"}})) == ["GPM"]
    assert failed(probes.of_counters({**told, "nvml": {**nvml, "gpm": {}}})) == ["GPM: tensor cores"]


JUNIT = """<testsuites><testsuite name="pytest">
<testcase classname="tests.record.collectors.test_memory" name="test_a"/>
<testcase classname="tests.record.samplers.test_gpu" name="test_b">{}</testcase>
</testsuite></testsuites>"""


@pytest.mark.parametrize(
    ("said", "wrong"),
    [
        ("", []),
        ('<failure message="assert 1 == 2"/>', ["that failed"]),
        ('<error message="fixture not found"/>', ["that failed"]),
        ('<skipped message="needs a CUDA device"/>', ["none skipped for want of a GPU"]),
        ('<skipped message="no NVIDIA driver on this machine"/>', ["none skipped for want of a GPU"]),
        ('<skipped message="needs Lightning"/>', []),
    ],
)
def test_marked_tests_must_run_and_pass(said: str, wrong: list[str]) -> None:
    assert failed(probes.of_tests(JUNIT.format(said))) == wrong


def test_a_report_without_tests_passes_nothing() -> None:
    assert failed(probes.of_tests("<testsuites/>")) == ["tests marked gpu"]


def test_the_files_with_marked_tests_are_found() -> None:
    found = {path.relative_to(jobs.ROOT).as_posix() for path in probes.files_with_mark(jobs.ROOT / "tests")}
    assert {"tests/record/collectors/test_memory.py", "tests/record/samplers/test_gpu.py"} <= found
    assert Path(__file__).relative_to(jobs.ROOT).as_posix() not in found


def test_losses_must_be_equal_to_the_last_digit_and_as_many() -> None:
    plain = {"steps": 2, "losses": [0.1, 0.2]}
    assert failed(modes.of_mode("graph", plain, ended(0, '{"steps": 2, "losses": [0.1, 0.2]}'))) == []
    other = f'{{"steps": 2, "losses": [0.1, {0.2 + 3e-17!r}]}}'  # the next float
    assert failed(modes.of_mode("graph", plain, ended(0, other))) == ["graph: losses"]
    fewer = '{"steps": 1, "losses": [0.1]}'
    assert failed(modes.of_mode("graph", plain, ended(0, fewer))) == ["graph: steps made", "graph: losses"]
    for broken in (ended(1, "", "RuntimeError: capture"), ended(None), ended(0, "no JSON"), ended(0)):
        assert failed(modes.of_mode("graph", plain, broken)) == ["graph: exit 0"]


def test_samples_agree_with_nvidia_smi_of_the_same_seconds() -> None:
    rows = [
        {"at_ns": n, "power.draw": "630.0", "clocks.sm": "1980", "utilization.gpu": "100", "temperature.gpu": "52"}
        for n in range(5)
    ]
    rows += [{**rows[0], "at_ns": 100, "power.draw": "70.0"}]  # later, and idle
    sample: dict[str, Any] = {"power_w": 620.0, "sm_clock_mhz": 1965, "busy_share": 0.98, "temperature_c": 53}
    samples = [{"at_ns": n, **sample} for n in range(5)]
    assert failed(rates.agreement(samples, rows, 0, 10)) == []
    wrong = [{**row, "busy_share": 98.0, "power_w": 0.62} for row in samples]
    assert failed(rates.agreement(wrong, rows, 0, 10)) == ["power_w", "busy_share"]
    # Without a reading of either there is nothing to agree with.
    assert len(failed(rates.agreement(samples, [], 0, 10))) == len(rates.AGREE)
    assert len(failed(rates.agreement([], rows, 0, 10))) == len(rates.AGREE)


def test_contexts_on_other_gpus() -> None:
    plain: list[dict[str, str | None]] = [{"pid": "7", "gpu_uuid": "GPU-b"}, {"pid": "9", "gpu_uuid": "GPU-a"}]
    same: list[dict[str, str | None]] = [{"pid": "8", "gpu_uuid": "GPU-b"}]
    assert settings.of_contexts(plain, same, 7, 8, gpus=2).state == "passed"
    both: list[dict[str, str | None]] = [*same, {"pid": "8", "gpu_uuid": "GPU-a"}]
    assert settings.of_contexts(plain, both, 7, 8, gpus=2).state == "failed"
    assert settings.of_contexts(plain, both, 7, 8, gpus=1).state == "skipped"
    assert settings.of_contexts([], both, 7, 8, gpus=2).state == "skipped"


def test_nccl_that_refuses_two_ranks_on_a_gpu_is_told_from_one_that_fails() -> None:
    refused = ended(1, errors="NCCL WARN Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 5000\nend")
    assert ranks.is_refused(refused)
    assert not ranks.is_refused(ended(1, errors="RuntimeError: CUDA error: out of memory"))


def test_a_faults_gain_is_that_of_the_run_without_it_where_one_is_like_it() -> None:
    amp = next(group for group in faults.GROUPS if "tiny_batch" in group.faults)
    step = {"": 40.0, "full_precision": 90.0, "tiny_batch": 5.0, "odd_shapes": float("nan")}
    assert faults.oracle_of(amp, "full_precision", step) == {"step_ms": 90.0, "fixed_ms": 40.0, "gain_ms": 50.0}
    # Its step does less than any healthy one; nothing is known of one that printed too little.
    assert faults.oracle_of(amp, "tiny_batch", step)["gain_ms"] is None
    assert faults.oracle_of(amp, "odd_shapes", step) == {"step_ms": None, "fixed_ms": None, "gain_ms": None}
    assert faults.oracle_of(amp, "full_precision", {"full_precision": 90.0})["gain_ms"] is None


def test_a_workload_that_cannot_run_here_is_told_from_one_that_fails() -> None:
    needs = ended(1, errors="lightning_cnn.py needs Lightning: pip install 'lightning>=2.4'")
    assert faults.of_failure("x", needs, late=False).state == "skipped"
    usage = ended(2, errors="usage: x\nx.py: error: --fault slow_rank needs two ranks: torchrun ...")
    assert faults.of_failure("x", usage, late=False).state == "skipped"
    assert faults.of_failure("x", ended(1, errors="RuntimeError: CUDA error"), late=False).state == "failed"
    assert faults.of_failure("x", ended(None), late=False).state == "failed"
    assert faults.of_failure("x", ended(None), late=True).state == "skipped"
