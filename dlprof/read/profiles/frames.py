"""Shared by the readers of stacks: who owns a frame, the phase of the step, and the table of stacks."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlprof import schema
from dlprof.errors import DlprofError
from dlprof.read.limits import MOST_NAMES, limit, too_many
from dlprof.read.sources import Reading

if TYPE_CHECKING:
    import pandas as pd

# Name, file ("" if it is unknown) and line (0).
Frame = tuple[str, str, int]

# Deeper stacks are runaway recursion: their outermost frames are kept.
MOST_FRAMES = 400
MOST_TEXT = 300  # characters of a name or a file

_LOADER = "torch/utils/data/dataloader.py"
_WORKER = "torch/utils/data/_utils/worker.py"

# py-spy shortens torch's files to torch/nn/modules/module.py without --full-filenames. Packages that a
# training script has: a shortened file of theirs, or of Python's own modules, is a library's.
_PACKAGES = frozenset(
    [
        *("accelerate", "apex", "datasets", "deepspeed", "diffusers", "fairscale", "fsspec", "huggingface_hub", "jax"),
        *("lightning", "numpy", "pandas", "peft", "PIL", "pyarrow", "pytorch_lightning", "requests", "scipy"),
        *("sklearn", "tensorboard", "tokenizers", "torch", "torchaudio", "torchdata", "torchvision", "tqdm"),
        *("transformers", "triton", "urllib3", "wandb"),
    ]
)


# py-spy: name (file.py:12), the file of a frame that has none in angle brackets; thread (0x7F..): MainThread.
SPY_FRAME = re.compile(r"(.*) \((.*?)(?::(\d{1,9}))?\)")
SPY_THREAD = re.compile(r"thread \((\w+)\)(?:: )?(.*)")


def is_worker_loop(name: str, file: str) -> bool:
    """Return whether a frame is the outermost of a loader's worker; a forked one has its parent's frames below."""
    return name == "_worker_loop" and file.endswith(_WORKER)


def phase_of(name: str, file: str) -> str:
    """Return the phase of a step that a frame begins: fetch, forward, backward or optimizer; "" if none."""
    short = name.rpartition(".")[2]
    if file.endswith(_LOADER) and short in ("__next__", "__iter__"):
        return "fetch"
    if file.endswith(("torch/autograd/__init__.py", "torch/_tensor.py")) and short in ("backward", "grad"):
        return "backward"
    if file.endswith("torch/nn/modules/module.py") and short in ("_wrapped_call_impl", "_call_impl"):
        return "forward"
    if "/torch/optim/" in file and (short == "step" or "profile_hook_step" in name):
        return "optimizer"
    return ""


def phase_in(frames: Sequence[tuple[str, str, Any]]) -> str:
    """Return what the step was doing, as the recorder counts it: the outermost phase, or one inside an optimizer.

    "" if the stack is in none, as in a closure that an optimizer's step calls.
    """
    found = [phase for name, file, *_ in frames if "/torch/" in file and (phase := phase_of(name, file))]
    inner = next((phase for phase in found if phase != "optimizer"), "")
    return inner or ("optimizer" if found and not _is_in_closure(frames) else "")


def _is_in_closure(frames: Sequence[tuple[str, str, Any]]) -> bool:
    """Return whether the step of an optimizer of PyTorch's has called code that is not PyTorch's."""
    stepping = [name.endswith("step") and "/torch/optim/" in file for name, file, *_ in frames]
    after = (file for (_, file, *_), steps in zip(frames[1:], stepping, strict=False) if steps)
    return any("/torch/" not in file for file in after)


@cache
def placed_file(file: str) -> str:
    """Return a file with the folder that a shortened name of a library lacks; "" becomes <unknown>."""
    file = file.replace("\\", "/")
    if not file:
        return "<unknown>"
    if file.startswith(("/", "<", "~")) or file[1:2] == ":":
        return file
    top = file.partition("/")[0].removesuffix(".py")
    if top in _PACKAGES:
        return f"/site-packages/{file}"
    return f"/lib/python3/{file}" if top in sys.stdlib_module_names else file


class Stacks:
    """The stacks of a file of another tool, while it is read: the same stack of a thread is one row.

    `unit` is what their weights count: samples, ns or bytes. `phases`: whether what calls what is known of each stack.
    """

    def __init__(self, path: Path, tool: str, unit: str, *, phases: bool = True) -> None:
        self.path, self.tool, self.unit, self._phases = path, tool, unit, phases
        self._seen: Counter[tuple[str, tuple[Frame, ...]]] = Counter()
        self._full = False

    def add(self, thread: str, frames: Sequence[Frame], weight: int) -> None:
        """Take a stack, outermost frame first; one without a frame or a weight is passed over."""
        if not frames or weight <= 0:
            return
        key = (thread[:MOST_TEXT], tuple(frames[:MOST_FRAMES]))
        if key not in self._seen and len(self._seen) >= limit(MOST_NAMES):
            self._full = True
            return
        self._seen[key] = min(self._seen[key] + weight, 1 << 62)

    def __len__(self) -> int:
        return len(self._seen)

    def reading(
        self, bad: int = 0, facts: dict[str, Any] | None = None, also: dict[str, pd.DataFrame] | None = None
    ) -> Reading:
        """Return the table "stacks", and with it those of `also`; raise DlprofError if no stack was read."""
        import pandas as pd

        if not self._seen:
            raise DlprofError(f"{self.path}: no stacks in it")
        threads = {thread for thread, _ in self._seen}
        main = {t for t in threads if re.fullmatch(r".*\bMainThread\b.*", t)}
        # Where no thread says that it is the main one, all are shown.
        rows = []
        for (thread, frames), weight in self._seen.items():
            files = [(_plain(name), placed_file(file[:MOST_TEXT]), line) for name, file, line in frames]
            at = next((n for n, (name, file, _) in enumerate(files) if is_worker_loop(name, file)), None)
            role = "worker" if at is not None else "main" if not main or thread in main else "thread"
            files = files[at or 0 :]
            phase = phase_in(files) if role == "main" and self._phases else ""
            stack = ";".join(f"{name} ({_plain(file)}:{line})" for name, file, line in files)
            rows.append((role, thread, phase, stack, weight, self.path.name, self.unit))
        frame = pd.DataFrame(sorted(rows), columns=list(schema.STACKS)).astype(dict(schema.STACKS))
        warnings = [f"{self.path.name}: {bad:,} malformed lines are left out"] if bad > 1 else []
        if self._full:
            warnings.append(too_many(self.path, "different stacks", MOST_NAMES))
        about = {f"profile {self.path.name}": {"tool": self.tool, "unit": self.unit, **(facts or {})}}
        tables = {"stacks": schema.check("stacks", frame), **(also or {})}
        return Reading(tables, about, tuple(warnings))


def _plain(text: str) -> str:
    """Return a name without what separates frames."""
    return text[:MOST_TEXT].replace(";", ",").replace("\n", " ")
