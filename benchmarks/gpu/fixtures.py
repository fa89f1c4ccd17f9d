"""Recordings that come home from a GPU as test data: without what names a machine or a person, packed and small.

A kept recording is a run folder with what dlprof recorded in it, and oracle.json beside: the figures of the check that
made it, how each was measured, and which of benchmarks.gpu.judges holds them against a report.
"""

from __future__ import annotations

import getpass
import gzip
import io
import json
import os
import re
import shutil
import sys
import tarfile
import tempfile
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.jobs import ROOT
from benchmarks.gpu.machine import label

# A longer trace is no test data: it is left out, and a smaller job should be recorded instead.
MOST_TRACE_BYTES = 8 << 20

# So that they fit wherever eight files of 16 MB do, beside the page, the JSON, the log and whatever else is wanted.
MOST_ARCHIVE_BYTES = 15_000_000
MOST_ARCHIVES = 4

# Of the environment, what shapes training and cannot hold a name or a place.
_ENVIRONMENT = (
    "CUDA_LAUNCH_BLOCKING",
    "NCCL_DEBUG",
    "NCCL_MULTI_RANK_GPU_ENABLE",
    "OMP_NUM_THREADS",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
)

# Names that are no names: everybody's.
_NOBODY = {"root", "user", "ubuntu", "nobody", "localhost"}

# A name so short stands within words that have nothing to do with it: only where a host is told is it replaced.
_LEAST_NAME = 5

_HOST_FIELD = re.compile(r'("(?:host|host_name|hostname|hostName)"\s*:\s*)"[^"]*"')


def keep(run: Path, to: Path, oracle: Mapping[str, Any], machine: Mapping[str, Any]) -> None:
    """Copy a run folder, scrubbed, and write its oracle beside it.

    Raises ValueError where a trace is too large, or where something that names the machine is still in what was copied:
    then nothing is left there.
    """
    for trace in run.glob("ranks/*/trace.json*"):
        if trace.stat().st_size > MOST_TRACE_BYTES:
            raise ValueError(
                f"its trace has {trace.stat().st_size / 2**20:.1f} MiB, more than {MOST_TRACE_BYTES >> 20}"
            )
    known = secrets(machine, run.parent) | _told(run)
    shutil.rmtree(to, ignore_errors=True)
    try:
        for path in _wanted(run):
            target = to / "/".join(_place(path.relative_to(run)))
            target.parent.mkdir(parents=True, exist_ok=True)
            _write(target, scrub(path.name, _read(path), known))
        whole = {**oracle, "machine": about(machine)}
        to.mkdir(parents=True, exist_ok=True)
        _write(to / "oracle.json", scrub("oracle.json", json.dumps(whole, indent=1), known))
        if left := leaks(to, known):
            raise ValueError(f"it still names {', '.join(left)}")
    except BaseException:
        shutil.rmtree(to, ignore_errors=True)
        raise


def secrets(machine: Mapping[str, Any], work: Path) -> dict[str, str]:
    """Return what must not come home, and what stands for it: hosts, people, places, and the GPU's own number.

    `work` is the folder in which the checks work.
    """
    host, user = os.uname().nodename, _user()
    found = {host: "host", host.partition(".")[0]: "host"}
    found |= {user: "somebody"} if user not in _NOBODY else {}
    # A place that is everybody's (/usr, /tmp, /root) names nobody; it is replaced all the same, but for "/".
    found |= {str(ROOT): "repository", str(Path.home()): "home", str(Path.cwd()): "here", sys.prefix: "python"}
    found |= {sys.base_prefix: "python", str(work.absolute()): "work", tempfile.gettempdir(): "tmp"}
    for n, gpu in enumerate(machine.get("torch", {}).get("gpus", ())):
        bare = str(gpu.get("uuid") or "").removeprefix("GPU-")
        found |= {bare: f"00000000-0000-0000-0000-{n:012d}"} if bare else {}
    return {secret: name for secret, name in found.items() if len(secret) > 1 and secret != name}


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):  # a container's user may have a number and no name
        return ""


