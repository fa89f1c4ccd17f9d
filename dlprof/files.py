"""Writes a file whole or not at all, and names the folders of hosts.

A folder from an untrusted source may hold links to the user's own files. So the temporary file has a random name and is
always newly created, and a link at the final name is replaced, not followed.

Several hosts of a job may have the same name, like clones and containers. The boot id of their kernels distinguishes
them.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dlprof.errors import DlprofError, reason


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Yield an empty file to write into, which then replaces `path`. If the block raises, the file is removed.

    Raises OSError if no file can be created in the folder.
    """
    part = path.with_name(f".{path.name[:64]}.{os.urandom(8).hex()}.tmp")
    os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666))
    try:
        yield part
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def write(path: Path, text: str) -> None:
    """Write a text as UTF-8: a reader never sees half of it. Raises OSError if the disk does not take it."""
    with whole(path) as part:
        part.write_text(text, encoding="utf-8", errors="backslashreplace")


@contextmanager
def writing(what: str, remedy: str = "") -> Iterator[None]:
    """Raise DlprofError, which begins with `what` and ends with `remedy`, for whatever prevents writing it."""
    try:
        yield
    except OSError as e:
        raise DlprofError(f"{what} cannot be written: {reason(e)}{remedy}") from None


def make_ours(folder: Path) -> None:
    """Create a folder, or check that an existing one is this user's and only theirs to write. Raises OSError."""
    folder.mkdir(0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise OSError(f"{folder} is not this user's own")


def compact(data: object) -> str:
    """Return data as JSON without spaces. Raises ValueError for a number that JSON does not have."""
    return json.dumps(data, allow_nan=False, separators=(",", ":"))


# The folder, in a recorded run, of what is known of its ranks already.
KEPT = ".dlprof"


def boot() -> str:
    """Return the boot id of this host's kernel; "" if it is unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def longer(name: str, boot: str) -> str:
    """Return a name for a host that shares its name with another host of the job."""
    return f"{name}~{boot[:8]}"
