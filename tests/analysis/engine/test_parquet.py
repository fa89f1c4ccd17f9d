"""Tables come back from a Parquet file that others read as well, and damage is one line."""

from __future__ import annotations

import hashlib
import json
import random
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from numpy.typing import NDArray

from dlprof.analysis.engine import parquet
from dlprof.errors import DlprofError

NOTE = {"a": [1, None, "\ud800"], "b": {"c": 0.1}}


def columns(rows: int) -> dict[str, NDArray[Any]]:
    rng = np.random.default_rng(rows)
    texts = np.empty(rows, dtype=object)
    texts[:] = ["ä" * (n % 7) + str(n % 300) for n in range(rows)]
    return {
        "whole": rng.integers(-(2**63), 2**63 - 1, rows),
        "real": np.where(rng.random(rows) < 0.1, np.nan, rng.random(rows)),
        "true": rng.random(rows) < 0.5,
        "text": texts,
    }


@pytest.mark.parametrize("rows", [0, 1, 7, 8, 9, 200, 70_000])
def test_columns_come_back(rows: int, tmp_path: Path) -> None:
    parquet.write(tmp_path / "file", columns(rows), NOTE)
    stored = parquet.Stored(tmp_path / "file")
    assert stored.note == NOTE
    found = stored.columns()
    assert list(found) == list(columns(rows))
    for name, values in columns(rows).items():
        assert found[name].dtype == values.dtype
        np.testing.assert_array_equal(found[name], values)


def others(engine: str, path: Path) -> pd.DataFrame:
    """Return a file as another reader of Parquet sees it."""
    reader = pytest.importorskip(engine, reason="another reader of Parquet")
    if engine == "fastparquet":
        found: pd.DataFrame = reader.ParquetFile(str(path)).to_pandas()
        return found
    return pd.read_parquet(path, engine="pyarrow")


@pytest.mark.parametrize("rows", [0, 1, 9, 70_000])
@pytest.mark.parametrize("engine", ["fastparquet", "pyarrow"])
def test_others_read_it(rows: int, engine: str, tmp_path: Path) -> None:
    parquet.write(tmp_path / "file", columns(rows), NOTE)
    found = others(engine, tmp_path / "file")
    assert found.shape == (rows, 4)
    for name, values in columns(rows).items():
        assert values.dtype.kind in (found[name].dtype.kind, "O")
        np.testing.assert_array_equal(found[name].to_numpy(), values)


def test_many_columns_are_a_longer_list(tmp_path: Path) -> None:
    """Lists of fifteen items or more have another head."""
    many = {f"c{n}": np.arange(3) + n for n in range(40)}
    parquet.write(tmp_path / "file", many, {})
    found = others("fastparquet", tmp_path / "file")
    assert found.to_dict("list") == {name: values.tolist() for name, values in many.items()}


def read(path: Path) -> None:
    parquet.Stored(path).columns()


@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1PAR1", b"{}", b"\0" * 1000], ids=repr)
def test_another_file_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(DlprofError, match="file: not written by this dlprof"):
        read(tmp_path / "file")


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DlprofError, match="no such file"):
        read(tmp_path / "file")


def test_every_damage_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    parquet.write(path, columns(200), NOTE)
    whole = path.read_bytes()
    rng = random.Random(0)
    for n in range(300):
        broken = bytearray(whole)
        if n % 2:
            at = rng.randrange(len(broken))
            broken[at] ^= 1 << rng.randrange(8)
        else:
            del broken[rng.randrange(len(broken)) :]
        path.write_bytes(broken)
        with pytest.raises(DlprofError, match=r"file: (damaged|not written by this dlprof)"):
            read(path)


def forged(path: Path, told: Any, pages: bytes, unpacked: int | None = None) -> Path:
    """Write a file with a right hash, of somebody who knows how."""
    note = json.dumps(told).encode()
    packed = zlib.compress(note)
    body = parquet._NOTE.pack(len(packed), len(note) if unpacked is None else unpacked) + packed + pages
    path.write_bytes(parquet._HEAD.pack(b"PAR1", parquet._OURS, hashlib.sha256(body).digest()) + body)
    return path


PAGE = zlib.compressobj(wbits=31)
BYTES = PAGE.compress(b"\x03\0\0\0abc") + PAGE.flush()
WHOLE = {"rows": 1, "columns": [["a", "O", 0, len(BYTES), 7]], "note": {}}


@pytest.mark.parametrize(
    "told",
    [
        [],
        {},
        None,
        WHOLE | {"note": 1},
        WHOLE | {"rows": 2},
        WHOLE | {"rows": -1},
        WHOLE | {"rows": 1 << 62},
        WHOLE | {"rows": "1"},
        WHOLE | {"columns": [1]},
        WHOLE | {"columns": {"a": 1}},
        WHOLE | {"columns": [["a", "O", 0, len(BYTES), 1 << 40]]},
        WHOLE | {"columns": [["a", "O", 0, len(BYTES), 6]]},
        WHOLE | {"columns": [["a", "O", 0, 5, 7]]},
        WHOLE | {"columns": [["a", "O", 1 << 70, 5, 7]]},
        WHOLE | {"columns": [["a", "x", 0, len(BYTES), 7]]},
        WHOLE | {"columns": [["a", "i", 0, len(BYTES), 7]]},
    ],
    ids=lambda told: json.dumps(told)[:70],
)
def test_a_forged_file_is_one_line(told: Any, tmp_path: Path) -> None:
    read(forged(tmp_path / "file", WHOLE, BYTES))
    with pytest.raises(DlprofError, match="file: ") as e:
        read(forged(tmp_path / "file", told, BYTES))
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("unpacked", [0, 1 << 63, 5])
def test_a_forged_length_of_the_note_is_one_line(unpacked: int, tmp_path: Path) -> None:
    with pytest.raises(DlprofError, match="file: "):
        read(forged(tmp_path / "file", WHOLE, BYTES, unpacked))
