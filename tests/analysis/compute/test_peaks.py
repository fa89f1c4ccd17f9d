"""Peaks by a device's name: held against multiprocessors × clock × rate, which their makers give elsewhere."""

import pytest

from dlprof.analysis.compute.peaks import PARTS, PCIE_REACHED, device_of, device_peaks, host_link, nvlink, part


@pytest.mark.parametrize(
    ("name", "units", "clock_ghz", "rate", "gb_s"),
    [
        # FLOP in 16 bits a clock and multiprocessor, adding up in float32: 1,024 of Volta's and Turing's T4, 2,048 of
        # GA100, 1,024 of GA102 and Ada, half of both where NVIDIA halves it, 4,096 of Hopper; 1,024 to 4,096 of CDNA.
        ("Tesla V100-SXM2-32GB", 80, 1.53, 1024, 900),
        ("Tesla V100S-PCIE-32GB", 80, 1.597, 1024, 1134),
        ("Tesla T4", 40, 1.59, 1024, 300),
        ("NVIDIA GeForce RTX 2080 Ti", 68, 1.545, 512, 616),
        ("NVIDIA A100-SXM4-80GB", 108, 1.41, 2048, 2039),
        ("A100-SXM4-40GB", 108, 1.41, 2048, 1555),  # as drivers before 470 call it
        ("NVIDIA A100-PG509-200", 108, 1.41, 2048, 1555),
        ("NVIDIA A100 80GB PCIe", 108, 1.41, 2048, 1935),
        ("NVIDIA A800-SXM4-80GB", 108, 1.41, 2048, 2039),
        ("NVIDIA A30", 56, 1.44, 2048, 933),
        ("NVIDIA A10", 72, 1.695, 1024, 600),
        ("NVIDIA A10G", 80, 1.71, 512, 600),
        ("NVIDIA A40", 84, 1.74, 1024, 696),
        ("NVIDIA RTX A6000", 84, 1.8, 1024, 768),
        ("NVIDIA L4", 58, 2.04, 1024, 300),
        ("NVIDIA L40", 142, 2.49, 512, 864),
        ("NVIDIA L40S", 142, 2.49, 1024, 864),
        ("NVIDIA RTX 6000 Ada Generation", 142, 2.505, 1024, 960),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 188, 2.617, 1024, 1792),
        ("NVIDIA GeForce RTX 3090", 82, 1.695, 512, 936),
        ("NVIDIA GeForce RTX 4090", 128, 2.52, 512, 1008),
        ("NVIDIA GeForce RTX 5090", 170, 2.407, 512, 1792),
        ("NVIDIA H100 80GB HBM3", 132, 1.83, 4096, 3350),
        ("NVIDIA H100 PCIe", 114, 1.62, 4096, 2000),
        ("NVIDIA H200", 132, 1.83, 4096, 4800),
        ("NVIDIA GH200 480GB", 132, 1.83, 4096, 4000),
        ("AMD Instinct MI210", 104, 1.7, 1024, 1638),
        ("AMD Instinct MI250X", 110, 1.7, 1024, 1638),  # one of its two dies, which is what a process sees
        ("AMD Instinct MI300X", 304, 2.1, 2048, 5300),
        ("AMD Instinct MI300X VF", 304, 2.1, 2048, 5300),
        ("AMD Instinct MI300A", 228, 2.1, 2048, 5300),
        ("AMD Instinct MI325X", 304, 2.1, 2048, 6000),
        ("AMD Instinct MI350X", 256, 2.2, 4096, 8000),
        ("AMD Instinct MI355X", 256, 2.4, 4096, 8000),
    ],
)
def test_a_peak_is_what_its_units_and_their_clock_make(
    name: str, units: int, clock_ghz: float, rate: int, gb_s: float
) -> None:
    found = part(name)
    assert found is not None
    assert found.flops["float16"] == pytest.approx(units * clock_ghz * 1e9 * rate, rel=0.01)
    assert found.bandwidth == gb_s * 1e9
    assert found.sms in (0, units)


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        # The whitepapers' own tables, "with FP32 Accumulate", dense.
        ("NVIDIA GeForce RTX 3090", {"bfloat16": 71.2, "tf32": 35.6, "float32": 35.6}),
        ("NVIDIA GeForce RTX 4090", {"float8": 330.3, "bfloat16": 165.2, "tf32": 82.6, "float32": 82.6}),
        ("NVIDIA GeForce RTX 5090", {"float8": 419, "bfloat16": 209.5, "tf32": 104.8, "float32": 104.8}),
        ("NVIDIA GeForce RTX 5070", {"bfloat16": 61.7}),
        ("NVIDIA B200", {"float8": 4500, "bfloat16": 2250, "tf32": 1125, "float32": 75}),
        ("NVIDIA GB200", {"float8": 5000, "bfloat16": 2500, "tf32": 1250, "float32": 80}),
        ("NVIDIA B300 SXM6 AC", {"float8": 4500, "bfloat16": 2250, "tf32": 1125, "float32": 75}),
        ("NVIDIA H100 NVL", {"float8": 1670.5, "bfloat16": 835.5, "tf32": 417.5, "float32": 60}),
        ("NVIDIA H20", {"float8": 296, "bfloat16": 148, "tf32": 74, "float32": 44}),
        ("AMD Instinct MI300X", {"float8": 2614.9, "bfloat16": 1307.4, "tf32": 653.7, "float32": 163.4}),
        ("AMD Instinct MI250X", {"bfloat16": 191.5, "float32": 47.9}),
        ("Tesla P100-PCIE-16GB", {"float16": 18.7, "float32": 9.35}),
    ],
)
def test_each_precision_has_its_own(name: str, tflops: dict[str, float]) -> None:
    found = part(name)
    assert found is not None
    for precision, peak in tflops.items():
        assert found.flops[precision] == pytest.approx(peak * 1e12, rel=2e-3)


