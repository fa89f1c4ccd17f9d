"""What a first look at a file tells of whose trace it is, and of what is none."""

import json
from pathlib import Path

from dlprof.read.kineto import headers
from tests.fixtures import traces


def test_peek_tells_rank_and_world_from_the_head_of_a_large_file(tmp_path: Path) -> None:
    made = traces.training(rank=5, world_size=16)
    data = traces.dump(made) + b" " * (1 << 20)
    for name in ("a.json", "a.json.gz"):
        path = traces.write(tmp_path / name, data)
        assert headers.peek(path) == {"is_trace": True, "rank": 5, "world_size": 16, "host": "node-1"}


def test_peek_sees_past_a_list_of_groups_longer_than_what_it_reads(tmp_path: Path) -> None:
    made = traces.training(rank=777, world_size=4096)
    groups = [{"pg_name": str(i), "ranks": list(range(4096))} for i in range(20)]
    made["distributedInfo"]["pg_config"] = groups
    data = traces.dump(made)
    assert data.index(b"traceEvents") > headers.PEEK_BYTES
    looked = headers.peek(traces.write(tmp_path / "a.json", data))
    assert {k: looked[k] for k in ("is_trace", "rank", "world_size")} == {
        "is_trace": True,
        "rank": 777,
        "world_size": 4096,
    }


def test_peek_takes_the_rank_of_the_name_where_the_file_says_none(tmp_path: Path) -> None:
    made = traces.trace(traces.op("a", 0, 1), rank=None, host="")
    assert headers.peek(traces.write(tmp_path / "rank-34.json", made)) == {"is_trace": True, "rank": 34}
    assert headers.peek(traces.write(tmp_path / "some.json", made)) == {"is_trace": True}
    listed = traces.write(tmp_path / "worker2.json", made, layout="list")
    assert headers.peek(listed) == {"is_trace": True, "rank": 2}
    made["traceEvents"][0] = {"args": {"a": {}}, **made["traceEvents"][0], "args2": 1}
    assert headers.peek(traces.write(tmp_path / "worker3.json", made, layout="list"))["rank"] == 3
    own = traces.write(tmp_path / "rank-34.json", traces.trace(rank=1))
    assert headers.peek(own)["rank"] == 1


def test_peek_knows_what_is_no_trace(tmp_path: Path) -> None:
    for content in ({"format": 1, "run": {}}, {"schemaVersion": 2, "layers": [{}]}, [1, 2], [{"a": 1}], "x", 5):
        path = traces.write(tmp_path / "rank-3.json", json.dumps(content).encode())
        assert headers.peek(path) == {"is_trace": False}
