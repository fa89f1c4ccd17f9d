"""Exports and reports: recognised by content, exported where nsys is there, and their ranks numbered."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path

import pytest

from dlprof.errors import DlprofError
from dlprof.read.formats import format_named
from dlprof.read.nsys import format as of_nsys
from dlprof.read.run import open_run
from tests.fixtures import exports
from tests.fixtures.exports import HOST, PID, kernel, text

REPORT = b"NVIDIA Tegra Profiler Report 1.\n and more\0\1"


def one(path: Path, device: int = 0, pid: int = PID) -> Path:
    kernels = [kernel(1, 0, 5, device=device, pid=pid)]
    return exports.tables(path, StringIds=[text(1, "k")], CUPTI_ACTIVITY_KIND_KERNEL=kernels)


def test_a_folder_of_exports_is_one_run_numbered_by_their_names(tmp_path: Path) -> None:
    for rank in (3, 1):
        one(tmp_path / f"report_rank{rank}.anything", device=rank)
    exports.tables(tmp_path / "songs.db", songs=[{"title": "a"}])
    (tmp_path / "notes.sqlite").write_text("no database")
    run = open_run(tmp_path)
    assert [(rank.index, rank.files["nsys"].name) for rank in run.ranks] == [
        (1, "report_rank1.anything"),
        (3, "report_rank3.anything"),
    ]
    assert {taken.path.name for taken in run.taken if not taken.ranks} == {"songs.db", "notes.sqlite"}


def test_the_processes_of_a_file_are_its_ranks_and_each_is_read_for_itself(tmp_path: Path) -> None:
    second = HOST | 5 << 24
    kernels = [kernel(1, 0, 5), kernel(1, 6, 9, device=1, pid=second), kernel(1, 9, 12, device=1, pid=second)]
    path = exports.tables(tmp_path / "x", StringIds=[text(1, "k")], CUPTI_ACTIVITY_KIND_KERNEL=kernels)
    packed = tmp_path / "y.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    for file in (path, packed):
        run = open_run(file)
        assert [rank.pieces["nsys"] for rank in run.ranks] == [str(PID), str(second)]
        read = [format_named("nsys").tables_of(file, rank.pieces["nsys"]).tables["spans"] for rank in run.ranks]
        assert [len(spans) for spans in read] == [1, 2]


def test_traces_come_before_exports_beside_them(tmp_path: Path) -> None:
    shutil.copytree(exports.traced(tmp_path / "traces", 1), tmp_path / "both")
    one(tmp_path / "both/x.sqlite")
    run = open_run(tmp_path / "both")
    assert [list(rank.files) for rank in run.ranks] == [["torch_trace"]]
    assert [taken.path.name for taken in run.taken if not taken.ranks] == ["x.sqlite"]


def test_a_report_needs_nsys_or_its_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    report = tmp_path / "x.nsys-rep"
    report.write_bytes(REPORT)
    for path in (report, tmp_path):
        with pytest.raises(DlprofError, match="nsys export --type sqlite"):
            open_run(path)
    one(tmp_path / "x.sqlite")
    assert [rank.files["nsys"].name for rank in open_run(tmp_path).ranks] == ["x.sqlite"]
    (rank,) = open_run(report).ranks
    assert len(format_named("nsys_report").tables_of(report, rank.pieces["nsys_report"]).tables["spans"]) == 1


def test_a_report_is_exported_into_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for nsys copies an export: this tests how nsys is called, not what it writes."""
    monkeypatch.setattr(of_nsys, "_made", {})
    one(tmp_path / "export")
    (tmp_path / "reports").mkdir()
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin/nsys"
    program.write_text(
        f'#!/bin/sh\necho >> "{tmp_path}/calls"\n'
        f'for w; do case $w in --output=*) cp "{tmp_path}/export" "${{w#*=}}";; esac; done\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/bin:/usr/bin")
    report = tmp_path / "reports/x.nsys-rep"
    report.write_bytes(REPORT)
    for _ in range(2):
        run = open_run(report)
        reading = format_named("nsys_report").tables_of(report, run.ranks[0].pieces["nsys_report"])
        assert len(reading.tables["spans"]) == 1
    assert (tmp_path / "calls").read_text() == "\n"
    assert [path.name for path in (tmp_path / "reports").iterdir()] == ["x.nsys-rep"]
    program.write_text("#!/bin/sh\necho cannot >&2\nexit 4\n")
    with pytest.raises(DlprofError, match=r"\(4\): cannot"):
        format_named("nsys_report").tables_of(tmp_path / "reports/y.nsys-rep", "")


def test_what_the_tool_does_not_record_is_told(tmp_path: Path) -> None:
    lacks = format_named("nsys").lacks
    assert {"memory", "stacks", "samples"} <= set(lacks)


def test_each_recorded_rank_is_its_process_of_the_export_of_its_host(tmp_path: Path) -> None:
    second = HOST | 5 << 24
    (tmp_path / "hosts/node").mkdir(parents=True)
    kernels = [kernel(1, 0, 5), kernel(1, 6, 9, pid=second)]
    exports.tables(tmp_path / "hosts/node/nsys.sqlite", StringIds=[text(1, "k")], CUPTI_ACTIVITY_KIND_KERNEL=kernels)
    for rank, pid, host in ((0, 5, "node"), (1, 4000, "node"), (2, 7, "node"), (3, 5, "other")):
        (tmp_path / f"ranks/{rank:05d}").mkdir(parents=True)
        facts = {"rank": rank, "pid": pid, "host": host}
        (tmp_path / f"ranks/{rank:05d}/facts.json").write_text(json.dumps(facts))
    assert [rank.pieces.get("nsys") for rank in open_run(tmp_path).ranks] == [str(second), str(PID), None, None]
