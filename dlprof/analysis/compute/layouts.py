"""What the contiguous memory format (NCHW) costs a network of convolutions, and what channels_last (NHWC) would leave.

On a GPU, tensor cores convolve in NHWC. cuDNN converts each operand from NCHW and each result back, by kernels of its
own, which go in channels_last. PyTorch's own batch norm is slow in NCHW: it has a block of threads for each channel. On
a CPU, oneDNN reorders the operands of each convolution within the operator, and PyTorch's batch norm and max pooling
compute several channels at once only in channels_last.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof.analysis.compute.peaks import device_of, device_peaks
from dlprof.analysis.compute.products import sizes
from dlprof.analysis.engine import RankFacts, per_rank, within_rank
from dlprof.analysis.timeline.steps import Timing
from dlprof.errors import DoesNotApply, NotMeasured

_CONVERSION = re.compile(r"nchwToNhwc|nhwcToNchw")
# PyTorch's batch norm in NCHW; in NHWC the names end in "_channels_last_kernel". cuDNN's, which float32 and float16 have
# by default, is not among them: what it gains is not known.
_NORM = re.compile(r"at::native::batch_norm_(collect_statistics|transform_input|backward(?:_reduce|_elemt)?)_kernel\b")

# How often the kernels for NHWC that do the same read or write an activation: the statistics 1, the output 2, the sums
# of the backward pass 2, the gradient 3 (aten/src/ATen/native/cuda/Normalization.cuh).
_PASSES = {"collect_statistics": 1, "transform_input": 2, "backward": 5, "backward_reduce": 2, "backward_elemt": 3}
# Each such pass takes 4 bytes ÷ 80 % of the memory's bandwidth for each element, and 18 µs ÷ 8 to begin with: fitted to
# the times of these four kernels in float32 of 270 shapes on a V100 and an A100 (xwang233/code-snippet,
# syncbn-channels-last, for pytorch/pytorch#46906). Of shapes above 10 MB, 8 in 10 are within 11 % of it. In 16 bits a
# thread loads one element at a time as well, so an element takes as long as in float32.
_WIDTH, _REACHED, _START_NS = 4, 0.8, 18_000 / 8

_CONVOLVES = re.compile(r"^aten::\w*conv(?:olution|\dd|_)")
_BACKWARD = re.compile(r"^aten::\w*conv\w*backward")
# Norms over groups of channels convert from NHWC and back: ResNet-50 and EfficientNet with GroupNorm train 0.78 to 0.91
# times as fast in channels_last (timm's results, train, amp, nchw and nhwc, RTX 3090, torch 1.12).
_OTHER_NORM = re.compile(r"^aten::(?:native_)?(?:group|instance)_norm")

# Of PyTorch 2.13's operators in float32 with one thread of an AMD EPYC with AVX-512, what channels_last leaves: medians
# of ResNet-20, -18 and -50, a U-Net and a MobileNet, in turn in both formats. Batch norm's forward pass 0.27 to 0.46,
# its backward pass 0.68 to 1.03, max pooling 0.10 to 0.18. Convolutions gain as much as 0.8 of batch norm's forward
# pass, −0.5 to 1.6. To copy the gradient of a weight with a kernel above 1×1 into its format costs each element 0.55 of
# what batch norm's forward pass takes for one.
_CPU_LEFT = {r"native_batch_norm$": 0.33, r"native_batch_norm_backward$": 0.8, r"max_pool2d_with_indices": 0.15}
_REORDERS, _COPIED_GRADIENT = 0.8, 0.55

_GROUPED = "some of its convolutions are grouped, which channels_last can make many times slower"
_OTHER_NORMS = "it has group or instance norms, which channels_last makes slower"
_NO_TENSOR_CORES = "its convolutions run without tensor cores, and are then no faster in channels_last"

Convolution = tuple[list[list[int]], float]  # sizes of output, input and weight, and calls a step


@within_rank
def nhwc_passes(kernels: pd.DataFrame) -> NDArray[np.float64]:
    """Return of each kernel how often its like for NHWC reads or writes an activation; 0: it only converts between NCHW
    and NHWC, and would go; NaN: it is the same in both.
    """
    names = kernels["name"].cat
    passes = np.array([_passes(str(name)) for name in names.categories], dtype=float)
    return passes[names.codes.to_numpy()]


def _passes(kernel: str) -> float:
    if norm := _NORM.search(kernel):
        return _PASSES[norm[1]]
    return 0.0 if _CONVERSION.search(kernel) else math.nan


@per_rank
def nchw(
    kernels: pd.DataFrame,
    nhwc_passes: NDArray[np.float64],
    shorter_kernels: Callable[[NDArray[np.bool_], float], float],
    operators: pd.DataFrame,
    spans: pd.DataFrame,
    timing: Timing,
    rank: RankFacts,
) -> pd.DataFrame:
    """Return one row of what NCHW costs a device, ns of a mean steady traced step.

    Columns: convert_ns (kernels that convert from and to NHWC), norm_ns (batch norm in NCHW), left_ns (what batch norm
    would take in NHWC; NaN: not known), saved_ns (what the step would gain), dimensions (of the largest operand of a
    convolution, 4 for images; 0: no shape is known) and against (why NHWC would not pay; "": nothing is known against
    it). Raises DoesNotApply where nothing convolves, NotMeasured on a device of AMD's.
    """
    made = _convolutions(operators)
    if "AMD" in device_of(rank.facts, rank.trace_facts)[0]:
        raise NotMeasured("what channels_last gains on a GPU of AMD's is not known")
    steps = max(len(timing.windows), 1)
    inside = kernels["step"].to_numpy() >= 0
    convert_ns, norm_ns = (
        float(kernels["dur_ns"][inside & chosen].sum()) / steps for chosen in (nhwc_passes == 0, nhwc_passes > 0)
    )
    bandwidth = device_peaks(rank.facts, rank.trace_facts)[2]
    pass_ns = _START_NS + _activation(made) * _WIDTH / (_REACHED * bandwidth or math.nan) * 1e9
    left_ns = min(float(np.nansum(nhwc_passes[inside])) / steps * pass_ns, norm_ns) if norm_ns else 0.0
    known = not math.isnan(left_ns)
    share = left_ns / max(convert_ns + norm_ns, 1.0) if known else 0.0
    against = _against(made, spans)
    units = operators.loc[operators["operator"].str.contains(_CONVOLVES), ["tensor_ns", "float32_ns"]].sum()
    if not against and units["tensor_ns"] < units["float32_ns"]:
        against = _NO_TENSOR_CORES
    saved_ns = shorter_kernels((nhwc_passes >= 0) if known else (nhwc_passes == 0), share)
    return _row(convert_ns, norm_ns, left_ns, saved_ns, made, against)


@per_rank
def nchw_on_cpu(operators: pd.DataFrame, spans: pd.DataFrame, has_device: bool, rank: RankFacts) -> pd.DataFrame:
    """Return the same of a CPU: convert_ns is what oneDNN is expected to reorder, norm_ns holds max pooling as well."""
    if has_device:
        raise NotMeasured("a device computes, and not the CPU")
    made = _convolutions(operators)
    ns, left_ns, forward_ns, each_ns = 0.0, 0.0, 0.0, math.nan
    for name, left in _CPU_LEFT.items():
        rows = operators[operators["operator"].str.contains(name)]
        took = float(rows["ns"].sum())
        ns, left_ns = ns + took, left_ns + left * took
        if not forward_ns:  # the first
            forward_ns, each_ns = took, took / max(float(rows["calls"].sum()), 1.0) / _activation(made)
    weights = sum(calls * math.prod(weight) for (_, _, weight), calls in made if max(weight[2:]) > 1)
    left_ns += _COPIED_GRADIENT * each_ns * weights
    against = _against(made, spans)
    if not against and (rank.facts.get("cpu") or {}).get("onednn") is False:
        against = "oneDNN is off"
    saved_ns = max(ns + _REORDERS * forward_ns - left_ns, 0.0)
    return _row(_REORDERS * forward_ns, ns, left_ns, saved_ns, made, against)


def _row(
    convert_ns: float, norm_ns: float, left_ns: float, saved_ns: float, made: Sequence[Convolution], against: str
) -> pd.DataFrame:
    dimensions = max((len(output) for (output, _, _), _ in made), default=0)
    figures = {"convert_ns": convert_ns, "norm_ns": norm_ns, "left_ns": left_ns, "saved_ns": saved_ns}
    return pd.DataFrame([{**figures, "dimensions": dimensions, "against": against}])


def _convolutions(operators: pd.DataFrame) -> list[Convolution]:
    """Return the convolutions of images or volumes whose shapes a backward pass shows; raise DoesNotApply: there are
    no convolutions.
    """
    named = operators["operator"]
    if not named.str.contains(_CONVOLVES).any():
        raise DoesNotApply("nothing convolves")
    rows = operators[named.str.contains(_BACKWARD)]
    shapes = [(sizes(shape)[:3], float(calls)) for shape, calls in zip(rows["shape"], rows["calls"], strict=True)]
    return [(shape, calls) for shape, calls in shapes if len(shape) == 3 and min(map(len, shape)) >= 4]


def _activation(made: Sequence[Convolution]) -> float:
    """Return the elements of a mean activation: of what convolutions write or read, whichever is more; NaN: not known.

    A norm stands behind a convolution or before one, in DenseNet, where it reads more than that writes.
    """
    calls = sum(times for _, times in made)
    written, read = (sum(times * math.prod(shape[n]) for shape, times in made) for n in (0, 1))
    return max(written, read) / calls if calls else math.nan


def _against(made: Sequence[Convolution], spans: pd.DataFrame) -> str:
    """Return what is known to make channels_last slower than it makes the rest faster; "": nothing."""
    if any(_OTHER_NORM.search(str(name)) for name in spans["name"].cat.categories):
        return _OTHER_NORMS
    return _GROUPED if any(_is_grouped(*shape) for shape, _ in made) else ""


def _is_grouped(output: list[int], read: list[int], weight: list[int]) -> bool:
    """Return whether a convolution has groups of several channels; one channel each is a depthwise convolution.

    A transposed one has the channels that it reads first in its weight.
    """
    channels = read[1] if output[1] == weight[0] else output[1]
    return 1 < weight[1] < channels
