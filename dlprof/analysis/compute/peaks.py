"""What a device can do at most, by its name: arithmetic by precision, its memory, its links to the host and to others.

Figures are those of the makers' data sheets, dense: NVIDIA's sheets since Hopper give tensor figures "with sparsity",
which are twice these. PyTorch adds up in float32 by default, so that rate counts: GeForce cards and the A10G have half
of their tensor cores' rate then (NVIDIA's whitepapers of GA102, Ada and RTX Blackwell, appendix A, rows "with FP32
Accumulate"; the A10G's own sheet, of AWS). A name is that of `torch.cuda.get_device_name()`, which is also the trace's;
NVIDIA's driver README lists them. It must match as a whole: a laptop's RTX 4090 is another part. What no sheet gives is
left out, and what depends on it then says so instead of predicting.

How much a rank computes: floating-point operations a second of the mean steady step, and their share of the peak.

MFU (model FLOPs utilization, Chowdhery et al. 2022, PaLM, appendix B) = FLOPs of a step ÷ its time ÷ peak. Where a step
computes in several precisions, each counts against its own peak: MFU = Σ (FLOPs ÷ peak of their precision) ÷ time.
What runs is counted: the masked half of causal attention and what activation checkpointing computes again, too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import pandas as pd
from msgspec import Struct
from msgspec.structs import replace

from dlprof.analysis.engine import RANK, RankFacts, needs, per_rank
from dlprof.analysis.timeline.steps import NOT_MARKED, Timing, timing
from dlprof.errors import NotMeasured

# One direction of a link, bytes/s: PCI-SIG's 8, 16, 32 GT/s a lane, 128 of 130 bits of them payload, 16 lanes.
_PCIE3, _PCIE4, _PCIE5 = (rate * 1e9 * 16 * 128 / 130 / 8 for rate in (8, 16, 32))
# NVLink-C2C carries 900 GB/s in both directions together (NVIDIA's GH200 and GB200 NVL72 pages); a GB200's two GPUs
# share their Grace's.
_C2C, _C2C_SHARED = 450e9, 225e9

# What large pinned copies reach of PCIe's raw rate: 26 of 31.5 GB/s on an RTX 4090, 25 of 31.5 on an A100, 53 of 63 on
# an H100 (NVIDIA/nvbandwidth issues 15, 42 and 24). Of NVLink-C2C nothing is known here.
PCIE_REACHED = 0.8


class Part(Struct, frozen=True):
    """One part that is sold: what its name matches as a whole, and its peaks. 0 and {}: not known.

    `flops`: FLOP/s by precision ("float8", "bfloat16", "float16", "tf32", "float32", "float64"); on AMD "tf32" is XF32
    and "float32" the matrix cores'. `bandwidth`, `host_link`, `nvlink`: bytes/s, the links in one direction, NVLink's
    only where every such part has it. `sms`: multiprocessors or compute units.
    """

    pattern: str
    flops: Mapping[str, float]
    bandwidth: float
    host_link: float = 0.0
    nvlink: float = 0.0
    sms: int = 0
    memory_gb: int = 0
    slices: int = 7  # of compute, where it can be cut into instances (MIG)


def _tera(
    half: float, tf32: float = 0, single: float = 0, eight: float = 0, double: float = 0, brain: bool = True
) -> dict[str, float]:
    """Return FLOP/s by precision from TFLOP/s; `brain`: bfloat16 is as fast as float16."""
    given = {"float8": eight, "bfloat16": half if brain else 0, "float16": half, "tf32": tf32, "float32": single}
    return {name: value * 1e12 for name, value in {**given, "float64": double}.items() if value}


def _geforce(name: str, sms: int, boost_mhz: int, gb_s: float, lanes: int = 16) -> Part:
    """Return a GeForce RTX 30, 40 or 50, whose peaks are a multiple of multiprocessors × clock.

    FLOP a clock and multiprocessor, adding up in float32: 512 in 16 bits, 256 in TF32 and in float32, from the 40s on
    1,024 in 8 bits. The whitepapers' tables are the same: RTX 3090 71 TFLOP/s in 16 bits, RTX 4090 165.2, 5070 61.7,
    5090 209.5, and 330.3 in FP8 on the RTX 4090 (as corrected in v2.02).
    """
    rate = sms * boost_mhz * 1e6 / 1e12
    link = (_PCIE5 if name[0] == "5" else _PCIE4) * lanes / 16
    eight = 0 if name[0] == "3" else 1024 * rate
    return Part(f"GeForce RTX {name}", _tera(512 * rate, 256 * rate, 256 * rate, eight), gb_s * 1e9, link, sms=sms)


def _professional(name: str, sms: int, boost_mhz: int, gb_s: float, single: int = 256) -> Part:
    """Return a professional card of the Ampere or Ada generation, whose tensor cores add up in float32 at full rate.

    FLOP a clock and multiprocessor: 1,024 in 16 bits, 512 in TF32, 256 in float32. The data sheets of RTX A2000 to
    A5500 and RTX 2000 to 5000 Ada give the same: A4000 19.2 TFLOP/s in float32 and 153.4 with sparsity in 16 bits,
    A5000 27.8 and 222.2, RTX 5000 Ada 65.3 in float32.
    """
    rate = sms * boost_mhz * 1e6 / 1e12
    return Part(name, _tera(1024 * rate, 512 * rate, single * rate), gb_s * 1e9, _PCIE4, sms=sms)


def _turing(name: str, sms: int, boost_mhz: int, gb_s: float, half: int = 512) -> Part:
    """Return a card of the Turing generation, which has neither bfloat16 nor TF32.

    FLOP a clock and multiprocessor: 512 in 16 bits, adding up in float32 (1,024 on TITAN and Quadro), and 128 in
    float32 (Turing whitepaper, appendix A).
    """
    rate = sms * boost_mhz * 1e6 / 1e12
    return Part(name, _tera(half * rate, single=128 * rate, brain=False), gb_s * 1e9, _PCIE3, sms=sms)


# V100 data sheet (2020); T4 data sheet; Turing whitepaper, appendix A; P100 data sheet, whose 16 bits are twice float32
# on the same units.
_V100 = _tera(125, single=15.7, double=7.8, brain=False)
_P100_SXM, _P100_PCIE = (_tera(2 * x, single=x, double=x / 2, brain=False) for x in (10.6, 9.35))
# A100 data sheet; the A800 differs in NVLink alone: 400 GB/s (NVIDIA to Reuters, 7 November 2022).
_A100 = _tera(312, 156, 19.5, double=19.5)
# H100 page (SXM, NVL) and earlier data sheet (PCIe), H200 page: 1,979, 1,513 and 1,671 with sparsity. The H800 is an
# H100 with 400 GB/s of NVLink and almost no float64; of the H20 NVIDIA publishes no sheet outside China: its figures
# are those that the press quotes from it (148 TFLOP/s dense in 16 bits, 4.0 TB/s, 900 GB/s of NVLink).
_H100_SXM = _tera(989.5, 494.5, 67, 1979, 67)
_H100_PCIE = _tera(756.5, 378, 51, 1513, 51)
_H100_NVL = _tera(835.5, 417.5, 60, 1670.5, 60)
_H800 = _tera(989.5, 494.5, 67, 1979)
_H20 = _tera(148, 74, 44, 296)
# HGX page: of eight B200 36 PFLOP/s with sparsity in 16 bits, 18 in TF32, 72 in FP8, 600 TFLOP/s in float32, 296 in
# float64; B300 the same but for float64. GB200 and GB300 NVL72 pages: 360, 180 and 720 of 72 GPUs with sparsity.
_B200 = _tera(2250, 1125, 75, 4500, 37)
_B300 = _tera(2250, 1125, 75, 4500)
_GB200 = _tera(2500, 1250, 80, 5000, 40)
_GB300 = _tera(2500, 1250, 0, 5000)
# AMD's data sheets: MI210, MI250 and MI250X (383 and 362.1 TFLOP/s for two dies; a device is one die), MI300X, MI300A,
# MI325X and MI350X, and the page of the MI355X. CDNA 4 has no XF32. A float32 product runs on matrix cores.
_MI200 = 1024e-12 * 1.7e9  # FLOP in 16 bits a clock and compute unit, 1.7 GHz
_MI250X, _MI210 = (_tera(cu * _MI200, single=cu * _MI200 / 4, double=cu * _MI200 / 4) for cu in (110, 104))
_MI300X = _tera(1307.4, 653.7, 163.4, 2614.9, 163.4)

PARTS: tuple[Part, ...] = (
    Part(r"P100-SXM2-16GB", _P100_SXM, 732e9, _PCIE3, sms=56),
    Part(r"P100-PCIE-16GB", _P100_PCIE, 732e9, _PCIE3, sms=56),
    Part(r"V100-(?:SXM2|SXM3|DGXS)-\w+(?:-LS)?", _V100, 900e9, _PCIE3, nvlink=150e9, sms=80),
    Part(r"V100-PCIE-\w+", _tera(112, single=14, double=7, brain=False), 900e9, _PCIE3, sms=80),
    Part(r"V100S-PCIE-32GB", _tera(130, single=16.4, double=8.2, brain=False), 1134e9, _PCIE3, sms=80),
    Part(r"T4", _tera(65, single=8.1, brain=False), 300e9, _PCIE3, sms=40),
    _turing("GeForce RTX 2060", 30, 1680, 336),
    _turing("GeForce RTX 2060 SUPER", 34, 1650, 448),
    _turing("GeForce RTX 2070", 36, 1620, 448),
    _turing("GeForce RTX 2070 SUPER", 40, 1770, 448),
    _turing("GeForce RTX 2080", 46, 1710, 448),
    _turing("GeForce RTX 2080 SUPER", 48, 1815, 496),
    _turing("GeForce RTX 2080 Ti", 68, 1545, 616),
    _turing("TITAN RTX|Quadro RTX [68]000", 72, 1770, 672, half=1024),
    _turing("Quadro RTX 5000", 48, 1815, 448, half=1024),
    # An A100 comes with 40 or 80 GB; the board PG509-200 has 40.
    Part(r"A100-SXM4-80GB", _A100, 2039e9, _PCIE4, 300e9, 108, 80),
    Part(r"A100-(?:SXM4-40GB|PG509-200)", _A100, 1555e9, _PCIE4, 300e9, 108, 40),
    Part(r"A100 80GB PCIe|A100-PCIE-80GB", _A100, 1935e9, _PCIE4, sms=108, memory_gb=80),
    Part(r"A100-PCIE-40GB", _A100, 1555e9, _PCIE4, sms=108, memory_gb=40),
    Part(r"A800-SXM4-80GB", _A100, 2039e9, _PCIE4, 200e9, 108, 80),
    Part(r"A800-SXM4-40GB", _A100, 1555e9, _PCIE4, 200e9, 108, 40),
    Part(r"A800 80GB PCIe(?: LC)?", _A100, 1935e9, _PCIE4, sms=108, memory_gb=80),
    Part(r"A30", _tera(165, 82, 10.3, double=10.3), 933e9, _PCIE4, sms=56, memory_gb=24, slices=4),
    # Data sheets of A10, A40, RTX A6000 (GA102 whitepaper, table 3) and A10G.
    Part(r"A10", _tera(125, 62.5, 31.2), 600e9, _PCIE4, sms=72),
    Part(r"A10G", _tera(70, 35, 35), 600e9, _PCIE4, sms=80),
    Part(r"A40", _tera(149.7, 74.8, 37.4), 696e9, _PCIE4, sms=84),
    Part(r"RTX A6000", _tera(154.8, 77.4, 38.7), 768e9, _PCIE4, sms=84),
    _professional("RTX A2000(?: 12GB)?", 26, 1200, 288),
    _professional("RTX A4000", 48, 1560, 448),
    _professional("RTX A4500", 56, 1650, 640),
    _professional("RTX A5000", 64, 1695, 768),
    _professional("RTX A5500", 80, 1665, 768),
    _professional("RTX 4000 Ada Generation", 48, 2175, 360),
    _professional("RTX 4500 Ada Generation", 60, 2580, 432),
    _professional("RTX 5000 Ada Generation", 100, 2550, 576),
    # Data sheets of L4, L40, L40S ("181.05 | 362.1" and "362.05 | 733" dense and sparse); RTX 6000 Ada and RTX PRO 6000
    # in 16 bits by the whitepaper of RTX PRO Blackwell, table 4. Their FP8 adding up in float32 is not known.
    Part(r"L4", _tera(121, 60, 30.3, 242), 300e9, _PCIE4, sms=58),
    Part(r"L40", _tera(181, 90.5, 90.5, 362), 864e9, _PCIE4, sms=142),
    Part(r"L40S", _tera(362, 183, 91.6, 733), 864e9, _PCIE4, sms=142),
    Part(r"RTX 6000 Ada Generation", _tera(364, single=91.1), 960e9, _PCIE4, sms=142),
    Part(r"RTX PRO 6000 Blackwell Workstation Edition", _tera(503.8, single=125), 1792e9, _PCIE5, 0, 188, 96, 4),
    # SM counts and boost clocks of NVIDIA's product pages.
    _geforce("3060", 28, 1777, 360),
    _geforce("3060 Ti", 38, 1665, 448),
    _geforce("3070", 46, 1725, 448),
    _geforce("3070 Ti", 48, 1770, 608),
    _geforce("3080", 68, 1710, 760),
    _geforce("3080 Ti", 80, 1665, 912),
    _geforce("3090", 82, 1695, 936),
    _geforce("3090 Ti", 84, 1860, 1008),
    _geforce("4060", 24, 2460, 272, lanes=8),
    _geforce("4060 Ti", 34, 2535, 288, lanes=8),
    _geforce("4070", 46, 2475, 504),
    _geforce("4070 SUPER", 56, 2475, 504),
    _geforce("4070 Ti", 60, 2610, 504),
    _geforce("4070 Ti SUPER", 66, 2610, 672),
    _geforce("4080", 76, 2505, 716.8),
    _geforce("4080 SUPER", 80, 2550, 736),
    _geforce("4090", 128, 2520, 1008),
    _geforce("5060 Ti", 36, 2570, 448, lanes=8),
    _geforce("5070", 48, 2512, 672),
    _geforce("5070 Ti", 70, 2452, 896),
    _geforce("5080", 84, 2617, 960),
    _geforce("5090", 170, 2407, 1792),
    Part(r"H100 80GB HBM3|H100-SXM5?-80GB", _H100_SXM, 3350e9, _PCIE5, 450e9, 132, 80),
    Part(r"H100 PCIe", _H100_PCIE, 2000e9, _PCIE5, sms=114, memory_gb=80),
    Part(r"H100 NVL", _H100_NVL, 3900e9, _PCIE5, sms=132, memory_gb=94),
    Part(r"H800", _H800, 3350e9, _PCIE5, 200e9, 132, 80),
    Part(r"H20", _H20, 4000e9, _PCIE5, 450e9, 78, 96),
    Part(r"H200", _H100_SXM, 4800e9, _PCIE5, 450e9, 132, 141),
    Part(r"H200 NVL", _H100_NVL, 4800e9, _PCIE5, sms=132, memory_gb=141),
    # GH200 data sheet; how its NVLinks are wired is not known, and of HBM3e the same rate as on an H200 is certain.
    Part(r"GH200 (?:480|120)GB", _H100_SXM, 4000e9, _C2C, sms=132, memory_gb=96),
    Part(r"GH200 144G HBM3e", _H100_SXM, 4800e9, _C2C, sms=132, memory_gb=144),
    # 62 TB/s of eight B200 (HGX B200 data sheet); 16 TB/s of two GPUs of a GB200, 8 TB/s of a B300.
    Part(r"B200", _B200, 7700e9, _PCIE5, 900e9, 148, 180),
    Part(r"B300(?: SXM6 AC)?", _B300, 8000e9, nvlink=900e9, sms=148, memory_gb=269),
    Part(r"GB200", _GB200, 8000e9, _C2C_SHARED, 900e9, memory_gb=186),
    Part(r"GB300", _GB300, 8000e9, _C2C_SHARED, 900e9),
    # ROCm names MI250 and MI250X alike: their dies differ in compute units, 104 and 110; unless these are known, the
    # smaller counts. In Frontier an MI250X hangs on Infinity Fabric, elsewhere on PCIe. The links between MI300s are a
    # mesh: what a group can carry depends on how many they are.
    Part(r"Instinct MI250X(?:/MI250)?", _MI250X, 1638e9, sms=110),
    Part(r"Instinct MI250(?:X/MI250)?", _MI210, 1638e9, sms=104),
    Part(r"Instinct MI210", _MI210, 1638e9, _PCIE4, sms=104),
    Part(r"Instinct MI300X(?: VF)?", _MI300X, 5300e9, _PCIE5, sms=304),
    Part(r"Instinct MI300A", _tera(980.6, 490.3, 122.6, 1961.2, 122.6), 5300e9, sms=228),
    Part(r"Instinct MI325X(?: VF)?", _MI300X, 6000e9, _PCIE5, sms=304),
    Part(r"Instinct MI350X(?: VF)?", _tera(2306.9, single=144.2, eight=4613.7, double=72.1), 8000e9, _PCIE5, sms=256),
    Part(r"Instinct MI355X(?: VF)?", _tera(2516.6, single=157.3, eight=5033.2, double=78.6), 8000e9, _PCIE5, sms=256),
)

_MAKER = re.compile(r"^(?:(?:NVIDIA|Tesla|AMD)\s+)+")
_MIG = re.compile(r"^(.*\S)\s+MIG (?:(\d)c\.)?(\d)g\.(\d+)gb(?:\+\S+)?$")


@lru_cache(256)
def part(name: str, sms: int = 0) -> Part | None:
    """Return the part of a device's name, None where none is known; a slice of one (MIG) as its share.

    `sms`: the multiprocessors that the device has, where the trace has them. Of parts with one name that with as many
    counts, else the slower one; of a slice they give its share of the arithmetic. Without them that is its slices of 7
    (A30: of 4), at most, for a few multiprocessors lie in no slice. Of the memory's bandwidth a slice has as many
    eighths as of its size (NVIDIA, MIG User Guide, "Supported MIG Profiles").
    """
    cut = _MIG.match(name)
    found = [p for p in PARTS if re.fullmatch(p.pattern, _MAKER.sub("", cut[1] if cut else name))]
    if not cut:
        # With fewer units than the part it is a partition of one (AMD's CPX mode), whose share of the memory is not
        # known.
        same = [p for p in found if p.sms == sms] or [p for p in found if not (0 < sms < p.sms)]
        return same[-1] if same else None
    if not found or not found[-1].memory_gb:
        return None
    whole = found[-1]
    share = min(sms / whole.sms if sms and whole.sms else int(cut[2] or cut[3]) / whole.slices, 1.0)
    memory = min(max(1, round(8 * int(cut[4]) / whole.memory_gb)) / 8, 1.0)
    flops = {precision: peak * share for precision, peak in whole.flops.items()}
    return replace(whole, flops=flops, bandwidth=whole.bandwidth * memory, nvlink=0.0, sms=sms)


def device_peaks(facts: Mapping[str, Any], trace_facts: Mapping[str, Any]) -> tuple[str, Mapping[str, float], float]:
    """Return a rank's device: name, peaks in FLOP/s by precision, bytes/s of its memory; {} and 0: not known."""
    name, sms = device_of(facts, trace_facts)
    found = part(name, sms)
    return (name, found.flops, found.bandwidth) if found else (name, {}, 0.0)


