"""Packed files and archives: what they hold is read, within its folder and the limits; what is not read is named."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import stat
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from dlprof.errors import DlprofError
from dlprof.read import limits
from dlprof.read.run import open_run
from dlprof.read.unpacking import unpacked
from tests.fixtures import runs, traces

TRACE = traces.dump(traces.training(rank=None))


def tarred(files: Mapping[str, bytes], mode: str = "w") -> bytes:
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode=mode) as archive:  # type: ignore[call-overload]
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return held.getvalue()


def zipped(files: Mapping[str, bytes]) -> bytes:
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return held.getvalue()


RANKS = {f"job/rank{n}.json": TRACE for n in range(2)}
PACKED: dict[str, tuple[bytes, list[int]]] = {
    "rank3.json.xz": (lzma.compress(TRACE), [0]),
    "rank3.json.bz2": (bz2.compress(TRACE), [0]),
    "rank3.json.gz.gz": (gzip.compress(gzip.compress(TRACE)), [0]),
    "glued.json.xz": (lzma.compress(TRACE[:5_000]) + lzma.compress(TRACE[5_000:]), [0]),
    "job.zip": (zipped(RANKS), [0, 1]),
    "job.tar": (tarred(RANKS), [0, 1]),
    "job.tar.gz": (tarred(RANKS, "w:gz"), [0, 1]),
    "job.tar.xz": (tarred(RANKS, "w:xz"), [0, 1]),
    "job.tbz2": (tarred(RANKS, "w:bz2"), [0, 1]),
    "packed.zip": (zipped({"rank1.json.xz": lzma.compress(TRACE), "rank0.json.gz": gzip.compress(TRACE)}), [0, 1]),
}


@pytest.mark.parametrize("name", PACKED)
def test_what_is_packed_is_read(tmp_path: Path, name: str) -> None:
    data, ranks = PACKED[name]
    (tmp_path / name).write_bytes(data)
    run = open_run(tmp_path / name)
    assert [rank.index for rank in run.ranks] in (ranks, [3])
    assert run.path == tmp_path / name
    for rank in run.ranks:
        (file,) = rank.files.values()
        opened = file.read_bytes()
        assert (gzip.decompress(opened) if file.suffix == ".gz" else opened) == TRACE


def test_packed_traces_of_a_folder_are_read_and_archives_in_it_are_named(tmp_path: Path) -> None:
    (tmp_path / "rank0.json.xz").write_bytes(lzma.compress(TRACE))
    (tmp_path / "rank1.json.bz2").write_bytes(bz2.compress(TRACE))
    (tmp_path / "more.zip").write_bytes(PACKED["job.zip"][0])
    run = open_run(tmp_path)
    assert [rank.index for rank in run.ranks] == [0, 1]
    assert ["read where it is named itself" in one.left for one in run.taken if one.left] == [True]


def test_a_packed_recording_is_opened_as_its_folder_is(tmp_path: Path) -> None:
    runs.recorded(tmp_path / "run", (traces.training(world_size=1), [], runs.CPU))
    with tarfile.open(tmp_path / "run.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "run", "runs/run")
    run = open_run(tmp_path / "run.tar.gz")
    assert (run.recorded, run.command) == (True, ("train.py",))
    assert run.ranks[0].facts["host"] == "node-1"


def hostile_tar() -> bytes:
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w") as archive:
        for name, kind, target in (
            ("out", tarfile.SYMTYPE, "/etc"),
            ("out/passwd.json", tarfile.REGTYPE, ""),
            ("hard", tarfile.LNKTYPE, "/etc/passwd"),
            ("pipe", tarfile.FIFOTYPE, ""),
            ("../above.json", tarfile.REGTYPE, ""),
            ("a/../../above.json", tarfile.REGTYPE, ""),
            ("/tmp/absolute.json", tarfile.REGTYPE, ""),
            ("twice.json", tarfile.REGTYPE, ""),
            ("twice.json", tarfile.REGTYPE, ""),
            ("twice.json/below.json", tarfile.REGTYPE, ""),
            ("x" * 300, tarfile.REGTYPE, ""),
            ("rank0.json", tarfile.REGTYPE, ""),
        ):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, target
            info.size = len(TRACE) if kind == tarfile.REGTYPE else 0
            archive.addfile(info, io.BytesIO(TRACE))
    return held.getvalue()


def hostile_zip() -> bytes:
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w") as archive:
        link = zipfile.ZipInfo("out")
        link.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(link, "/etc")
        for name in ("../above.json", "/tmp/absolute.json", "..\\above.json", "out/passwd.json", "rank0.json"):
            archive.writestr(name, TRACE)
    return held.getvalue()


@pytest.mark.parametrize(("made", "files"), [(hostile_tar, 3), (hostile_zip, 2)])
def test_nothing_of_an_archive_leads_out_of_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: Callable[[], bytes], files: int
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "job.bin").write_bytes(made())
    found = unpacked(tmp_path / "job.bin")
    assert found is not None
    every = [p for p in tmp_path.rglob("*") if p.is_symlink() or not p.is_dir()]
    assert [p for p in every if p.is_symlink() or not p.is_file()] == []
    assert [p.name for p in every if found.path not in p.parents] == ["job.bin"]
    assert len(every) == files + 1
    (warning,) = found.warnings
    assert "passed over: " in warning


@pytest.mark.parametrize("name", ["rank3.json.xz", "job.tar.gz", "job.zip"])
def test_what_unpacks_to_more_than_the_limit_is_cut_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(limits, "LEAST_UNPACKED", len(TRACE) - 100)
    monkeypatch.setattr(limits, "MOST_UNPACKED", 1)
    (tmp_path / name).write_bytes(PACKED[name][0])
    found = unpacked(tmp_path / name)
    assert found is not None
    held = [found.path] if found.path.is_file() else [p for p in found.path.rglob("*") if p.is_file()]
    assert sum(p.stat().st_size for p in held) <= len(TRACE) - 100
    assert "unpacks to more than is read" in found.warnings[0]


def test_no_more_files_than_the_limit_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dlprof.read.unpacking.MOST_MEMBERS", 5)
    (tmp_path / "many.tar").write_bytes(tarred({f"{n}.json": b"{}" for n in range(50)}))
    found = unpacked(tmp_path / "many.tar")
    assert found is not None
    assert len(list(found.path.iterdir())) == 5
    assert "holds more than 5 files" in found.warnings[0]


def test_a_header_that_claims_gigabytes_is_not_read(tmp_path: Path) -> None:
    header = tarfile.TarInfo("pax")
    header.type, header.size = tarfile.XHDTYPE, 6 << 30
    sound = tarred({"rank0.json": TRACE})[: 512 + (len(TRACE) + 511) // 512 * 512]
    (tmp_path / "job.tar").write_bytes(sound + header.tobuf())
    run = open_run(tmp_path / "job.tar")
    assert [rank.index for rank in run.ranks] == [0]
    assert "cut off or damaged" in run.warnings[0]


@pytest.mark.parametrize("name", [n for n in PACKED if n.startswith("job") or n == "rank3.json.xz"])
@pytest.mark.parametrize("how", ["cut", "damaged"])
def test_what_is_broken_gives_what_comes_before_or_one_line(tmp_path: Path, name: str, how: str) -> None:
    data = PACKED[name][0]
    half = len(data) // 2
    broken = data[:half] if how == "cut" else data[:half] + bytes(255 - b for b in data[half:])
    (tmp_path / name).write_bytes(broken)
    try:
        said = open_run(tmp_path / name).warnings[0]
    except DlprofError as e:
        said = str(e)
    assert "cut off or damaged" in said
    assert "dlprof-unpacked" not in said
    assert "\n" not in said


def test_a_damaged_member_of_a_zip_archive_costs_no_other(tmp_path: Path) -> None:
    data = bytearray(zipped(RANKS))
    data[200] ^= 255  # within the first member
    (tmp_path / "job.zip").write_bytes(data)
    run = open_run(tmp_path / "job.zip")
    assert 1 in [rank.index for rank in run.ranks]
    assert "job/rank0.json is cut off or damaged" in run.warnings[0]


@pytest.mark.parametrize(
    ("magic", "hint"),
    [
        (b"\x28\xb5\x2f\xfd", "zstd -d"),
        (b"7z\xbc\xaf\x27\x1c", "7z x"),
        (b"Rar!\x1a\x07", "unrar x"),
        (b"\x04\x22\x4d\x18", "lz4 -d"),
        (zipped({"model/data.pkl": b"x"}), "torch.save writes checkpoints"),
    ],
)
def test_what_is_not_unpacked_says_what_to_do(tmp_path: Path, magic: bytes, hint: str) -> None:
    (tmp_path / "rank0.json").write_bytes(magic + bytes(600))
    with pytest.raises(DlprofError, match=hint):
        open_run(tmp_path / "rank0.json")
