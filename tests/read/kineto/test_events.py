"""One event and its arguments: what is written as text, has no encoding or is no JSON costs only itself."""

from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from dlprof.read.kineto import events
from tests.fixtures import traces
from tests.fixtures.reading import only, read, spans_of
from tests.fixtures.traces import BASE_NS


@pytest.mark.parametrize("ns", [0, 1, 999, 1_000_001, 4_316_168_582_958_775, 7_889_237_999_999_999])
def test_times_from_a_base_are_exact(tmp_path: Path, ns: int) -> None:
    data = traces.dump(traces.trace(traces.op("a", 0, 0)))
    data = data.replace(b'"ts": 0.0', b'"ts": %d.%03d' % divmod(ns, 1000)).replace(b'"dur": 0.0', b'"dur": 1234567.891')
    assert only(read(tmp_path, data).tables["spans"])["start_ns"] == BASE_NS + ns
    assert only(read(tmp_path, data).tables["spans"])["dur_ns"] == 1_234_567_891


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        (b"1694128201426556", 1_694_128_201_426_556_000),
        (b"1694128201426556.0", 1_694_128_201_426_556_000),
        (b"1694128201426556.123", 1_694_128_201_426_556_123),
        (b"1694128201426556.001", 1_694_128_201_426_556_001),
        (b"1694128201426556.999", 1_694_128_201_426_556_999),
        (b'"1694128201426556.123"', 1_694_128_201_426_556_123),
        (b"1.694128201426556123e15", 1_694_128_201_426_556_123),
    ],
)
def test_absolute_times_are_exact_beyond_float64(tmp_path: Path, text: bytes, ns: int) -> None:
    data = traces.dump(traces.trace(traces.op("a", 0, 7_001), base_ns=None)).replace(b'"ts": 0.0', b'"ts": ' + text)
    reading = read(tmp_path, data)
    assert (only(reading.tables["spans"])["start_ns"], only(reading.tables["spans"])["dur_ns"]) == (ns, 7_001)
    assert reading.warnings == ()


def test_values_written_as_text_are_numbers(tmp_path: Path) -> None:
    e = traces.copy(1000, 2000, 0) | {"ts": "1.0", "dur": "2.5", "pid": "0", "tid": "7"}
    e["args"] = {"device": "0", "stream": "7", "correlation": "12", "bytes": "4096"}
    row = only(spans_of(tmp_path, e))
    assert (row["start_ns"], row["dur_ns"], row["launch"], row["bytes"]) == (BASE_NS + 1000, 2500, 12, 4096)
    assert row["lane"] == "device:7"


@pytest.mark.parametrize("args", [None, [], "text", {"correlation": [1], "bytes": {"a": 1}, "stream": None}])
def test_args_of_an_unexpected_type_cost_only_themselves(tmp_path: Path, args: Any) -> None:
    e = traces.kernel("k", 0, 5) | {"args": args}
    odd: list[Any] = [["not an event"], 5, "text", {"ph": "X", "cat": "Trace", "name": 3, "pid": [], "dur": "x"}]
    made = traces.trace(e, traces.op("a", 10, 1))
    made["traceEvents"] += odd
    reading = read(tmp_path, made, layout="compact")
    assert reading.warnings == ()
    spans = reading.tables["spans"]
    assert spans["name"].to_list() == ["k", "a"]
    assert spans["launch"].to_list() == [-1, -1]


def test_args_that_are_no_json_cost_their_event_nothing_else(tmp_path: Path) -> None:
    data = traces.dump(traces.trace(*traces.launched("k", 0, 2000, 1000, 7), traces.op("a", 5000, 10)))
    odd = data.replace(b'"correlation": 7', b'"correlation": 7, "text": "\x01\xff \\q", "n": NaN', 1)
    assert odd != data
    spans = read(tmp_path, odd).tables["spans"]
    assert spans["launch"].to_list() == [7, 7, -1]


def test_args_with_a_text_of_no_encoding_keep_all_else(tmp_path: Path) -> None:
    # Passing over such a text is no error, taking it is one.
    data = traces.dump(traces.trace(*traces.launched("k", 0, 2000, 1000, 7)))
    odd = data.replace(b'"stream": 7', b'"stream": "\xff"', 1)
    assert odd != data
    assert read(tmp_path, odd).tables["spans"]["launch"].to_list() == [7, 7]


def test_args_of_an_unexpected_type_are_left_out(tmp_path: Path) -> None:
    events = [*traces.launched("k", 0, 2000, 1000, 7), traces.op("a", 5000, 10)]
    events[0]["args"]["correlation"] = {"what": 1}
    events[2]["args"] = [1, 2]
    reading = read(tmp_path, traces.trace(*events), layout="compact")
    assert reading.warnings == ()
    assert reading.tables["spans"]["launch"].to_list() == [-1, 7, -1]


@pytest.mark.parametrize(
    ("value", "number"), [(7, 7), ("7", 7), (7.0, 7), (0, 0), (-1, -1), ("x", -1), (None, -1), (2**63, -1)]
)
def test_whole_numbers_may_be_text(value: Any, number: int) -> None:
    assert events.integer(value) == number
    assert events.integers([value, 3]).tolist() == [number, 3]


@pytest.mark.parametrize(
    ("value", "text"), [(7, "7"), (7.0, "7"), ("stream 7", "7"), (" GPU 1", "1"), ("Trace", "Trace"), (7.5, "7.5")]
)
def test_lanes_that_are_written_differently_have_one_label(value: Any, text: str) -> None:
    assert events.label(value) == text


@pytest.mark.parametrize(
    ("value", "ranks"), [([0, 1], [0, 1]), ("[0, 2]", [0, 2]), ("[0, 1, ..., 7]", []), (None, []), (["a"], []), (3, [])]
)
def test_an_abridged_list_of_ranks_tells_nothing(value: Any, ranks: list[int]) -> None:
    assert events.numbers_of(value) == ranks


@pytest.mark.parametrize("other", [7, 7.001, "7.001", Decimal("7.001"), None])
def test_a_truth_is_one_whatever_stands_beside_it(other: Any) -> None:
    assert events.nanoseconds([True, other])[0] == 1_000
    assert events.nanoseconds([other, False])[1] == 0


def test_a_time_that_is_a_truth_counts_beside_an_odd_event_too(tmp_path: Path) -> None:
    data = traces.dump(traces.trace(traces.op("a", 0, 0), traces.op("b", 2_000, 7_001)))
    data = data.replace(b'"ts": 0.0', b'"ts": true')
    odd = data.replace(b'"pid": 4000', b'"pid": []', 1)
    assert odd != data
    starts = [sorted(read(tmp_path, d).tables["spans"]["start_ns"].tolist()) for d in (data, odd)]
    assert starts[0] == starts[1] == [BASE_NS + 1_000, BASE_NS + 2_000]


def test_a_time_that_lost_digits_by_being_a_float_is_refused() -> None:
    large = float(events.EXACT_US)
    assert events.nanoseconds([1.5, "2", "x"]).tolist() == [1500, 2000, events.NO_TIME]
    with pytest.raises(events.BlurredTimes):
        events.exact_nanoseconds([large])
    assert events.exact_nanoseconds([Decimal(large)]).tolist() == [int(large) * 1000]
