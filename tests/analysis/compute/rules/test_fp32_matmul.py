"""Products in float32: found with a prediction, silent on tensor cores and where the host is late, else abstaining."""

from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.compute.rules.fp32_matmul import RULE
from dlprof.result import Setting
from tests.fixtures import processors, runs, traces
from tests.fixtures.asking import ask
from tests.fixtures.runs import MS

A100 = "NVIDIA A100-SXM4-80GB"


def trained(folder: Path, kernel: str, device: str = A100, waits: bool = True, **facts: Any) -> Path:
    """Write three steps of 10 ms, of which 6 ms are one kernel; the host waits for it, or launches too late."""
    events: list[Any] = []
    for n in range(3):
        t = n * 10 * MS
        events += [traces.step(n, t, 10 * MS), traces.op("aten::mm", t, 40_000)]
        events += traces.launched(kernel, t, t + 10_000, 6 * MS, 3 * n + 1)
        after = t + 50_000 if waits else t + 6 * MS
        events += traces.launched("elementwise", after, t + 6 * MS + 10_000, 3 * MS, 3 * n + 2)
        events += [traces.call("cudaStreamSynchronize", t + 100_000, 9 * MS, 3 * n + 3)] if waits else []
    made = traces.trace(*events, world_size=1, device=device)
    if not facts:
        return runs.foreign(folder, made)
    return runs.recorded(folder / "run", (made, [], {"device": {"type": "cuda", "name": device}, **facts}))


def test_found_with_what_tensor_cores_would_leave(tmp_path: Path) -> None:
    matmul = {"float32_precision": "highest", "cudnn_allow_tf32": False}
    found = ask(RULE, trained(tmp_path, "ampere_sgemm_128x64_tn", autocast={"enabled": False}, matmul=matmul))
    assert found.state == "found"
    # 19.5 TFLOP/s in float32, half of 312 in bfloat16.
    assert found.saving_ns == pytest.approx(6 * MS * (1 - 19.5 / 156), rel=1e-6)
    assert (found.ranks, [cost.ns for cost in found.by_rank]) == ((0,), [found.saving_ns])
    assert "16 times as fast in bfloat16" in found.summary
    assert [change.settings for change in found.changes] == [
        (Setting("autocast_enabled", False, True), Setting("autocast_dtype", None, "bfloat16")),
        (Setting("float32_precision", "highest", "high"),),
        (Setting("allow_tf32", False, True),),
    ]
    assert all(change.numerics for change in found.changes)
    assert "autocast is off" in found.advice[0]
    assert 'is "highest"' in found.advice[1]
    assert "cudnn.allow_tf32" in found.advice[2]
    assert found.evidence is not None
    assert found.evidence.columns[-1] == "in float32_ns"
    assert found.evidence.rows == (("aten::mm", None, 1, 6 * MS),)


def test_tf32_goes_by_the_names_of_the_jobs_torch(tmp_path: Path) -> None:
    matmul = {"matmul_fp32_precision": "ieee", "conv_fp32_precision": "ieee", "fp32_precision": "none"}
    facts: dict[str, Any] = {"matmul": matmul, "versions": {"torch": "2.9.1+cu128"}}
    found = ask(RULE, trained(tmp_path, "ampere_sgemm_128x64_tn", **facts))
    assert 'torch.backends.cuda.matmul.fp32_precision = "tf32"' in found.advice[1]
    assert 'is "ieee"' in found.advice[1]
    assert 'torch.backends.cudnn.conv.fp32_precision = "tf32"' in found.advice[2]
    assert [c.settings for c in found.changes[1:]] == [(Setting("fp32_precision", "ieee", "tf32"),)] * 2


def test_amds_float32_products_are_found_by_their_type_codes(tmp_path: Path) -> None:
    name = "Cijk_Ailk_Bljk_S_B_Bias_HA_S_SAV_UserArgs_MT16x16x128_MI16x16x1_SN_LDSB1_AFC1"
    found = ask(RULE, trained(tmp_path, name, "AMD Instinct MI300X"))
    assert found.state == "found"
    assert found.saving_ns == pytest.approx(6 * MS * (1 - 163.4 / (1307.4 / 2)), rel=1e-6)
    assert "HIPBLASLT_ALLOW_TF32=1" in found.advice[1]
    assert Setting("HIPBLASLT_ALLOW_TF32", None, "1") in found.changes[1].settings
    assert "without tensor cores" not in found.title


