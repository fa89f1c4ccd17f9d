"""What machine this is, from torch and nvidia-smi: each asked in a process of its own, so that no context stays."""

from __future__ import annotations

import csv
import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu.jobs import python, run

# An import of torch from a cold disk takes its time.
_PATIENCE_S = 120.0

_ABOUT_TORCH = """
import json, platform, torch
cuda = torch.cuda.is_available()
gpus = []
for n in range(torch.cuda.device_count() if cuda else 0):
    p = torch.cuda.get_device_properties(n)
    gpus.append({"name": p.name, "uuid": str(getattr(p, "uuid", "")), "memory_bytes": p.total_memory,
                 "capability": [p.major, p.minor], "multiprocessors": p.multi_processor_count})
print(json.dumps({
    "python": platform.python_version(),
    "torch": str(torch.__version__),
    "cuda": torch.version.cuda,
    "hip": torch.version.hip,
    "cudnn": torch.backends.cudnn.version() if cuda else None,
    "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda and not torch.version.hip else None,
    "gpus": gpus,
}))
"""

# nvidia-smi --help-query-gpu. Fields that only some drivers know are not asked for: one that is unknown fails them all.
ABOUT_GPU = (
    "index",
    "uuid",
    "name",
    "driver_version",
    "memory.total",
    "compute_mode",
    "power.limit",
    "clocks.max.sm",
    "pcie.link.gen.current",
    "pcie.link.width.current",
)


def ask_torch(cwd: Path) -> dict[str, Any] | str:
    """Return what torch says of itself and its GPUs; a sentence where it cannot be asked."""
    ended = run(python("-c", _ABOUT_TORCH), cwd, _PATIENCE_S)
    if ended.code == 0 and ended.lines:
        try:
            told: dict[str, Any] = json.loads(ended.lines[-1][1])
        except ValueError:
            return f"torch answers {ended.lines[-1][1][:200]!r}"
        return told
    if ended.code is None:
        return f"torch did not answer within {_PATIENCE_S:.0f} s"
    words = [text for text in ended.errors.splitlines() if text.strip()]
    return f"torch cannot be asked: {words[-1][:200] if words else f'exit code {ended.code}'}"


def ask_driver(cwd: Path) -> list[dict[str, str | None]] | str:
    """Return what nvidia-smi says of each GPU (ABOUT_GPU); a sentence where it cannot be asked."""
    if shutil.which("nvidia-smi") is None:
        return "nvidia-smi is not on the PATH"
    ended = run(query(ABOUT_GPU), cwd, 60.0)
    if ended.code != 0:
        said = (ended.errors or ended.out).strip().splitlines()
        return f"nvidia-smi: {said[-1][:200] if said else f'exit code {ended.code}'}"
    return parse(ended.out, ABOUT_GPU)


def query(fields: tuple[str, ...], period_ms: int | None = None) -> list[str]:
    """Return the command that asks nvidia-smi for these fields, once or every so many ms."""
    again = [] if period_ms is None else [f"--loop-ms={period_ms}"]
    return ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits", *again]


def parse(text: str, fields: tuple[str, ...]) -> list[dict[str, str | None]]:
    """Return the rows of nvidia-smi's CSV without header and units; what it does not know is None.

    Lines with another number of cells are none of its rows: it prints errors among them.
    """
    rows = [[cell.strip() for cell in row] for row in csv.reader(text.splitlines(), skipinitialspace=True)]
    return [
        {name: None if _unknown(cell) else cell for name, cell in zip(fields, row, strict=True)}
        for row in rows
        if len(row) == len(fields)
    ]


def number(cell: str | None) -> float | None:
    """Return a cell of nvidia-smi's as a number; None where it is none."""
    try:
        return None if cell is None else float(cell)
    except ValueError:
        return None


def no_gpu(torch: Mapping[str, Any] | str, driver: list[dict[str, str | None]] | str) -> str:
    """Return why there is no GPU to prove anything on, in one line; "" where there is one."""
    if isinstance(torch, str):
        return f"no GPU: {torch}"
    if torch["gpus"]:
        return ""
    beside = driver if isinstance(driver, str) else f"nvidia-smi lists {len(driver)}"
    return f"no GPU: torch {torch['torch']} sees none; {beside}"


def label(name: str) -> str:
    """Return a device's model as part of a file's name: letters, digits and underscores."""
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_") or "unknown"


def _unknown(cell: str) -> bool:
    return cell in ("", "N/A") or (cell.startswith("[") and cell.endswith("]"))
