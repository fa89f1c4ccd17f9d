"""The lines of the CUDA allocator, whole, cut off and of another PyTorch."""

import json
from pathlib import Path

import pytest

from dlprof.errors import DlprofError
from dlprof.readers import memory
from dlprof.tables import MEMORY

LINE = dict(zip(MEMORY, range(11), strict=True))


def test_rows_are_in_order_of_time_and_what_was_not_told_is_marked(tmp_path: Path) -> None:
    path = tmp_path / "memory.jsonl"
    old = {**LINE, "at_ns": 9, "device_allocs": None}
    del old["ooms"]
    text = "".join(json.dumps(line) + "\n" for line in (old, LINE))
    path.write_text(text + '{"at_ns": 5, "step"')
    reading = memory.read(path)
    assert reading.tables["memory"].to_dict("records") == [LINE, {**old, "device_allocs": -1, "ooms": -1}]
    assert reading.warnings == ()
    path.write_text("1\n2\n")
    with pytest.raises(DlprofError, match="none of its lines"):
        memory.read(path)