def _told(run: Path) -> dict[str, str]:
    """Return what a run's own files name: its hosts, the boot of each, and where it was started."""
    found = {path.name: "host" for path in run.glob("hosts/*")}
    for path in [run / "run.json", *run.glob("ranks/*/facts.json")]:
        if path.exists():
            told = json.loads(path.read_text())
            found |= {str(host): "host" for host in (*told.get("hosts", ()), told.get("host"))}
            found |= {str(told.get("boot")): "00000000-0000-0000-0000-000000000000", str(told.get("cwd")): "here"}
    return {secret: name for secret, name in found.items() if secret not in ("", "None", name)}


def scrub(name: str, text: str, known: Mapping[str, str]) -> str:
    """Return the text of one recorded file without what must not come home."""
    if name == "facts.json":
        told = json.loads(text)
        told["env"] = {k: v for k, v in (told.get("env") or {}).items() if k in _ENVIRONMENT}
        text = json.dumps(told)
    if name == "run.json":
        told = json.loads(text)
        told["hosts"] = ["host" for _ in told.get("hosts", ())]
        text = json.dumps(told)
    text = _HOST_FIELD.sub(r'\1"host"', text)
    # The longest first: one place may lie in another.
    for secret in sorted(known, key=len, reverse=True):
        if _is_searched(secret):
            text = re.sub(_whole(secret), known[secret], text)
    return text


def leaks(folder: Path, known: Mapping[str, str]) -> list[str]:
    """List what is still named in a folder's files or their names: the kind of it, not the thing itself."""
    texts = {path.relative_to(folder).as_posix(): _read(path) for path in folder.rglob("*") if path.is_file()}
    found = set()
    for secret, stands_for in known.items():
        if _is_searched(secret):
            search = re.compile(_whole(secret))
            found |= {f"{stands_for} (in {name})" for name, text in texts.items() if search.search(name + "\n" + text)}
    return sorted(found)


def about(machine: Mapping[str, Any]) -> dict[str, Any]:
    """Return what may be told of a machine: models and versions."""
    torch = machine.get("torch", {})
    driver = machine.get("driver")
    first = driver[0] if isinstance(driver, list) and driver else {}
    return {
        "gpus": [gpu.get("name") for gpu in torch.get("gpus", ())],
        "driver": first.get("driver_version"),
        "settings": {key: first.get(key) for key in ("memory.total", "compute_mode", "power.limit", "clocks.max.sm")},
        **{key: torch.get(key) for key in ("python", "torch", "cuda", "cudnn", "nccl")},
    }


def pack(kept: Sequence[Path], out: Path, device: str) -> tuple[list[Path], list[str]]:
    """Pack kept recordings into archives named after the device; return these, and the recordings left out.

    As few archives as their size allows, MOST_ARCHIVES at most. What was there under such names is replaced.
    """
    stem = f"recordings-{label(device)}"
    for old in out.glob(f"{stem}-*.tar.gz"):
        old.unlink()
    groups: list[list[tuple[Path, bytes]]] = []
    left_out = []
    for folder in kept:
        packed = _packed([folder])
        size = len(packed)
        if size > MOST_ARCHIVE_BYTES:
            left_out.append(folder.name)
            continue
        place = next((g for g in groups if sum(len(p) for _, p in g) + size <= MOST_ARCHIVE_BYTES), None)
        if place is None and len(groups) == MOST_ARCHIVES:
            left_out.append(folder.name)
        elif place is None:
            groups.append([(folder, packed)])
        else:
            place.append((folder, packed))
    paths = []
    for number, group in enumerate(groups, start=1):
        path = out / f"{stem}-{number}.tar.gz"
        part = out / f".{path.name}.part"
        part.write_bytes(_packed([folder for folder, _ in group]))
        part.replace(path)
        paths.append(path)
    return paths, left_out


