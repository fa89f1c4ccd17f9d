"""The script's own files as the recording keeps them: without comments, and with the text of strings left out."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from dlprof import run_folder
from dlprof.read.opening import Inside, read_object
from dlprof.read.records import NotThereError


def kept_files(path: Path) -> dict[str, str]:
    """Return the text of each file that rank 0 of a run keeps; of a result.json, those of the run that it lies in.

    Raises DlprofError where the copy is broken.
    """
    inside = Inside(path if path.is_dir() else path.parent)
    logs = [run_folder.log_of(rank, "sources") for rank in sorted(inside.root.glob("ranks/00000*"))]
    held = None
    for path, begins in reversed([log for log in logs if inside.holds(log[0])]):
        with suppress(NotThereError):
            held = read_object(path, begins).get("files")
            break
    texts = (
        {str(name): of.get("text") for name, of in held.items() if isinstance(of, dict)}
        if isinstance(held, dict)
        else {}
    )
    return {name: text for name, text in texts.items() if isinstance(text, str)}