def device_of(facts: Mapping[str, Any], trace_facts: Mapping[str, Any]) -> tuple[str, int]:
    """Return the name of a rank's device and its multiprocessors; "" and 0: not known.

    A trace lists all devices that the process saw; they count where they are alike.
    """
    listed = [d for d in trace_facts.get("devices") or [] if isinstance(d, Mapping)]
    recorded = facts.get("device") or {}
    name = str(recorded.get("name") or (listed[0].get("name") if listed else "") or "")
    units = {n for d in listed if d.get("name") == name and isinstance(n := d.get("numSms"), int)}
    return name, max(units.pop(), 0) if len(units) == 1 else 0


def host_link(name: str) -> float | None:
    """Return the raw rate of a device's link to the host in one direction, bytes/s; None: not known.

    Pinned copies over PCIe reach PCIE_REACHED of it. The link is the part's own: the slot may have fewer lanes.
    """
    found = part(name)
    return found.host_link or None if found else None


def nvlink(name: str) -> float | None:
    """Return the bandwidth of all of a device's NVLinks in one direction, bytes/s, half of NVIDIA's figure for both.

    None where that is not known, as of parts that are joined by a bridge, which may be missing.
    """
    found = part(name)
    return found.nvlink or None if found else None


# The most FLOPs in precisions without a known peak, as a share of all; with more of them the MFU is not known.
_UNKNOWN_SHARE = 0.01


