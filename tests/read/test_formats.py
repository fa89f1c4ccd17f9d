"""The list of formats: each says what it is, is told from all others by its content, and no hostile file breaks it."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

import pytest

from dlprof import schema
from dlprof.errors import DlprofError
from dlprof.read import formats as listed
from dlprof.read.formats import FORMATS, Head, format_named, formats, recognised
from tests.fixtures import dialects, jobs, traces


def test_every_format_says_what_it_is_and_is_listed_once() -> None:
    known = formats()
    assert len({one.name for one in known}) == len(known)
    for one in known:
        assert one.title
        assert one.recognised
        assert (one.read is None) == bool(one.left), one.name
        assert one.read is None or (one.brings and one.record and one.tables), one.name
        assert set(one.tables) | set(one.lacks) <= set(schema.TABLES), one.name
        assert format_named(one.name) is one


def test_opening_a_file_imports_nothing_heavy(tmp_path: Path) -> None:
    """No import of pandas comes before the traces are decoded beside it."""
    path = traces.write(tmp_path / "rank0.json", traces.training())
    code = f"import sys; from dlprof.read.run import open_run; open_run({str(path)!r}); print('pandas' in sys.modules)"
    assert jobs.launch([sys.executable, "-c", code], tmp_path).stdout == "False\n"


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("torch_trace", json.dumps(traces.training())),
        ("horovod", dialects.horovod()),
        ("rocprofv3", dialects.KERNELS),
        ("rocprofv3_parts", dialects.CALLS),
        ("rocprofv3_json", json.dumps(dialects.rocprof_json())),
        ("execution_trace", dialects.execution_trace()),
    ],
)
def test_a_file_is_known_by_its_content(tmp_path: Path, name: str, text: str, packed: bool) -> None:
    path = tmp_path / "file.of.any.name"
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    known = recognised(Head(path))
    assert known is not None
    assert known[0].name == name


HOSTILE = (
    b"",
    b"\0" * 5_000,
    b"[" * 100_000,
    b"{" * 100_000,
    b'[{"ph":"X"' + b"," * 300_000,
    b"\x1f\x8b" + b"\xff" * 100,
    b"\x0a" * 100_000,
    b"a," * 200_000,
    b'{"schema": "1.0", "nodes"' + b"[" * 10_000,
    b"\xef\xbb\xbf[",
    "٣²{".encode() * 1_000,
)


@pytest.mark.parametrize("data", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_files_break_no_format(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(data)
    head = Head(path)
    for one in formats():
        parts = one.recognise(head)
        if parts and one.read:
            with pytest.raises(DlprofError):
                one.read(path, parts[0].piece)


def test_a_format_that_breaks_costs_only_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_head: Head) -> object:
        raise RuntimeError

    path = traces.write(tmp_path / "rank0.json", traces.training())
    known = formats()
    bad = listed.Format(name="bad", title="bad", recognised="never", recognise=broken)  # type: ignore[arg-type]
    monkeypatch.setattr(listed, "formats", lambda: (bad, *known))
    found = recognised(Head(path))
    assert found is not None
    assert found[0].name == "torch_trace"


def test_a_format_that_is_not_read_says_why(tmp_path: Path) -> None:
    with pytest.raises(DlprofError, match=r"torch\.profiler's trace"):
        format_named("execution_trace").tables_of(tmp_path / "et.json", "")


def test_what_is_said_of_a_format_is_in_words() -> None:
    for one in formats():
        said = one.described
        assert said["What it is"] == one.title
        assert ("Real files seen" in said) == (one.read is not None)
    assert len(FORMATS) <= len(formats())
