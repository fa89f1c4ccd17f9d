"""What to change for products in fewer bits: autocast, and TF32, by the names that the job's torch has for them."""

from __future__ import annotations

from dlprof.analysis import settings
from dlprof.analysis.compute.arithmetic import allows_tf32
from dlprof.analysis.engine import Job
from dlprof.result import Change, Scalar, change


def autocast(job: Job, rank: int, half: str) -> Change:
    """Return the change that runs the forward pass in 16 bits, with the recorded values."""
    facts = job.facts[rank].get("autocast") or {}
    enabled = facts.get("enabled")
    now = "" if enabled is None else f" (autocast is {'on' if enabled else 'off'})"
    scaler = ", and a `GradScaler`" if half == "float16" else ""
    device = "cpu" if settings.on_cpu(job) else "cuda"
    return change(
        f'`with torch.autocast("{device}", torch.{half}):` around the forward pass{now}{scaler}',
        numerics=True,
        autocast_enabled=(enabled, True),
        autocast_dtype=(facts.get("dtype"), half),
    )


def tf32(job: Job, rank: int, name: str) -> tuple[Change, ...]:
    """Name the settings that multiply float32 in TF32, by the names that the job's torch has for them."""
    matmul, environment = (job.facts[rank].get(facts) or {} for facts in ("matmul", "env"))
    version = settings.torch_version(job, rank)
    code, convolutions = (f"torch.backends.{of}.fp32_precision = " + '"tf32"' for of in ("cuda.matmul", "cudnn.conv"))
    now, code = matmul.get("matmul_fp32_precision"), f"`{code}`"
    sets: dict[str, tuple[Scalar, Scalar]] = {"fp32_precision": (now, "tf32")}
    convolve: dict[str, tuple[Scalar, Scalar]] = {"fp32_precision": (matmul.get("conv_fp32_precision"), "tf32")}
    if version is None or version < (2, 9):
        now, later = matmul.get("float32_precision"), f" (from torch 2.9 {code})" if version is None else ""
        code, sets = f'`torch.set_float32_matmul_precision("high")`{later}', {"float32_precision": (now, "high")}
        convolutions = "torch.backends.cudnn.allow_tf32 = True"
        convolve = {"allow_tf32": (matmul.get("cudnn_allow_tf32"), True)}
    text = f"or {code}, which keeps float32 and multiplies in TF32" + (f' (is "{now}")' if now else "")
    if "Instinct" in name:
        text += ", with `HIPBLASLT_ALLOW_TF32=1` in the environment"
        sets["HIPBLASLT_ALLOW_TF32"] = (environment.get("HIPBLASLT_ALLOW_TF32"), "1")
    product = change(text, numerics=True, training=False, **sets)
    if allows_tf32(matmul, True) or not (matmul.get("cudnn_allow_tf32") is False or "conv_fp32_precision" in matmul):
        return (product,)
    return product, change(
        f"`{convolutions}` for convolutions, which are now without", numerics=True, training=False, **convolve
    )
