"""A copy of the working directory for one run, so that what the script writes there is thrown away."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from dlprof.errors import DlprofError
from dlprof.units import size

# More than this is a data set or an archive of runs: copying it before each run takes longer than the run.
MOST_BYTES = 2 << 30

# What a script does not read, and what others have made of it.
_LEFT_OUT = frozenset((".git", "__pycache__", ".venv", "venv", "node_modules", "runs"))


def copied(folder: Path, to: Path) -> Path:
    """Copy a folder and return the copy; raise DlprofError where it holds more than MOST_BYTES, or cannot be copied.

    Links are copied as links. The copy itself is left out, should it lie within the folder.
    """
    total = 0
    for path, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in _LEFT_OUT and Path(path, name) != to.parent]
        for name in files:
            total += os.lstat(os.path.join(path, name)).st_size  # noqa: PTH118 - many
            if total > MOST_BYTES:
                raise DlprofError(
                    f"{folder} holds more than {size(MOST_BYTES)}: too much to copy for each run (--copy)"
                )

    def left_out(path: str, names: list[str]) -> set[str]:
        return {name for name in names if name in _LEFT_OUT or Path(path, name) == to.parent}

    try:
        shutil.copytree(folder, to, symlinks=True, ignore=left_out)
    except (OSError, shutil.Error) as e:
        raise DlprofError(f"{folder} cannot be copied (--copy): {str(e)[:300]}") from None
    return to