def test_a_device_without_bfloat16_is_told_to_scale(tmp_path: Path) -> None:
    found = ask(RULE, trained(tmp_path, "volta_sgemm_128x64_tn", "Tesla V100-SXM2-16GB"))
    assert found.state == "found"
    assert len(found.changes) == 1
    assert Setting("autocast_dtype", None, "float16") in found.changes[0].settings
    assert "torch.float16" in found.advice[0]
    assert "GradScaler" in found.advice[0]


@pytest.mark.parametrize(
    "kernel", ["ampere_bf16_s16816gemm_bf16_128x128", "cutlass_80_tensorop_s1688gemm_64x64_tn_align4"]
)
def test_tensor_cores_are_left_alone(tmp_path: Path, kernel: str) -> None:
    clear = ask(RULE, trained(tmp_path, kernel))
    assert (clear.state, clear.share) == ("clear", 0)


def test_what_multiplies_on_an_unknown_unit_is_said_and_not_blamed(tmp_path: Path) -> None:
    answer = ask(RULE, trained(tmp_path, "triton_tem_fused_mm_0"))
    assert (answer.state, answer.share, "67 % of the kernels" in answer.summary) == ("clear", 0, True)


def test_a_late_host_would_gain_nothing(tmp_path: Path) -> None:
    clear = ask(RULE, trained(tmp_path, "ampere_sgemm_128x64_tn", waits=False))
    assert (clear.state, clear.share, "the host launches no faster" in clear.summary) == ("clear", 0, True)


def test_an_unknown_device_abstains(tmp_path: Path) -> None:
    answer = ask(RULE, trained(tmp_path, "ampere_sgemm_128x64_tn", "Some GPU 9"))
    assert (answer.state, "peaks of Some GPU 9" in answer.why) == ("not_measured", True)


def test_a_cpu_abstains(tmp_path: Path) -> None:
    steps = [runs.light(n, 10 * MS) for n in range(30)]
    assert ask(RULE, runs.recorded(tmp_path / "run", (None, steps, runs.CPU))).state == "not_measured"


def test_a_cpu_with_units_for_bfloat16_is_judged_by_its_products(tmp_path: Path) -> None:
    facts: dict[str, Any] = {"autocast": {"enabled": False}}
    found = ask(RULE, processors.computing(tmp_path / "units", units=["avx2", "amx_bf16"], **facts))
    assert found.state == "found"
    assert found.saving_ns == pytest.approx(processors.PRODUCTS * (1 - 1 / 2.5), rel=0.01)
    assert [change.settings for change in found.changes] == [
        (Setting("autocast_enabled", False, True), Setting("autocast_dtype", None, "bfloat16"))
    ]
    assert found.changes[0].numerics
    assert 'torch.autocast("cpu", torch.bfloat16)' in found.advice[0]
    assert found.evidence is not None
    assert [row[0] for row in found.evidence.rows] == ["aten::addmm"]


@pytest.mark.parametrize(
    ("units", "facts"),
    [
        (["amx_bf16"], {"autocast": {"enabled": True, "dtype": "bfloat16"}}),
        (["amx_bf16"], {"models": [{"dtypes": {"bfloat16": 9}}]}),
    ],
)
def test_a_cpu_that_would_not_gain_is_left_alone(tmp_path: Path, units: list[str], facts: dict[str, Any]) -> None:
    clear = ask(RULE, processors.computing(tmp_path, units=units, **facts))
    assert (clear.state, clear.saving_ns) == ("clear", 0.0)


def test_it_does_not_apply_to_a_cpu_without_units(tmp_path: Path) -> None:
    assert ask(RULE, processors.computing(tmp_path, units=["avx2", "avx512f"])).state == "does_not_apply"
