"""What the first line of a report must say of each script in scripts/advice: the one mistake, and what mends it."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.gpu.bench import SCRIPTS

FOLDER = SCRIPTS / "advice"

# What the lines end with that a report may point at.
MARK = "# the cause"

# Rules that may see one mistake of the host, as all of them speak of the same idle device.
_HOST = ("host_bound", "host_sync", "parameter_loop", "step_python")


@dataclass(frozen=True)
class Case:
    """One script: the change that `--fixed` makes, and what a report of the script without it must say.

    `rules`: of which one must come first; none: any, as several may see it. `remedy`: of these words the first change
    must have one; a script without any is healthy, and nothing may be promised of it. `promised`: whether a report can
    know what the change gives. `needs`: libraries that the script imports besides torch. `together`: that `--fixed`
    makes the changes of all findings. `large`: that it takes too much memory to train while others wait.
    """

    script: str
    change: str
    rules: tuple[str, ...]
    remedy: tuple[str, ...]
    promised: bool = True
    needs: tuple[str, ...] = ()
    together: bool = False
    large: bool = False

    @property
    def lines(self) -> list[int]:
        """The lines of the script that a report may point at."""
        text = (FOLDER / f"{self.script}.py").read_text()
        return [n for n, line in enumerate(text.splitlines(), start=1) if line.endswith(MARK)]


# In the order of their worth, as a lent machine has minutes. Of graphs joined to one, batches padded to match them at
# once, and compiling again, a report can know where the time goes, and not how long the step is that somebody writes
# instead.
CASES: tuple[Case, ...] = (
    Case("ema_loop", "torch._foreach_lerp_", _HOST, ("_foreach", "AveragedModel")),
    Case(
        "eager_attention",
        'attn_implementation="sdpa"',
        ("unfused_attention",),
        ("sdpa", "scaled_dot_product"),
        needs=("transformers",),
    ),
    Case("lstm_cell", "nn.LSTM", ("recurrent_loop",), ("nn.LSTM", "nn.GRU"), promised=False),
    Case("vocabulary", "F.cross_entropy", ("unfused_loss",), ("cross_entropy",)),
    Case("checkpointed", "no checkpoint", ("needless_recompute",), ("checkpoint",)),
    Case("metrics", "added up on the GPU", _HOST, ("every k steps", "add up")),
    Case("timm_ema", "ModelEmaV3 with foreach", _HOST, ("foreach", "ModelEmaV3", "AveragedModel"), needs=("timm",)),
    Case("lightning_log", "tensors logged", _HOST, ("every k steps", "add up"), needs=("lightning",)),
    Case("small_graphs", "all graphs of a batch as one", _HOST, ("all graphs", "at once", "one graph"), promised=False),
    Case(
        "diffusion",
        "noise drawn on the GPU",
        (*_HOST, "blocking_copy", "pageable_copy", "exposed_copy"),
        ("device=", "on the device", "on the GPU"),
    ),
    Case("detection", "all images at once", _HOST, ("mask", "torch.where", "pad", "at once"), promised=False),
    Case(
        "lora_trainer", "no emptying of the cache", ("device_allocations",), ("empty_cache",), needs=("transformers",)
    ),
    Case("launches", "CUDA graphs", _HOST, ("CUDA graph", "make_graphed_callables", "reduce-overhead")),
    Case("recompiles", "one length", ("recompilation",), ("dynamic", "shape", "length", "pad"), promised=False),
    Case("conv_layout", "channels_last", ("memory_format",), ("channels_last",), needs=("torchvision",)),
    Case("norm_items", "one norm, not read", _HOST, ("get_total_norm", "clip_grad_norm_", "_foreach", "every k steps")),
    Case("synchronize", "no synchronize()", _HOST, ("synchronize",)),
    Case("optimizer_loop", "fused=True", ("unfused_optimizer", "host_bound"), ("fused",)),
    Case(
        "padding_trainer",
        "padded to the longest, in multiples of 64",
        (),
        ("longest", "padding", "pad to", "bucket", "pack"),
        needs=("transformers",),
    ),
    Case("pageable_volumes", "pinned memory", ("pageable_copy", "blocking_copy"), ("pin_memory", "non_blocking")),
    Case("fp32_products", "bf16 autocast", ("fp32_matmul",), ("autocast",)),
    Case(
        "decode",
        "14 workers",
        ("input_wait",),
        ("num_workers",),
        needs=("torchvision", "PIL"),
    ),
    Case("anomaly", "no anomaly mode", (), ("anomaly",), promised=False),
    Case("hooks", "every 50th step", _HOST, ("every k steps",)),
    Case(
        "norm_by_hand",
        "F.rms_norm and F.gelu",
        ("unfused_norm", "unfused_activation"),
        ("rms_norm", "gelu"),
        together=True,
    ),
    Case("masks", "one comparison on the GPU", _HOST, ("once", "in one", "mask"), promised=False),
    Case("numpy_metrics", "counted on the GPU", _HOST, ("every k steps", "on the GPU"), needs=("torchvision",)),
    Case(
        "augment", "all pictures at once", _HOST, ("at once", "batched", "all "), promised=False, needs=("torchvision",)
    ),
    Case("epochs", "persistent_workers", ("worker_restart",), ("persistent_workers",), needs=("torchvision",)),
    Case("attention", "scaled_dot_product_attention", ("unfused_attention",), ("scaled_dot_product", "sdpa")),
    # What counts as right of these was written down before they were recorded, by somebody who knew no rule.
    Case(
        "distill",
        "the teacher in no_grad",
        (),
        ("no_grad", "inference_mode", "detach", "requires_grad_(False)"),
        needs=("timm",),
        large=True,
    ),
    Case(
        "lora",
        "base.requires_grad_(False)",
        (),
        ("requires_grad", "freeze", "frozen"),
        needs=("transformers",),
        large=True,
    ),
    Case("forecast", "float32", (), ("float32",), needs=("pandas",), large=True),
    Case(
        "coding_rate",
        "cholesky",
        (),
        ("cholesky", "logdet", "slogdet"),
        promised=False,
        needs=("torchvision",),
        large=True,
    ),
    Case(
        "experts",
        "all experts at once",
        (),
        ("bmm", "grouped", "at once", "stack", "batched"),
        promised=False,
        large=True,
    ),
    Case(
        "nerf",
        "only the chosen rays",
        _HOST,
        ("once before", "on the GPU", "on the device", "cache", "only the"),
        large=True,
    ),
    Case("long_context", "is_causal=True", (), ("is_causal",), promised=False, large=True),
    Case(
        "codebook", "a matrix product", (), ("cdist", "matmul", "matrix product", "addmm"), promised=False, large=True
    ),
    Case(
        "atari",
        "a memory of tensors on the GPU",
        (),
        ("on the GPU", "on the device", "from_numpy", "worker", "preallocat", "uint8"),
        large=True,
    ),
    Case(
        "segmentation", "not deterministic", (), ("deterministic",), promised=False, needs=("torchvision",), large=True
    ),
    Case("graph", "the layer before the gather", (), ("before", "per node", "each node"), promised=False, large=True),
    Case(
        "gpt",
        "50,304 scores",
        (),
        ("multiple of 8", "multiple of 64", "50304", "50,304", "pad the"),
        promised=False,
        large=True,
    ),
    Case("vit", "nothing", (), (), needs=("timm",), large=True),
    Case("pretrain", "nothing", (), (), large=True),
)
