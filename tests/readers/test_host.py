"""host.jsonl becomes samples of the host, its cores told by what a table can hold."""

from __future__ import annotations

from pathlib import Path

from dlprof.readers.host import read


def test_the_cores_are_counted_and_the_busiest_is_told(tmp_path: Path) -> None:
    (tmp_path / "host.jsonl").write_text(
        '{"at_ns":10,"perf_ns":1,"cpu_share":0.5,"core_percent":[100,3,91,90]}\n{"at_ns":20,"core_percent":[]}\n'
    )
    frame = read(tmp_path / "host.jsonl").tables["samples"]
    assert set(frame["source"]) == {"host"}
    assert dict(zip(frame["metric"], frame["value"], strict=True)) == {
        "cpu_share": 0.5,
        "cores": 4.0,
        "cpu_cores": 2.84,
        "busy_cores": 2.0,
        "busiest_core_share": 1.0,
    }
