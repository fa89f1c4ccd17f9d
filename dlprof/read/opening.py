"""Opens files from untrusted sources: only regular files inside the given folder, up to a size; and unpacks archives.

Such a folder may hold links to the own files of the user, endless pipes and devices, and a megabyte that unpacks to
gigabytes. Each skipped file makes a warning. `--no-limits` lifts the sizes, not the rest.

`unpacked` unpacks xz, bzip2 and twice packed gzip files, zip and tar archives into a temporary folder that is removed
when this process ends. Only regular files of an archive are unpacked, under names within that folder. Links, devices
and names that lead out of it are skipped. An archive may unpack to as much as one packed file may, and no more than
MOST_OF_ARCHIVE.
"""

from __future__ import annotations

import atexit
import bz2
import contextlib
import json
import lzma
import os
import shutil
import stat
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Any, BinaryIO

from dlprof.errors import DlprofError
from dlprof.read.limits import (
    LEAST_UNPACKED,
    MOST_LINE,
    MOST_MEMBERS,
    MOST_OF_ARCHIVE,
    MOST_TEXT,
    limit,
    limited,
    most_unpacked,
)
from dlprof.units import few

_BATCH = 4 << 20

NO_LINE = b"\0"  # no valid line for any reader

# What text in UTF-16 begins with.
UTF16 = (b"\xff\xfe", b"\xfe\xff")


def as_utf8(data: bytes) -> bytes:
    """Return text that PowerShell wrote, in UTF-16, as UTF-8; other data as they are."""
    return data[: len(data) & ~1].decode("utf-16", errors="replace").encode() if data.startswith(UTF16) else data