def test_what_has_no_tensor_cores_for_a_precision_has_no_peak_in_it() -> None:
    for name, precision in (("Tesla V100-SXM2-16GB", "bfloat16"), ("NVIDIA A100-SXM4-80GB", "float8")):
        found = part(name)
        assert found is not None
        assert precision not in found.flops
    cdna4 = part("AMD Instinct MI355X")
    assert cdna4 is not None
    assert "tf32" not in cdna4.flops


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA A100-SXM-64GB",
        "GRID A100-40C",
        "NVIDIA H20 NVL16",
        "AMD Radeon Graphics",
        "Some GPU 9",
        "",
    ],
)
def test_another_part_by_a_like_name_is_not_known(name: str) -> None:
    assert part(name) is None
    assert device_peaks({"device": {"name": name}}, {}) == (name, {}, 0.0)


@pytest.mark.parametrize(
    ("name", "sms", "share", "memory"),
    [
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", 14, 14 / 108, 1 / 8),
        ("NVIDIA A100-SXM4-80GB MIG 1g.20gb", 0, 1 / 7, 2 / 8),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", 42, 42 / 108, 4 / 8),
        ("NVIDIA A100-SXM4-80GB MIG 1c.3g.40gb", 0, 1 / 7, 4 / 8),
        ("NVIDIA A100-SXM4-80GB MIG 7g.80gb", 0, 1, 1),
        ("NVIDIA H100 80GB HBM3 MIG 2g.20gb", 32, 32 / 132, 2 / 8),
        ("NVIDIA H200 MIG 1g.18gb", 0, 1 / 7, 1 / 8),
        ("NVIDIA A30 MIG 1g.6gb", 0, 1 / 4, 1 / 4),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb+me", 0, 1 / 7, 1 / 8),
    ],
)
def test_a_slice_has_its_share(name: str, sms: int, share: float, memory: float) -> None:
    whole, cut = part(name.partition(" MIG")[0]), part(name, sms)
    assert whole is not None
    assert cut is not None
    assert cut.flops["bfloat16"] == pytest.approx(whole.flops["bfloat16"] * share)
    assert cut.bandwidth == pytest.approx(whole.bandwidth * memory)
    assert nvlink(name) is None


def test_units_tell_parts_of_one_name_apart() -> None:
    both = {units: part("AMD Instinct MI250X/MI250", units) for units in (0, 104, 110)}
    assert {units: round(p.flops["bfloat16"] / 1e12, 1) for units, p in both.items() if p} == {
        0: 181.0,
        104: 181.0,
        110: 191.5,
    }
    assert part("AMD Instinct MI300X", 38) is None  # one of eight partitions of it


def test_the_device_is_the_recorders_else_the_traces_and_units_are_the_traces() -> None:
    listed = [{"name": "AMD Instinct MI300X", "numSms": 304}] * 8
    assert device_of({}, {"devices": listed}) == ("AMD Instinct MI300X", 304)
    mixed = [*listed, {"name": "AMD Instinct MI300X", "numSms": 38}]
    assert device_of({"device": {"name": "AMD Instinct MI300X"}}, {"devices": mixed}) == ("AMD Instinct MI300X", 0)
    assert device_of({}, {"devices": [7, {"name": "x", "numSms": [1]}]}) == ("x", 0)
    assert device_of({}, {}) == ("", 0)


@pytest.mark.parametrize(
    ("name", "gb_s"),
    [
        ("Tesla V100-SXM2-32GB", 15.75),
        ("NVIDIA A100-SXM4-80GB", 31.5),
        ("NVIDIA GeForce RTX 4060", 15.75),  # eight lanes
        ("NVIDIA H100 80GB HBM3", 63.0),
        ("NVIDIA GH200 480GB", 450.0),
        ("AMD Instinct MI300X", 63.0),
        ("AMD Instinct MI300A", None),  # its memory is the host's
        ("Something else", None),
    ],
)
def test_the_link_to_the_host(name: str, gb_s: float | None) -> None:
    found = host_link(name)
    assert found == (None if gb_s is None else pytest.approx(gb_s * 1e9, rel=1e-3))


def test_what_was_measured_of_pinned_copies_is_near_what_pcie_reaches() -> None:
    for name, measured in (("NVIDIA GeForce RTX 4090", 26.3e9), ("NVIDIA A100-SXM4-40GB", 25.1e9)):
        link = host_link(name)
        assert link is not None
        assert measured / link == pytest.approx(PCIE_REACHED, abs=0.05)


def test_no_name_is_two_parts_but_those_that_rocm_gives_alike() -> None:
    names = ["Instinct MI250X/MI250", *(p.pattern for p in PARTS if p.pattern.isalnum() or " " in p.pattern)]
    for name in names:
        found = [p for p in PARTS if p.pattern == name or part(name) is p]
        assert len(found) <= 1 or name == "Instinct MI250X/MI250"
