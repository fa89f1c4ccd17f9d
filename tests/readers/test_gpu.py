"""gpu.jsonl becomes samples of the rank's GPU."""

from __future__ import annotations

from pathlib import Path

from dlprof.readers.gpu import read


def test_the_samples_say_that_they_are_of_the_gpu(tmp_path: Path) -> None:
    (tmp_path / "gpu.jsonl").write_text('{"at_ns":10,"perf_ns":1,"power_w":612.3,"clock_reasons_bits":4}\n')
    frame = read(tmp_path / "gpu.jsonl").tables["samples"]
    assert set(frame["source"]) == {"gpu"}
    assert dict(zip(frame["metric"], frame["value"], strict=True)) == {"power_w": 612.3, "clock_reasons_bits": 4.0}