@per_rank
def arithmetic(timing: Timing = needs(timing), rank: RankFacts = needs(RANK)) -> pd.DataFrame:
    """Return one row: flops (of a step), step_ns, flops_per_s, mfu (NaN: see why), backward (share of flops), peak (of
    the one precision that the step computes in, FLOP/s; NaN: of several, or not known) and why.

    Raises NotMeasured, with the reason, where no step was counted.
    """
    flops = _counted(rank)
    if timing.unit != "step":
        raise NotMeasured(NOT_MARKED)
    total, step_s = float(flops["total"]), timing.step_ns / 1e9
    busy_s, peak, why = _at_peak(rank, flops["operators"])
    mfu = busy_s / step_s
    if mfu > 1:
        mfu = np.nan
        why = "the steps are shorter than the device's known peak allows: the counted step is not a typical one"
    backward = float(flops.get("backward") or 0) / total
    row = {"flops": total, "step_ns": timing.step_ns, "flops_per_s": total / step_s, "mfu": mfu, "backward": backward}
    return pd.DataFrame([row | {"peak": peak, "why": why}])


def _counted(rank: RankFacts) -> dict[str, Any]:
    flops: dict[str, Any] = rank.facts.get("flops") or {}
    state = flops.get("state")
    if state == "counted" and flops.get("total") and flops.get("operators"):
        return flops
    known = {"off": "recorded with --flops off", "waiting": "the job ended before its step was counted"}
    why = known.get(str(state)) or flops.get("why")
    raise NotMeasured(why or "the floating-point operations of a step were not counted")


