"""Spans of a format that knows little: a table of the schema, in order, what is unknown as unknown."""

from dlprof import schema
from dlprof.read.foreign.chrome import spans_of


def test_rows_are_in_order_and_unknown_columns_say_so() -> None:
    spans = spans_of(
        {
            "lane": ["host:1", "host:1", "device:2"],
            "kind": ["op", "op", "kernel"],
            "name": ["b", "short", "k"],
            "start_ns": [5, 1, 1],
            "dur_ns": [1, 1, 9],
        }
    )
    assert list(spans["name"]) == ["k", "short", "b"]
    assert list(spans["lane"]) == ["device:2", "host:1", "host:1"]
    assert set(spans["bytes"]) == {-1}
    assert set(spans["collective"]) == {""}


def test_no_row_is_an_empty_table() -> None:
    spans = spans_of({name: [] for name in ("lane", "kind", "name", "start_ns", "dur_ns")})
    assert len(spans) == 0
    assert list(spans.columns) == list(schema.SPANS)
