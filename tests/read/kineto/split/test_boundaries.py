"""A boundary is what looks like one, wherever it stands; spans cover a file from its first event on."""

import json
from pathlib import Path
from typing import Any

import pytest

from dlprof.read.kineto.split import boundaries
from dlprof.read.kineto.split.boundaries import boundary, fill, late_boundary, spans
from tests.fixtures import traces

ODD = ["},{", '"},{"', '"},{"ph":"X"},{', "\\", '\\"},{"', "}, {", "[{", "größe 😀", "\n"]


def events(count: int) -> list[dict[str, Any]]:
    made = [
        traces.op(f"{ODD[i % len(ODD)]}{i}", i * 1000, 500, odd=[{"a": ODD[i % 7]}, {"b": {}}]) for i in range(count)
    ]
    return json.loads(json.dumps(made))  # type: ignore[no-any-return]


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("ascii_only", [False, True])
def test_from_any_byte_on_the_next_true_boundary_is_found(indent: int | None, ascii_only: bool) -> None:
    made = events(12)
    text = json.dumps(made, indent=indent, ensure_ascii=ascii_only).encode()
    for at in range(1, len(text)):
        found = boundary(text[at:])
        if found is None:  # the last event, or the one before
            assert text[at:].count(b'"ph"') <= 1
            continue
        end, following = at + found[0], at + found[1]
        assert json.loads(text[:end] + b"]") + json.loads(b"[" + text[following:]) == made


def test_what_has_no_phase_or_is_not_whole_is_no_boundary() -> None:
    assert boundary(b'1}, {"name": "x"}, {"name": "y"}') is None
    assert boundary(b'1}, {"ph": "X", "name": "cut off') is None
    assert boundary(b'1}, {"ph": "X", "rate": NaN}, ') == (2, 4)
    assert boundary(b"") is None


def test_not_all_of_a_hostile_window_is_looked_through() -> None:
    assert boundary(b'}, {"a": [' * 9 + b'1}, {"ph": "X"}') is None
    assert boundary(b'}, {"a": 1' * 101 + b'}, {"ph": "X"}') is None
    assert boundary(b'}, {"a": 1' * 99 + b'}, {"ph": "X"}') is not None


@pytest.mark.parametrize("layout", ["kineto", "compact", "pretty"])
def test_spans_follow_each_other_and_leave_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: traces.Layout
) -> None:
    monkeypatch.setattr(boundaries, "WINDOW", 1000)
    monkeypatch.setattr(boundaries, "LAST", 2000)
    path = traces.write(tmp_path / "trace.json", traces.trace(*events(300)), layout)
    data = path.read_bytes()
    first = data.index(b"{", data.index(b'"traceEvents"'))
    with path.open("rb") as file:
        found = list(spans(file.fileno(), first, 5000))
    assert len(found) > 5
    at, made = first, []
    for span in found:
        assert span.start == at
        made += json.loads(b"[" + data[at : span.stop] + b"]")
        at = span.after
    assert made == events(300)[: len(made)]
    assert len(data) - at < 3000


@pytest.mark.parametrize("last", [20, 100, 900])
def test_a_file_without_boundaries_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: int) -> None:
    looked = []

    def seen(window: bytes) -> tuple[int, int] | None:
        looked.append(len(window))
        return boundary(window)

    monkeypatch.setattr(boundaries, "WINDOW", 100)
    monkeypatch.setattr(boundaries, "LAST", last)
    monkeypatch.setattr(boundaries, "boundary", seen)
    path = tmp_path / "trace.json"
    for size in (500, 1_000, 100_000):
        path.write_bytes(b'{"ph": "' + b"x" * size)
        with path.open("rb") as file:
            assert list(spans(file.fileno(), 0, 200)) == []
    assert 16 <= len(looked) < 40


def test_a_room_is_filled_up_to_a_boundary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boundaries, "WINDOW", 500)
    monkeypatch.setattr(boundaries, "BLOCK", 300)
    made = events(100)
    text = json.dumps(made).encode()[1:-1]
    blocks = iter([text[i : i + 300] for i in range(0, len(text), 300)])
    room, held, taken = memoryview(bytearray(4000)), b"", []
    while True:
        size, found = fill(room, held, blocks, 2000)
        if not found:
            break
        assert found[0] >= 2000
        taken += json.loads(b"[" + bytes(room[: found[0]]) + b"]")
        held = bytes(room[found[1] : size])
    assert len(taken) > 80
    assert taken + json.loads(b"[" + bytes(room[:size]) + b"]") == made


def test_a_room_that_is_full_ends_the_search() -> None:
    room = memoryview(bytearray(3 << 20))
    size, found = fill(room, b"", iter([b"x" * (1 << 20)] * 9), 1 << 20)
    assert (size, found) == (3 << 20, None)


def test_the_late_boundary_is_close_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boundaries, "LAST", 1000)
    made = events(50)
    text = json.dumps(made).encode()[1:-1]
    found = late_boundary(text)
    assert found
    assert len(text) - 1000 < found[0] < len(text) - 500
    assert json.loads(b"[" + text[: found[0]] + b"]") + json.loads(b"[" + text[found[1] :] + b"]") == made
    assert late_boundary(text[:900]) is None