def _at_peak(rank: RankFacts, operators: list[dict[str, Any]]) -> tuple[float, float, str]:
    """Return how many seconds a step's arithmetic takes at the device's peak, and the peak where one precision has all
    but a little of it; NaN and why where it is not known.
    """
    if (rank.facts.get("device") or {}).get("type") == "cpu":
        return np.nan, np.nan, "the peak of a CPU is not known"
    name, peaks, _ = device_peaks(rank.facts, rank.trace_facts)
    if not peaks:
        return np.nan, np.nan, f"the peak of {name or 'this device'} is not known"
    flops = np.array([float(row["flops"]) for row in operators])
    matmul = rank.facts.get("matmul") or {}
    of_each = np.array([peak_of(str(row["operator"]), str(row["dtype"]), matmul, peaks) for row in operators])
    most = of_each[int(flops.argmax())]
    peak = float(most) if flops[of_each == most].sum() >= (1 - _UNKNOWN_SHARE) * flops.sum() else np.nan
    seconds = flops / of_each
    if flops[np.isnan(seconds)].sum() > _UNKNOWN_SHARE * flops.sum():
        return np.nan, np.nan, f"the peak of {name} in one of the step's precisions is not known"
    return float(np.nansum(seconds)), peak, ""


def peak_of(operator: str, dtype: str, matmul: Mapping[str, Any], peaks: Mapping[str, float]) -> float:
    """Return the peak of the precision in which an operator multiplies, FLOP/s; NaN where it is not known."""
    precision = precision_of(operator, dtype, matmul)
    return peaks.get(precision, peaks.get("float32", np.nan) if precision == "tf32" else np.nan)


def precision_of(operator: str, dtype: str, matmul: Mapping[str, Any]) -> str:
    """Name the precision in which an operator multiplies."""
    if dtype.startswith("float8"):
        return "float8"
    if dtype == "float32" and allows_tf32(matmul, "conv" in operator):
        return "tf32"
    return dtype


def allows_tf32(matmul: Mapping[str, Any], convolves: bool) -> bool:
    """Return whether the job let products, or convolutions, of float32 run in TF32, by its recorded settings.

    From torch 2.9 each has a setting of its own, and "none" there means the general one
    (torch.backends.fp32_precision). Once they were set, the older getters raise and nothing is recorded of them.
    """
    own = matmul.get("conv_fp32_precision" if convolves else "matmul_fp32_precision")
    setting = next((s for s in (own, matmul.get("fp32_precision")) if s and s != "none"), None)
    if setting is not None:
        return bool(setting == "tf32")
    return bool(matmul.get("cudnn_allow_tf32" if convolves else "allow_tf32"))