def archives(folder: Path) -> list[Path]:
    """List the archives of recordings in a folder, in their order."""
    return sorted(folder.glob("recordings-*.tar.gz"), key=lambda path: (len(path.name), path.name))


def unpack(archive: Path, to: Path) -> list[Path]:
    """Unpack an archive and return the folders of its recordings; raise ValueError where a name leads elsewhere."""
    with tarfile.open(archive) as tar:
        for member in tar.getmembers():
            if not member.isfile() or member.name.startswith("/") or ".." in Path(member.name).parts:
                raise ValueError(f"{archive.name} holds {member.name!r}, which is no file of a recording")
            target = to / member.name
            target.parent.mkdir(parents=True, exist_ok=True)
            content = tar.extractfile(member)
            assert content is not None
            target.write_bytes(content.read())
    return sorted(path.parent for path in to.glob("*/oracle.json"))


def _packed(folders: Sequence[Path]) -> bytes:
    """Return folders as one .tar.gz, the same bytes for the same content: no owner, no time."""
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w") as tar:
        for folder in folders:
            for path in sorted(p for p in folder.rglob("*") if p.is_file()):
                info = tarfile.TarInfo(f"{folder.name}/{path.relative_to(folder).as_posix()}")
                info.size = path.stat().st_size
                info.mode = 0o644
                with path.open("rb") as file:
                    tar.addfile(info, file)
    return gzip.compress(plain.getvalue(), mtime=0)


def _wanted(run: Path) -> list[Path]:
    """List the files of a run that are kept: what was recorded, not what was made of it."""
    found = [run / "run.json", *run.glob("ranks/*/*.json"), *run.glob("ranks/*/*.jsonl")]
    found += [*run.glob("ranks/*/trace.json.gz"), *run.glob("hosts/*/samples.jsonl"), *run.glob("hosts/*/stacks.jsonl")]
    return sorted(path for path in set(found) if path.is_file())


def _place(path: Path) -> tuple[str, ...]:
    """Return where a file of a run lies in what is kept: the folder of a host bears no name."""
    return ("hosts", "host", *path.parts[2:]) if path.parts[0] == "hosts" else path.parts


def _is_searched(secret: str) -> bool:
    return len(secret) >= _LEAST_NAME or "/" in secret


def _whole(secret: str) -> str:
    """Return a pattern of a secret that stands by itself, and not within a longer word."""
    first = r"(?<![A-Za-z0-9])" if secret[0].isalnum() else ""
    return f"{first}{re.escape(secret)}(?![A-Za-z0-9])"


# Between the stacks of two bursts as text, and between the beginning of a burst's line and its stacks.
_BURST, _STACKS = "\x1d", "\x1e"
_PACKED = re.compile(r'(.*)"gzip":"([A-Za-z0-9+/=]*)"}')


def _read(path: Path) -> str:
    raw = path.read_bytes()
    if path.name == "stacks.jsonl":
        bursts = [found.groups() for line in raw.decode().splitlines() if (found := _PACKED.fullmatch(line))]
        return _BURST.join(f"{begins}{_STACKS}{gzip.decompress(b64decode(text)).decode()}" for begins, text in bursts)
    return (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode(errors="surrogateescape")


def _write(path: Path, text: str) -> None:
    raw = text.encode(errors="surrogateescape")
    if path.name == "stacks.jsonl":
        bursts = [burst.partition(_STACKS) for burst in filter(None, text.split(_BURST))]
        packed = [(begins, b64encode(gzip.compress(stacks.encode(), mtime=0)).decode()) for begins, _, stacks in bursts]
        raw = "".join(f'{begins}"gzip":"{data}"}}\n' for begins, data in packed).encode()
    path.write_bytes(gzip.compress(raw, mtime=0) if path.suffix == ".gz" else raw)
