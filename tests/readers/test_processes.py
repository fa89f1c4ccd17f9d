"""processes.jsonl becomes samples of the rank's processes."""

from __future__ import annotations

from pathlib import Path

from dlprof.readers.processes import read


def test_the_samples_say_that_they_are_of_the_processes(tmp_path: Path) -> None:
    (tmp_path / "processes.jsonl").write_text('{"at_ns":10,"perf_ns":1,"cpu_s":2.5,"children":2}\n')
    frame = read(tmp_path / "processes.jsonl").tables["samples"]
    assert set(frame["source"]) == {"processes"}
    assert dict(zip(frame["metric"], frame["value"], strict=True)) == {"cpu_s": 2.5, "children": 2.0}
