"""How the report names and colours categories of time, passes of a pipeline and functions."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from dlprof.plain import plain


class Category(Struct, frozen=True):
    """How a part of a step is named, explained and drawn: colours of both themes, in 256 colours, as a glyph."""

    name: str
    meaning: str
    light: str
    dark: str
    ansi: int
    glyph: str


# Paul Tol's bright scheme for the seven commonest parts. The other seven were chosen to differ from all others under
# simulated protanopia, deuteranopia and tritanopia.
LOOKS: Mapping[str, Category] = {
    "computation": Category("Computation", "the device computes", "#4477aa", "#4477aa", 67, "█"),
    "communication": Category(
        "Communication", "a collective that no computation overlaps", "#ee6677", "#ee6677", 204, "░"
    ),
    "copy": Category(
        "Copies", "a copy that neither computation nor communication overlaps", "#ccbb44", "#ccbb44", 185, "▞"
    ),
    "input_wait": Category(
        "Input wait", "the training thread waits for the next batch", "#aa3377", "#c2509a", 132, "▓"
    ),
    "pipeline_bubble": Category(
        "Pipeline bubble", "a pipeline stage has no micro-batch to work on", "#66ccee", "#66ccee", 81, "·"
    ),
    "checkpoint": Category("Checkpoint", "saving a checkpoint blocks training", "#228833", "#228833", 34, "▄"),
    "validation": Category("Validation", "evaluation between training steps", "#332288", "#7b70e8", 62, "▀"),
    "garbage_collection": Category("Garbage collection", "Python collects garbage", "#ee8866", "#ee8866", 209, "×"),
    "compilation": Category("Compilation", "torch.compile compiles", "#661100", "#a0522d", 88, "+"),
    "periodic_work": Category(
        "Work every n-th step", "what a script does between its steps, every n-th time", "#dd77dd", "#aacc88", 176, "o"
    ),
    "optimizer_host": Category(
        "Optimizer on the host",
        "the optimizer's Python code, while the device has no work",
        "#997700",
        "#997700",
        136,
        "=",
    ),
    "host": Category("Host", "launches and Python, while the device has no work", "#bbbbbb", "#a7acb5", 250, "▒"),
    "launch_latency": Category(
        "Launch latency",
        "the device has work queued, and its next kernel is about to start",
        "#a8d8a8",
        "#b8e0b8",
        151,
        ":",
    ),
    "queued_wait": Category(
        "Queued work waits", "the device has work queued that waits for something else", "#a848f0", "#b050ff", 135, "%"
    ),
    "other": Category("Other", "none of these", "#e2e2e2", "#656b76", 242, "-"),
}

# What a pipeline stage does, in its timeline, and what a step does over the run: in colours that no part of a step has,
# as far from all of these, and from each other, as 20 colours allow under the same simulations.
PASSES: Mapping[str, Category] = {
    "forward": Category("Forward", "a micro-batch's forward pass through the stage", "#7f86f0", "#d9ecff", 105, "█"),
    "backward": Category("Backward", "its backward pass", "#0b1f3a", "#3a5fb8", 17, "▓"),
    "input": Category("Backward, inputs", "gradients of the inputs alone", "#5b3fd1", "#7744dd", 98, "▒"),
    "weight": Category("Backward, weights", "gradients of the weights alone", "#6a2c5c", "#6d497e", 96, "░"),
    "loss": Category("Loss", "the loss of a micro-batch", "#3aa8a0", "#e8e86a", 73, "▄"),
    "reduce": Category("Reduce", "gradients summed over data-parallel ranks", "#a06cc8", "#c281ee", 134, "×"),
}

# Whose code a Python function is.
FRAMES: Mapping[str, Category] = {
    "own": Category("Yours", "a function in the job's own files", "#b5651d", "#e39a57", 137, "█"),
    "library": Category("Libraries", "a function of Python or of an installed package", "#cfcac0", "#9a9488", 248, "░"),
}

# What is no part of a step: loader workers, the waiting within communication, marks of steps over the run.
OTHERS: Mapping[str, Category] = {
    "worker": Category("Loader worker", "a worker of the loader makes a batch", "#8d7aa8", "#b8a5d6", 139, "▒"),
    "waiting": Category(
        "Waiting for other ranks",
        "the part of communication before the last rank arrives",
        "#f7b9c1",
        "#d99aa3",
        217,
        "░",
    ),
    "epoch": Category("Epoch", "an epoch begins or ends", "#7d8597", "#8f98aa", 242, "|"),
    "change": Category(
        "A change", "a run that is faster or slower than the one before", "#c98500", "#e0a526", 178, "^"
    ),
    "suspended": Category("Suspended", "the job was suspended until then", "#8a4b3c", "#b06a58", 95, "!"),
}

# The parts of memory, in the order of a bar. Neighbours differ in lightness too.
MEMORY: Mapping[str, Category] = {
    "held-parameter": Category("Parameters", "the model's weights", "#2f5d8c", "#5b8fc4", 61, "█"),
    "held-cast": Category("16-bit weight copies", "copies of weights made by autocast", "#9dbbd8", "#a9c4de", 110, "▒"),
    "held-gradient": Category("Gradients", "of the parameters", "#c76b29", "#e08a4b", 166, "▓"),
    "held-optimizer": Category(
        "Optimizer state", "moments and master copies of the parameters", "#e8c170", "#e6c47c", 179, "░"
    ),
    "held-buffer": Category("Buffers", "tensors of the model that are not parameters", "#7a6f9b", "#8f85b0", 97, "="),
    "held-activation": Category(
        "Activations", "tensors that the forward pass stores for the backward pass", "#3f8f6b", "#5cb58d", 72, "▞"
    ),
    "held-input": Category("Input", "the batch", "#b9d98a", "#c3e097", 150, "·"),
    "held-communication": Category(
        "Communication buffers", "gradient buckets, and parameters gathered by FSDP", "#d9537f", "#e8779b", 168, "×"
    ),
    "held-temporary": Category(
        "Temporary",
        "allocated at the peak and not counted: workspaces, gradients of the loss",
        "#f2b5c8",
        "#d8a3b5",
        218,
        ":",
    ),
    "held-cache": Category("Allocator cache", "reserved by PyTorch and not allocated", "#cfd3da", "#8b919c", 252, "-"),
    "held-libraries": Category(
        "Driver and libraries", "the CUDA context, NCCL, and other processes on the GPU", "#5d6b86", "#6b7488", 60, "▄"
    ),
    "held-process": Category(
        "Process baseline",
        "used by the process once it had imported torch: Python and its libraries",
        "#b3a894",
        "#857a68",
        247,
        "▀",
    ),
    "held-unexplained": Category("Unexplained", "the peak less all other parts", "#e9e4dc", "#767c86", 254, "o"),
}

DRAWN: Mapping[str, Category] = {**LOOKS, **PASSES, **FRAMES, **OTHERS, **MEMORY}


def look(category: str) -> Category:
    """Return how a category is drawn; an unknown one is drawn like "other" under its own name."""
    known = DRAWN.get(category)
    if known is not None:
        return known
    other = LOOKS["other"]
    return Category(plain(category, 40) or other.name, other.meaning, other.light, other.dark, other.ansi, other.glyph)