@contextlib.contextmanager
def open_file(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file for reading; raise a one-line DlprofError if that fails."""
    try:
        # Without O_NONBLOCK, opening a pipe that has no writer blocks forever.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        with os.fdopen(fd, "rb") as file:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise DlprofError(f"{path}: not a regular file")
            yield file
    except FileNotFoundError:
        raise DlprofError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise DlprofError(f"{path}: a folder, not a file") from None
    except OSError as e:
        raise DlprofError(f"{path}: cannot be read: {e.strerror or e}") from e


def read_file(path: Path, most: int = MOST_TEXT) -> bytes:
    """Return all of a file; raise DlprofError if it is larger than `most` bytes."""
    with open_file(path) as file:
        data = file.read(most + 1 if limited() else -1)
    if len(data) > limit(most):
        raise DlprofError(f"{path}: larger than {most >> 20} MB: not read (--no-limits reads it)")
    return data


def read_object(path: Path, begins: str = "") -> dict[str, Any]:
    """Return the object of a small JSON file, or the last that begins so; raise DlprofError where there is none."""
    if begins:
        from dlprof.read.records import last_line  # with numpy, which opening a run does not wait for
    try:
        data = json.loads(last_line(path, begins) if begins else read_file(path))
    except (ValueError, RecursionError) as e:
        raise DlprofError(f"{path.name} is broken ({str(e)[:120]})") from None
    if not isinstance(data, dict):
        raise DlprofError(f"{path.name} is broken (it holds no object)")
    if begins:
        del data["log"]
    return data


def gunzipped(packed: bytes, most: int) -> bytes:
    """Return the first `most` bytes that gzip data unpack to, as far as they are whole; other data as they are."""
    if not packed.startswith(b"\x1f\x8b"):
        return packed[:most]
    parts, left = [], most
    while packed and left > 0:
        member = zlib.decompressobj(wbits=31)
        try:
            parts.append(member.decompress(packed, left))
        except zlib.error:
            break
        left -= len(parts[-1])
        packed = member.unused_data.lstrip(b"\0")
    return b"".join(parts)


def read_unpacked(path: Path) -> bytes:
    """Return all of a small file, unpacked; raise DlprofError if it, or what it unpacks to, is too large."""
    data = read_file(path)
    most = min(most_unpacked(len(data)), limit(LEAST_UNPACKED))
    whole = gunzipped(data, most + 1)
    if len(whole) > most:
        raise DlprofError(f"{path}: unpacks to more than {most >> 20} MB: not read (--no-limits reads it)")
    return whole


def lines_of(file: BinaryIO) -> Iterator[list[bytes]]:
    """Return a log's lines, thousands at a time. Stop with NO_LINE at one that is longer than MOST_LINE."""
    held = b""
    while block := file.read(_BATCH):
        *lines, held = (held + block).split(b"\n")
        if lines:
            yield lines
        if len(held) > limit(MOST_LINE):
            yield [NO_LINE]
            return
    if held:
        yield [held]


class Inside:
    """Decides which files of a folder may be read: regular ones inside it. `warnings` names links that lead out."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._real = root.resolve()
        self._folders: dict[Path, bool] = {}  # whether they are inside it; a job has thousands of files in few folders
        self._out: dict[str, None] = {}

    def holds(self, path: Path) -> bool:
        """Return whether a path is a regular file inside the folder."""
        return self._is(path, stat.S_ISREG)

    def holds_folder(self, path: Path) -> bool:
        """Return whether a path is a folder inside the folder."""
        return self._is(path, stat.S_ISDIR)

    def text(self, path: Path) -> str:
        """Return the text of a small file; "" if it is outside the folder or cannot be read."""
        if not self.holds(path):
            return ""
        try:
            return read_file(path).decode(errors="replace")
        except DlprofError:
            return ""

    @property
    def warnings(self) -> list[str]:
        """One line that names links which were not followed; none if there were none."""
        out = few(list(self._out), 4)
        return [f"links that lead out of the folder are not followed: {out}"] if out else []

    def _is(self, path: Path, kind: Callable[[int], bool]) -> bool:
        try:
            mode = os.lstat(path).st_mode
            if stat.S_ISLNK(mode):
                mode = path.stat().st_mode
                leads_here = path.resolve().is_relative_to(self._real)
            else:
                if path.parent not in self._folders:
                    self._folders[path.parent] = path.parent.resolve().is_relative_to(self._real)
                leads_here = self._folders[path.parent]
        except PermissionError:
            raise
        except (OSError, RuntimeError):  # it does not exist, or links to itself
            return False
        if not leads_here:
            self._out[str(path.relative_to(self.root)) if path.is_relative_to(self.root) else path.name] = None
        return leads_here and kind(mode)


_GZIP, _XZ, _BZIP2, _ZIP = b"\x1f\x8b", b"\xfd7zXZ\0", b"BZh", b"PK\x03\x04"
_TAR_AT, _TAR = 257, b"ustar"
_BLOCK = 1 << 20
_LAYERS = 4  # layers of packing: trace.json.gz in an archive.tar.xz has three
_XZ_MEMORY = 256 << 20  # xz -9 needs a quarter of it
_DAMAGED = (EOFError, ValueError, OSError, zlib.error, lzma.LZMAError, tarfile.TarError, zipfile.BadZipFile)
# zipfile raises these for a member that is encrypted, or packed in an unknown way.
_NOT_READ = (RuntimeError, NotImplementedError)

_PACKED: dict[bytes, Callable[[], Any]] = {
    _GZIP: lambda: zlib.decompressobj(wbits=31),
    _XZ: lambda: lzma.LZMADecompressor(memlimit=_XZ_MEMORY),
    _BZIP2: bz2.BZ2Decompressor,
}
_ENDINGS = (".gz", ".xz", ".bz2", ".tgz", ".txz", ".tbz2")


class Unpacked:
    """An unpacked file: `path`, a file or (from an archive) a folder, and a warning for each missing part."""

    def __init__(self, source: Path, *, archives: bool = True) -> None:
        self._source, self._archives = source, archives
        self._folder = Path(tempfile.mkdtemp(prefix="dlprof-unpacked-"))
        atexit.register(shutil.rmtree, self._folder, ignore_errors=True)
        self._left = min(most_unpacked(source.stat().st_size), limit(MOST_OF_ARCHIVE))
        self._left = min(self._left, shutil.disk_usage(self._folder).free // 2)
        self.is_archive = False
        self.warnings: list[str] = []
        self.path = self._inner(source)

    def _inner(self, path: Path) -> Path:
        """Unpack one layer after another, and extract an archive."""
        for layer in range(_LAYERS):
            begins = _beginning(path)
            if self._archives and _is_archive(begins):
                self.is_archive = True
                inside = self._folder / "archive"
                inside.mkdir()
                with self._damage():
                    self._take(inside, _of_zip(path) if begins.startswith(_ZIP) else _of_tar(path))
                return inside
            packed = next((make for magic, make in _PACKED.items() if begins.startswith(magic)), None)
            if packed is None or (layer and begins.startswith(_GZIP) and not _is_packed_again(path)):
                break  # readers unpack one layer of gzip themselves
            name = path.name.removesuffix(next((e for e in _ENDINGS if path.name.endswith(e)), ""))
            made = self._folder / str(layer) / (name or "unpacked")
            made.parent.mkdir()
            with open_file(path) as file, made.open("wb") as out, self._damage():
                self._copy(_unpacked(file, packed), out)
            path = made
        return path

    @contextlib.contextmanager
    def _damage(self) -> Iterator[None]:
        try:
            yield
        except _DAMAGED as e:
            why = str(e) if isinstance(e, OSError) and e.errno else "it is cut off or damaged"
            self.warnings.append(f"{self._source.name}: {why}: what comes before is used")

    def _copy(self, blocks: Iterator[bytes], out: IO[bytes]) -> bool:
        """Write the data up to the limits; return whether that was all."""
        for block in blocks:
            self._left -= len(block)
            if self._left < 0:
                self.warnings.append(
                    f"{self._source.name}: unpacks to more than is read of such a file: what comes before is used"
                    " (--no-limits reads all)"
                )
                return False
            out.write(block)
        return True

    def _take(self, inside: Path, members: Iterator[tuple[str, Iterator[bytes] | None]]) -> None:
        """Write the regular files of an archive, each to its name within the folder."""
        passed: list[str] = []
        for number, (name, blocks) in enumerate(members):
            if number >= limit(MOST_MEMBERS):
                self.warnings.append(f"{self._source.name}: holds more than {MOST_MEMBERS:,} files: the first are used")
                break
            place = _within(inside, name)
            if blocks is None or place is None:
                passed.append(name)
                continue
            try:
                place.parent.mkdir(parents=True, exist_ok=True)
                out = place.open("xb")
            except OSError:  # a repeated name, a file instead of a folder, a name that is too long
                passed.append(name)
                continue
            with out:
                try:
                    if not self._copy(blocks, out):
                        return
                except _NOT_READ:
                    passed.append(name)
                except _DAMAGED:  # the other members of a zip archive are intact
                    self.warnings.append(f"{self._source.name}: {name} is cut off or damaged")
        if passed:
            names = ", ".join(passed[:4]) + (" …" if len(passed) > 4 else "")
            self.warnings.append(
                f"{self._source.name}: links, names that lead out and the like are passed over: {names}"
            )


def unpacked(path: Path, *, archives: bool = True) -> Unpacked | None:
    """Unpack a file; return None if it is not packed, or if the readers unpack it themselves.

    Without `archives` they are left as they are, as those are that torch.save writes.
    """
    begins = _beginning(path)
    packed = begins.startswith((_XZ, _BZIP2)) or (begins.startswith(_GZIP) and _is_packed_again(path))
    archive = archives and _is_archive(begins) and not (begins.startswith(_ZIP) and _is_checkpoint(path))
    return Unpacked(path, archives=archives) if packed or archive else None


def _is_archive(begins: bytes) -> bool:
    return begins.startswith(_ZIP) or begins[_TAR_AT:].startswith(_TAR)


def _is_checkpoint(path: Path) -> bool:
    try:
        with open_file(path) as file, zipfile.ZipFile(file) as archive:
            return any(name.endswith("/data.pkl") for name in archive.namelist())
    except _DAMAGED:
        return False


def _beginning(path: Path) -> bytes:
    with open_file(path) as file:
        return file.read(_TAR_AT + len(_TAR))


def _is_packed_again(path: Path) -> bool:
    """Return whether a gzip file holds an archive or another packed file."""
    with open_file(path) as file:
        begins = gunzipped(file.read(1 << 12), 1 << 10)
    return begins.startswith((_GZIP, _XZ, _BZIP2, _ZIP)) or begins[_TAR_AT:].startswith(_TAR)


def _unpacked(file: IO[bytes], make: Callable[[], Any]) -> Iterator[bytes]:
    """Yield the unpacked blocks of a file; raise one of _DAMAGED."""
    unpacker = make()
    data = file.read(_BLOCK)
    while data:
        while not unpacker.eof:
            block = unpacker.decompress(data, _BLOCK)
            data = getattr(unpacker, "unconsumed_tail", b"")  # the other unpackers buffer it themselves
            if block:
                yield block
            if not data and getattr(unpacker, "needs_input", not block):
                data = file.read(_BLOCK)
                if not data:
                    raise EOFError
        data = (unpacker.unused_data or file.read(_BLOCK)).lstrip(b"\0")
        unpacker = make()


def _of_zip(path: Path) -> Iterator[tuple[str, Iterator[bytes] | None]]:
    with open_file(path) as file, zipfile.ZipFile(file) as archive:
        for one in archive.infolist():
            if not one.is_dir():
                kind = stat.S_IFMT(one.external_attr >> 16)
                yield one.filename, None if kind not in (0, stat.S_IFREG) else _of_member(partial(archive.open, one))


class _Careful:
    """A file that limits the size of a read: a tar header may claim any length."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.seek, self.tell = file, file.seek, file.tell

    def read(self, size: int) -> bytes:
        if not 0 <= size <= MOST_TEXT:
            raise tarfile.ReadError("a header larger than any real one")
        return self._file.read(size)


def _of_tar(path: Path) -> Iterator[tuple[str, Iterator[bytes] | None]]:
    with open_file(path) as file, tarfile.open(fileobj=_Careful(file), mode="r:") as archive:  # type: ignore[call-overload]
        for one in archive:
            archive.members.clear()  # else all members stay in memory
            if not one.isdir():
                yield one.name, None if not one.isreg() else _of_member(partial(archive.extractfile, one))
        file.seek(archive.offset)
        if file.read(tarfile.BLOCKSIZE).strip(b"\0"):  # an invalid header: tarfile takes it for the end
            raise tarfile.ReadError


def _of_member(opened: Callable[[], Any]) -> Iterator[bytes]:
    with opened() as member:
        while block := member.read(_BLOCK):
            yield block


def _within(folder: Path, name: str) -> Path | None:
    """Return the path of a member within a folder; None if its name leads out of it or is empty."""
    parts = PurePosixPath(name).parts
    odd = not parts or PurePosixPath(name).is_absolute() or ".." in parts or "\\" in name or "\0" in name
    return None if odd or len(parts) > 32 else folder.joinpath(*parts)


def top(folder: Path) -> Path:
    """Return the folder with an archive's contents; if they are all in one subfolder, that one."""
    while len(below := list(folder.iterdir())) == 1 and below[0].is_dir():
        folder = below[0]
    return folder
