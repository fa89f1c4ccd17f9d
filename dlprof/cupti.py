"""What Kineto and CUPTI, NVIDIA's tracing library, say when they give no device events, and what to do about it."""

from __future__ import annotations

import re
from collections.abc import Iterable

# Error of CUPTI (cupti_result.h), or words of Kineto → what to do.
_REMEDIES = (
    (
        "CUPTI_ERROR_INSUFFICIENT_PRIVILEGES",
        # developer.nvidia.com/ERR_NVGPUCTRPERM
        "let users profile: the driver's module option NVreg_RestrictProfilingToAdminUsers=0, or the capability "
        "SYS_ADMIN (PERFMON from driver 565 on), in a container with --cap-add=SYS_ADMIN",
    ),
    (
        "CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED",
        "another profiler is attached to this process, and CUPTI serves one: nsys, ncu, or what CUDA_INJECTION64_PATH "
        "names",
    ),
    (
        "CUPTI_ERROR_VIRTUALIZED_DEVICE_INSUFFICIENT_PRIVILEGES",
        "this is a virtual GPU, and its host must let it be profiled",
    ),
    (
        "CUPTI_ERROR_CONFIDENTIAL_COMPUTING_NOT_SUPPORTED",
        "the GPU is in confidential computing mode, in which nothing is traced",
    ),
    (
        "CUPTI_ERROR_HARDWARE_BUSY",
        "something else uses the GPU's counters: pause it meanwhile, as `dcgmi profile --pause` does with DCGM",
    ),
    (
        "CUPTI_ERROR_NOT_COMPATIBLE",
        "another tool that uses CUPTI's profiling interface is in this process: run without it",
    ),
    (
        "CUPTI_ERROR_OUT_OF_MEMORY",
        "leave CUPTI some memory on the GPU: it takes its buffers from there",
    ),
    (
        "CUPTI_ERROR_NOT_INITIALIZED",
        "CUPTI does not fit this driver: a newer driver, or a torch that was built for an older CUDA",
    ),
    (
        "CUPTI initialization failed",
        "nvidia-smi must work where the job runs, with a driver that is new enough for the CUDA of this torch",
    ),
    ("Exceeded max GPU buffer count", "trace fewer steps: --window SKIP,WARMUP,STEPS"),
)

_HEAD = re.compile(r"\w+:\d{4}-\d\d-\d\d \d\d:\d\d:\d\d \d+:\d+ [\w.]+:\d+\] ")
_LOSES = re.compile("CUPTI|fail|missing|Exceeded|Dropped", re.IGNORECASE)
_MOST_LINES = 8
_LONGEST = 240


def short(lines: Iterable[str]) -> list[str]:
    """Return what Kineto's messages say without their heads, each once, in order; at most eight, of 240 characters."""
    said: dict[str, None] = {}
    for line in lines:
        text = _HEAD.sub("", line.strip(), count=1)[:_LONGEST]
        if text:
            said[text] = None
    return list(said)[:_MOST_LINES]


def loss(errors: Iterable[str]) -> str | None:
    """Return the first of these that says that a trace lacks something; None: none does."""
    return next((error for error in errors if _LOSES.search(error)), None)


def remedy(errors: Iterable[str]) -> str:
    """Return what to do about errors of Kineto's or CUPTI's; "": nothing is known of them."""
    said = "\n".join(errors)
    return next((advice for word, advice in _REMEDIES if word in said), "")
