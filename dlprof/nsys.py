"""NVIDIA's nsys as a program: where it is, and how it writes a report as SQLite."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

# What nsys itself writes; .qdrep is the name before 2021.
REPORTS = (".nsys-rep", ".qdrep")


def found(path: str | None = None) -> str | None:
    """Return the nsys on a PATH, by default this process's."""
    return shutil.which("nsys", path=path)


def export(nsys: str, report: Path, to: Path, seconds: float) -> str:
    """Have nsys write a report as SQLite; return why that failed, "" where it did not."""
    words = [nsys, "export", "--type=sqlite", "--force-overwrite=true", f"--output={to}", str(report)]
    try:
        done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return f"nsys export took more than {seconds:g} s and was ended"
    except OSError as e:
        return f"{nsys} does not start: {e.strerror or e}"
    if done.returncode or not to.exists():
        said = (done.stderr or done.stdout).decode(errors="replace").strip().splitlines()
        # It shows its progress in the same line, and ends with advice: the line that names the error says why.
        said = [line.rpartition("]")[2].strip() if "[" in line else line for line in said]
        why = next((line for line in said if "error" in line.lower()), said[-1] if said else "")
        return f"nsys export failed ({done.returncode}){': ' + why[:300] if why else ''}"
    return ""
