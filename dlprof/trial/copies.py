"""The working copy that a run of a trial has of the job's folder, so that nothing of the job's own is written: what it
copies, what it links to, what is edited in it, and where the trackers of experiments write to.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from dlprof import overrides
from dlprof.analysis.source.patches import Patch
from dlprof.errors import DlprofError
from dlprof.overrides import Value
from dlprof.units import size

# Where trackers of experiments write to during a run: into its own folder, and to no server.
TRACKERS: Mapping[str, str] = {
    "WANDB_MODE": "offline",
    "WANDB_DIR": "{}",
    "MLFLOW_TRACKING_URI": "file://{}/mlruns",
    "COMET_START_ONLINE": "0",
    "COMET_OFFLINE_DIRECTORY": "{}",
    "NEPTUNE_MODE": "offline",
    "CLEARML_OFFLINE_MODE": "1",
    "SWANLAB_MODE": "offline",
    "TENSORBOARD_LOGGING_DIR": "{}",
}

# A copy of more would take longer than the run.
MOST_BYTES, MOST_FILES = 2 << 30, 50_000

# Repositories, environments, caches and earlier runs.
_LEFT_OUT = frozenset((".git", "__pycache__", ".venv", "venv", "node_modules", "runs"))

# Files from this size on, and folders of so many files, are linked to instead of copied: if the recorded job left them
# as they are, and they are nothing that jobs write, or that is edited.
_LARGE, _MANY = 1 << 20, 1_000

_WRITTEN = (".bin", ".ckpt", ".db", ".log", ".onnx", ".pkl", ".pt", ".pth", ".py", ".safetensors", ".sqlite")

# The folder above is linked to, too, for paths such as ../data: if it holds no more than this.
_MOST_BESIDE = 200

# Of a repository, so many folders above are looked at.
_MOST_ABOVE = 5


def to_link(folder: Path, skip: Path, since_s: float) -> set[Path]:
    """Return what a copy of a folder links to: large files and folders of data that are older than the recording, and
    what relative links outside of it lead to.

    `skip` is not copied. Raises DlprofError if what is left is more than MOST_BYTES or MOST_FILES.
    """
    links: set[Path] = set()
    total = copied_files = 0
    for root, folders, files in os.walk(folder):
        for path in (Path(root, name) for name in (*folders, *files)):
            if _is_left_out(path, skip):
                continue
            status = path.lstat()
            if path.is_symlink():
                if not path.readlink().is_absolute() and not path.resolve().is_relative_to(folder.resolve()):
                    links.add(path)
            elif path.is_dir():
                if _is_data(path, since_s):
                    links.add(path)
            elif status.st_size >= _LARGE and status.st_mtime < since_s and not path.name.endswith(_WRITTEN):
                links.add(path)
            else:
                total, copied_files = total + status.st_size, copied_files + 1
        if total > MOST_BYTES or copied_files > MOST_FILES:
            raise DlprofError(
                f"{folder} holds more than {size(MOST_BYTES)} or {MOST_FILES:,} files: too much to copy for a run"
            )
        folders[:] = [n for n in folders if Path(root, n) not in links and not _is_left_out(Path(root, n), skip)]
    return links


def _is_left_out(path: Path, skip: Path) -> bool:
    """Return whether something is not copied: by its name, a run, no file (a pipe or socket), or not to be read."""
    if path.name in _LEFT_OUT or path == skip or (path / "run.json").is_file():
        return True
    return not path.is_symlink() and not ((path.is_file() or path.is_dir()) and os.access(path, os.R_OK))


def _is_data(folder: Path, since_s: float) -> bool:
    """Return whether a folder holds many files, all older than the recording and nothing that jobs write."""
    count = 0
    for root, _, files in os.walk(folder):
        paths = [Path(root), *(Path(root, name) for name in files)]
        if any(name.endswith(_WRITTEN) for name in files) or any(p.lstat().st_mtime >= since_s for p in paths):
            return False
        count += len(files)
    return count >= _MANY


def copied(folder: Path, to: Path, since_s: float = 0.0) -> tuple[Path, set[Path]]:
    """Copy a folder; return the copy, and what it links to instead (see `to_link`). `to.parent` is made for it.

    In a repository the copy stands in its folders above, too, with links to what is in them, for paths such as
    ../../data. Raises DlprofError if the folder holds too much, or cannot be copied. Links are copied as links. If the
    copy lies within the folder it is not copied itself.
    """
    try:
        place, whole = to.parents[1], folder.resolve()
        links = to_link(folder, place, since_s)

        def left_out(root: str, names: list[str]) -> set[str]:
            return {n for n in names if Path(root, n) in links or _is_left_out(Path(root, n), place)}

        top = _repository(whole)
        to = to.parent / whole.parent.relative_to(top) / to.name
        shutil.copytree(folder, to, symlinks=True, ignore=left_out)
        for path in links:
            (to / path.relative_to(folder)).symlink_to(path)
        inner, made = whole, to
        while inner != top:
            beside = [path for path in inner.parent.iterdir() if path.name != inner.name]
            if inner != whole:  # what the job writes there, it writes elsewhere now
                beside = [path for path in beside if path.name not in _LEFT_OUT and not _is_new(path, since_s)]
            inner, made = inner.parent, made.parent
            for path in beside if len(beside) <= _MOST_BESIDE else ():
                (made / path.name).symlink_to(path)
    except (OSError, shutil.Error) as e:
        raise DlprofError(f"{folder} cannot be copied: {str(e)[:300]}") from None
    return to, links


def _repository(folder: Path) -> Path:
    """Return the folder above that is a repository; the next one above if there is none near."""
    above = [] if (folder / ".git").exists() else [*folder.parents][:_MOST_ABOVE]
    return next((one for one in above if (one / ".git").exists()), folder.parent)


def _is_new(path: Path, since_s: float) -> bool:
    """Return whether something, or what a folder holds, was changed since then."""
    inside = path.iterdir() if path.is_dir() and os.access(path, os.R_OK) else ()
    return any(one.lstat().st_mtime >= since_s for one in (path, *inside))


def edit_in(folder: Path, edit: Patch) -> str:
    """Edit the files in a folder, none that a link leads out of it to; return why that cannot be done, or ""."""
    for name, (before, _) in edit.files.items():
        file = folder / name
        if not file.is_file() or file.is_symlink() or not file.resolve().is_relative_to(folder.resolve()):
            return f"the edit of {name} cannot be made: no such file is in the folder itself"
        if file.read_bytes() != before:
            return f"the edit of {name} does not apply: the file has changed"
    for name, (_, after) in edit.files.items():
        (folder / name).write_bytes(after)
    return ""


def is_changed(linked: Path, since_s: float) -> bool:
    """Return whether something was written into data that a copy links to."""
    return linked.exists() and not linked.is_symlink() and linked.stat().st_mtime >= since_s


def by_edit(name: str) -> bool:
    """Return whether a setting is none of `--set`, so that only an edit makes it."""
    return not name.startswith("env.") and overrides.named(name.partition(".")[2]) != name


def made_by(edit: Patch, settings: Mapping[str, Value]) -> list[str]:
    """Return which of the settings that a patch was made for it makes."""
    left = {name for names, _, _ in edit.left_out for name in names.split(", ")}
    return [n for n in settings if n.partition(".")[2] not in left] if edit.files else []


def quiet_trackers(env: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Return the variables with which trackers of experiments write into a folder, and to no server."""
    off = ("disabled", "offline", "debug")
    return {name: text.format(folder) for name, text in TRACKERS.items() if env.get(name) not in off}


def moved(word: str, folder: Path, to: Path) -> str:
    """Return a word of a command with the job's folder replaced by its copy, but for what is not copied."""
    not_copied = "|".join(map(re.escape, sorted(_LEFT_OUT)))
    here = rf"(?<![\w./-]){re.escape(str(folder))}(?![\w.-])(?!/(?:{not_copied})(?:[/:]|$))"
    return re.sub(here, lambda _: str(to), word)
