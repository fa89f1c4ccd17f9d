"""Tells the machines of a job apart where they have one name, as clones and containers do."""

from __future__ import annotations

from pathlib import Path

# Says in a host's folder which machine's it is.
BOOT = "boot"


def boot() -> str:
    """Return what tells this start of this kernel from every other one, of any machine; "" where it does not tell."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def longer(name: str, boot: str) -> str:
    """Name a machine whose name another one of the job has too."""
    return f"{name}~{boot[:8]}"
