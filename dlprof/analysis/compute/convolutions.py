"""Convolutions whose direct form costs more than another: what the other form takes of it, by what was measured.

A kernel of n taps multiplies each value n times. A Fourier transform of the input, one of the kernel, their product and
a transform back do the same at 5 N log2 N operations a transform of N complex values, and half as many of real ones. A
kernel of rank 1 is one line after the other, with as many taps as the lines have.
"""

from __future__ import annotations

import math

import pandas as pd

# What an operation of the transforms, and one of the product of spectra, takes at most, as multiples of one of the
# direct convolution. Measured forward and backward on an AMD EPYC with one thread, 250 to 16,000 values, 31 to 1,023
# taps. Where each output channel reads one input channel, the FFT's take 0.2 to 2.3 of a direct one. Where it reads
# several, products of complex matrices take up to 32: with 64 channels and batches of 4 the FFT is 0.3 times as fast as
# 31 taps, 0.8 as 63, 1.6 as 127, 2.7 as 255.
_ALONE, _MIXED, _AT_LEAST = (2.5, 2.5), (6.0, 32.0), 1 / 5
# A call of the FFT's, forward and backward, takes 0.4 to 0.5 ms where there is little to compute: of some 20 operators.
_FEW_NS = 500_000
# By these figures, which are pessimistic, the FFT must be so many times as fast.
_TIMES = 2.0
# Lines of several channels are no faster than a whole kernel of up to 81 taps (64 channels of 64 x 64 values: 0.9 to
# 1.0 times as fast), and 2.7 to 14 times as fast as one of 121 and more; of a single channel 1.7 times as of 25.
_SEVERAL_TAPS = 121
# A direct convolution of single channels takes up to 14 times as long an operation as one of many: 3.7 and 52 GFLOP/s.
_SLOW = 14.0


def left_of(kind: str, shape: str, call_ns: float, flops: float) -> float:
    """Return which share of a direct convolution another form takes at least: a bound; 1 where it may not be faster.

    `kind`: "long_kernel" or "separable". `shape`: of the input and the weight, as they are counted. `call_ns`: of one
    call, forward and backward; `flops`: of it, forward.
    """
    try:
        (batch, into, *sizes), (out, reads, *taps) = ([int(n) for n in one.split("x")] for one in shape.split(" ")[:2])
    except ValueError:
        return 1.0
    if len(sizes) != len(taps) or not taps or min(call_ns, flops) <= 0:
        return 1.0
    if kind == "separable":
        left = sum(k for k in taps if k > 1) / math.prod(taps)
        # Measured up to 1.3 times as fast as the operations say.
        return left / 2 if into == 1 or math.prod(taps) >= _SEVERAL_TAPS else 1.0
    n, k = max(zip(sizes, taps, strict=True), key=lambda one: one[1])
    rows, size = math.prod(sizes) / n, n + k
    transforms = 2 * (batch * (into + out) * rows + out * reads) * 2.5 * size * math.log2(size)
    spectra = 3 * 4 * batch * out * reads * rows * size
    each, multiplied = _ALONE if reads == 1 else _MIXED
    most = (each * transforms + multiplied * spectra) / (3 * flops)
    if _TIMES * max(most, _FEW_NS / call_ns) > 1:
        return 1.0
    return float(_AT_LEAST * (transforms + spectra) / (3 * flops))


def took(operators: pd.DataFrame, shape: str, calls: int, longest: pd.Series[float]) -> float:
    """Return what a convolution's calls take of a mean traced step at most, forward and backward, ns; 0: not known.

    Where an operator's time was shared out by FLOPs, one of single channels has more of it: up to so many times as much
    a FLOP, and no more than the longest calls. `longest`: by operator, what as many calls as each step has take there.
    """
    total = 0.0
    backward = operators["operator"].str.contains("backward", regex=False)
    for mine in (~backward & (operators["shape"] == shape), backward & operators["shape"].str.endswith(" " + shape)):
        rows = operators[mine & (operators["calls"] > 0)]
        if rows.empty:
            continue
        row = rows.iloc[0]
        ns, of = float(row["ns"]), float(row["calls"])
        if row["shared"]:
            name = row["operator"]
            whole = float(operators.loc[operators["operator"] == name, "ns"].sum())
            most = whole * _SLOW * ns / max(whole + (_SLOW - 1) * ns, 1.0)
            ns = max(ns, min(most, float(longest[longest.index == name].head(math.ceil(of)).sum())))
        total += ns * min(calls / of, 1.0)
    return total


def longest_calls(operator_work: pd.DataFrame, spans: pd.DataFrame, steps: int) -> pd.Series[float]:
    """Return what the calls of each operator take, ns, the longest first, by its name: each the mean of `steps` calls.

    The longest of as many steps come first, so that the first n are what the n longest calls of a mean step take.
    """
    known = operator_work[operator_work["owner"] >= 0]
    each = known.groupby("owner")["dur_ns"].sum()
    frame = pd.DataFrame({"name": spans["name"].astype(str).to_numpy()[each.index], "ns": each.to_numpy()})
    frame = frame[frame["name"].str.contains("conv")].sort_values("ns", ascending=False, kind="stable")
    frame["nth"] = frame.groupby("name").cumcount() // max(steps, 1)
    sums = frame.groupby(["name", "nth"], sort=False)["ns"].sum() / max(steps, 1)
    return sums.droplevel("nth")
