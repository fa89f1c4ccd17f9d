"""Readings of samplers become one table: what is no number, or no reading, is left out."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlprof.errors import DlprofError
from dlprof.read.samples import read_samples
from dlprof.read.sources import SOURCES

SAMPLERS = {s.name: s for s in SOURCES if s.name in ("gpu", "host", "processes")}
LINE = '{"at_ns":%d,"perf_ns":5,"power_w":%s,"energy_j":7}\n'


def test_each_number_is_a_row_and_the_clocks_are_none(tmp_path: Path) -> None:
    path = tmp_path / "gpu.jsonl"
    path.write_text(LINE % (10, "1.5") + LINE % (20, "null") + '{"at_ns":30,"power_w":"3","busy":true,"cores":[1]}\n')
    frame, warnings = read_samples(path, "gpu")
    rows = [(m, int(at), float(v)) for m, at, v in zip(frame["metric"], frame["at_ns"], frame["value"], strict=True)]
    # Not measured is no row: neither a null, nor a word, nor a zero in its place.
    assert rows == [("power_w", 10, 1.5), ("energy_j", 10, 7.0), ("energy_j", 20, 7.0)]
    assert set(frame["source"]) == {"gpu"}
    assert warnings == ()


def test_a_cut_last_line_is_dropped_and_other_bad_ones_are_told_of(tmp_path: Path) -> None:
    path = tmp_path / "gpu.jsonl"
    path.write_text(LINE % (10, "1") + '{"power_w":3}\n{"at_ns":-1}\nnonsense\n' + LINE % (20, "2") + '{"at_ns":30,"po')
    frame, warnings = read_samples(path, "gpu")
    assert list(frame.loc[frame["metric"] == "power_w", "at_ns"]) == [10, 20]
    assert warnings == ("gpu.jsonl: 3 lines are no samples and are left out",)


def test_a_file_that_is_no_log_of_samples_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "gpu.jsonl"
    path.write_text("a,b\n1,2\n3,4\n")
    with pytest.raises(DlprofError, match="none of its lines"):
        read_samples(path, "gpu")
    path.write_text("")
    assert len(read_samples(path, "gpu")[0]) == 0


@pytest.mark.parametrize(
    ("sampler", "line", "metrics"),
    [
        ("gpu", '"power_w":612.3,"clock_reasons_bits":4', {"power_w": 612.3, "clock_reasons_bits": 4.0}),
        ("host", '"memory_used_bytes":7', {"memory_used_bytes": 7.0}),
        ("processes", '"cpu_s":2.5,"children":2', {"cpu_s": 2.5, "children": 2.0}),
    ],
)
def test_the_samples_say_whose_they_are(tmp_path: Path, sampler: str, line: str, metrics: dict[str, float]) -> None:
    path = tmp_path / SAMPLERS[sampler].files[0]
    path.write_text('{"at_ns":10,"perf_ns":1,' + line + "}\n")
    frame = SAMPLERS[sampler].read(path).tables["samples"]
    assert set(frame["source"]) == {sampler}
    assert dict(zip(frame["metric"], frame["value"], strict=True)) == metrics


def test_the_cores_are_counted_and_the_busiest_is_told(tmp_path: Path) -> None:
    (tmp_path / "host.jsonl").write_text(
        '{"at_ns":10,"perf_ns":1,"cpu_share":0.5,"core_percent":[100,3,91,90]}\n{"at_ns":20,"core_percent":[]}\n'
    )
    frame = SAMPLERS["host"].read(tmp_path / "host.jsonl").tables["samples"]
    assert set(frame["source"]) == {"host"}
    assert dict(zip(frame["metric"], frame["value"], strict=True)) == {
        "cpu_share": 0.5,
        "cores": 4.0,
        "cpu_cores": 2.84,
        "busy_cores": 2.0,
        "busiest_core_share": 1.0,
    }
