"""What the contiguous memory format (NCHW) costs convolutional networks, and what channels_last (NHWC) leaves of it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof import schema
from dlprof.analysis.compute.kernels import kernels, shorter_kernels
from dlprof.analysis.compute.operators import operators
from dlprof.analysis.compute.peaks import device_of, device_peaks
from dlprof.analysis.compute.products import sizes
from dlprof.analysis.engine import RANK, Frame, Maybe, RankFacts, maybe, needs, per_rank
from dlprof.analysis.timeline.device import has_device
from dlprof.analysis.timeline.steps import Timing, timing
from dlprof.errors import DoesNotApply, NotMeasured

_CONVERSION = re.compile(r"nchwToNhwc|nhwcToNchw")
# PyTorch's batch norm in NCHW; in NHWC the names end in "_channels_last_kernel". cuDNN's, which float32 and float16
# have by default, is not among them: what it gains is not known.
_NORM = re.compile(r"at::native::batch_norm_(collect_statistics|transform_input|backward(?:_reduce|_elemt)?)_kernel\b")
# How often the kernels for NHWC that do the same read or write an activation (aten/src/ATen/native/cuda/
# Normalization.cuh): the statistics once, the output twice, the sums of the backward pass twice, the gradient 3 times.
_PASSES = {"collect_statistics": 1, "transform_input": 2, "backward": 5, "backward_reduce": 2, "backward_elemt": 3}
# A pass takes 4 bytes an element at 80 % of the memory's bandwidth, and an eighth of 18 µs to begin with. Fitted to the
# times of these kernels in float32, 270 shapes on a V100 and an A100 (xwang233/code-snippet, syncbn-channels-last, for
# pytorch/pytorch#46906); of shapes above 10 MB, 8 in 10 are within 11 % of it. In 16 bits a thread still loads one
# element at a time, so that an element takes as long.
_BYTES, _REACHED, _START_NS = 4, 0.8, 18_000 / 8

_CONVOLVES, _BACKWARD = r"^aten::\w*conv(?:olution|\dd|_)", r"^aten::\w*conv\w*backward"
# ResNet-50 and EfficientNet with GroupNorm train 0.78 to 0.91 times as fast in channels_last (timm's results, train,
# amp, nchw and nhwc, RTX 3090, torch 1.12).
_OTHER_NORM = r"^aten::(?:native_)?(?:group|instance)_norm"

# What channels_last leaves of operators on a CPU: medians of ResNet-20, -18 and -50, a U-Net and a MobileNet, each in
# turn in both formats (torch 2.13, float32, one thread of an AMD EPYC with AVX-512). Batch norm 0.27 to 0.46 forward
# and 0.68 to 1.03 backward, max pooling 0.10 to 0.18. Convolutions gain −0.5 to 1.6 times what batch norm takes
# forward, as oneDNN reorders less; in the mean 0.8. To copy the gradient of a weight with a kernel above 1×1 into its
# format takes 0.55 of what batch norm takes forward for as many elements. Steps of five other networks (a DenseNet, a
# wide ResNet, a VGG with batch norm, two small ones) were then 5 to 12 % shorter in channels_last than predicted.
_LEFT_ON_CPU = {"native_batch_norm$": 0.33, "native_batch_norm_backward$": 0.8, "max_pool2d_with_indices": 0.15}
_REORDERED, _COPIED = 0.8, 0.55


def passes_in_nhwc(kernel: str) -> float:
    """Return how often a kernel's like for NHWC reads or writes an activation; 0: it converts between NCHW and NHWC,
    and would go; NaN: it is the same in both.
    """
    norm = _NORM.search(kernel)
    return _PASSES[norm[1]] if norm else 0.0 if _CONVERSION.search(kernel) else math.nan


@per_rank
def nchw(
    operators: Frame = needs(operators),
    spans: Frame = needs(schema.SPANS),
    timing: Timing = needs(timing),
    has_device: bool = needs(has_device),
    kernels: Maybe[Frame] = maybe(kernels),
    shorter_kernels: Maybe[Callable[[NDArray[np.bool_], float], float]] = maybe(shorter_kernels),
    rank: RankFacts = needs(RANK),
) -> pd.DataFrame:
    """Return one row of what NCHW costs a rank, ns of a mean steady traced step.

    Columns: convert_ns (conversion to NHWC and back; on a CPU what oneDNN is expected to reorder), norm_ns (batch norm
    in NCHW; on a CPU with max pooling), left_ns (what that would be in NHWC; NaN: not known), saved_ns (what the step
    would gain), dimensions (of the convolutions' operands, 4 for images; 0: no shape is known) and against (why NHWC
    would not pay; "": nothing is known against it). Raises DoesNotApply where nothing convolves.
    """
    convolving = operators[operators["operator"].str.contains(_CONVOLVES)]
    if convolving.empty:
        raise DoesNotApply("nothing convolves")
    if has_device and "AMD" in device_of(rank.facts, rank.trace_facts)[0]:
        raise NotMeasured("what channels_last gains on a GPU of AMD's is not known")
    calls, written, read, weights, grouped, dimensions = _convolutions(operators)
    against = ""
    if spans["name"].cat.categories.str.contains(_OTHER_NORM).any():
        against = "it has group or instance norms, which channels_last makes slower"
    elif grouped.any():
        against = "some of its convolutions are grouped, which channels_last can make many times slower"
    elif has_device and convolving["tensor_ns"].sum() < convolving["float32_ns"].sum():
        against = "its convolutions run without tensor cores, and are then no faster in channels_last"
    # A norm stands behind a convolution; or, in DenseNet, before one, where it reads more than that writes.
    elements = max(calls @ written, calls @ read) / calls.sum() if len(calls) else math.nan
    if has_device:
        work, steps = kernels.get(), max(len(timing.windows), 1)
        each = np.array([passes_in_nhwc(str(name)) for name in work["name"].cat.categories], dtype=float)
        passes = each[work["name"].cat.codes.to_numpy()]
        inside, took = work["step"].to_numpy() >= 0, work["dur_ns"].to_numpy() / steps
        convert_ns, norm_ns = (float(took[inside & chosen].sum()) for chosen in (passes == 0, passes > 0))
        bandwidth = device_peaks(rank.facts, rank.trace_facts)[2]
        pass_ns = _START_NS + elements * _BYTES / (_REACHED * bandwidth or math.nan) * 1e9
        left_ns = min(float(np.nansum(passes[inside])) / steps * pass_ns, norm_ns) if norm_ns else 0.0
        faster = (passes == 0) if math.isnan(left_ns) else (passes >= 0)
        saved_ns = shorter_kernels.get()(faster, np.nan_to_num(left_ns) / max(convert_ns + norm_ns, 1.0))
    else:
        its = [operators[operators["operator"].str.contains(name)][["ns", "calls"]].sum() for name in _LEFT_ON_CPU]
        convert_ns, norm_ns = _REORDERED * its[0]["ns"], sum(of["ns"] for of in its)
        left_ns = sum(left * of["ns"] for left, of in zip(_LEFT_ON_CPU.values(), its, strict=True))
        left_ns += _COPIED * its[0]["ns"] / max(its[0]["calls"], 1.0) / elements * (calls @ weights)
        saved_ns = max(convert_ns + norm_ns - left_ns, 0.0)
    figures = {"convert_ns": convert_ns, "norm_ns": norm_ns, "left_ns": left_ns, "saved_ns": saved_ns}
    return pd.DataFrame([{**figures, "dimensions": int(dimensions.max(initial=0)), "against": against}])


def _convolutions(operators: pd.DataFrame) -> NDArray[np.float64]:
    """Return of the convolutions of images and volumes whose shapes a backward pass shows: calls a step, elements that
    one writes and reads, elements of its weight (0 of a 1×1 kernel), 1 where groups have several channels, dimensions.
    """
    rows = []
    backward = operators[operators["operator"].str.contains(_BACKWARD)]
    for shape, calls in zip(backward["shape"], backward["calls"], strict=True):
        if len(tensors := sizes(shape)[:3]) == 3 and min(map(len, tensors)) >= 4:
            output, read, weight = tensors
            channels = read[1] if output[1] == weight[0] else output[1]  # a transposed one's weight: those read first
            counted = [math.prod(output), math.prod(read), math.prod(weight) * (max(weight[2:]) > 1)]
            rows.append([calls, *counted, 1 < weight[1] < channels, len(output)])
    return np.array(rows, dtype=float).reshape(-1, 6).T
