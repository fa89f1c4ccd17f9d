"""The log that the workers of a rank write together."""

import json
from pathlib import Path

from dlprof.readers import fetches


def test_lines_of_several_workers_are_in_order_and_one_that_a_kill_cut_is_told(tmp_path: Path) -> None:
    path = tmp_path / "fetches.jsonl"
    of = [{"worker": w, "pid": 70 + w, "start_ns": start, "dur_ns": 4, "count": 1} for w, start in ((1, 9), (0, 5))]
    path.write_text(
        json.dumps(of[0]) + "\n" + '{"worker": 0, "pi' + json.dumps(of[1]) + "\n" + json.dumps(of[1]) + "\n"
    )
    reading = fetches.read(path)
    assert reading.tables["fetches"]["pid"].to_list() == [70, 71]
    assert reading.tables["fetches"]["cpu_ns"].to_list() == [-1, -1]
    assert reading.warnings == ("fetches.jsonl: 1 lines are no fetches and are left out",)
