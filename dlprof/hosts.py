"""Tells apart the machines of a job that have one name, as clones and containers do."""

from __future__ import annotations

from pathlib import Path

# The file in a host's folder that says which machine's it is.
BOOT = "boot"


def boot() -> str:
    """Return what identifies this start of this machine's kernel among all others; "" where it does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def longer(name: str, boot: str) -> str:
    """Name a machine whose name another one of the job has too."""
    return f"{name}~{boot[:8]}"
