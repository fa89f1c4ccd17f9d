"""Frames come back from a Parquet file as they were, and a damaged file is one line."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from dlprof.analysis.engine import frames
from dlprof.errors import DlprofError

LARGEST = 2**64 - 1

FRAMES = {
    "numbers": pd.DataFrame(
        {
            "wide": np.array([-(2**63), 0, 2**63 - 1], dtype=np.int64),
            "narrow": np.array([-128, 0, 127], dtype=np.int8),
            "unsigned": np.array([0, 1, LARGEST], dtype=np.uint64),
            "yes": [True, False, True],
            "share": [0.1, math.nan, -math.inf],
            "single": np.array([0.1, math.nan, 3e38], dtype=np.float32),
        }
    ),
    "text": pd.DataFrame({"name": ["aten::mm", "", "Größe\x00\n"], "more": ["a", None, "c"]}),
    "objects": pd.DataFrame(
        {
            "on": pd.Series([(0, 1), [2, (3,)], None], dtype=object),
            "mixed": pd.Series([1, "1", math.nan], dtype=object),
            "deep": pd.Series([{"a": {1: (2, None)}}, np.int64(3), np.float32(0.5)], dtype=object),
            "halves": pd.Series(["\ud800", "fine", True], dtype=object),
            "only text": pd.Series(["a", "b", "c"], dtype=object),
        }
    ),
    "categories": pd.DataFrame(
        {
            "kind": pd.Categorical(["b", "a", None], categories=["b", "a", "unused"]),
            "size": pd.Categorical([2, 1, 2], categories=[1, 2, 3], ordered=True),
        }
    ),
    "nullable": pd.DataFrame(
        {
            "count": pd.array([1, None, 2**62], dtype="Int64"),
            "known": pd.array([True, None, False], dtype="boolean"),
            "ratio": pd.array([0.5, None, 1.5], dtype="Float64"),
            "label": pd.array(["a", None, ""], dtype="string"),
        }
    ),
    "times": pd.DataFrame(
        {"at": pd.DatetimeIndex(["2026-01-02", None, "1970-01-01"]), "took": pd.to_timedelta([0, 1, None])}
    ),
    "index": pd.DataFrame({"a": [1, 2]}, index=pd.Index(["x", "y"], name="key")),
    "range": pd.DataFrame({"a": [1, 2]}, index=pd.RangeIndex(10, 6, -2)),
    "twice": pd.DataFrame([[1, 2.0]], columns=["a", "a"]),
    "no rows": pd.DataFrame(
        {"n": np.array([], dtype=np.int32), "s": pd.Series([], dtype=object), "t": pd.array([], "str")}
    ),
    "no columns": pd.DataFrame(index=pd.RangeIndex(3)),
    "nothing": pd.DataFrame(),
}


def test_frames_come_back_as_they_were(tmp_path: Path) -> None:
    frames.write(tmp_path / "file", FRAMES, {"beside": ["it", "\ud800", math.inf]})
    stored = frames.Stored(tmp_path / "file")
    assert stored.footer == {"beside": ["it", "\ud800", math.inf]}
    found = stored.frames()
    assert list(found) == list(FRAMES)
    for name, frame in FRAMES.items():
        pd.testing.assert_frame_equal(found[name], frame, obj=name)
        for column in range(frame.shape[1]):
            before, after = frame.iloc[:, column], found[name].iloc[:, column]
            assert [type(v) for v in before] == [type(v) for v in after], (name, before.name)


def test_no_frame_at_all_is_kept(tmp_path: Path) -> None:
    frames.write(tmp_path / "file", {}, {})
    assert frames.Stored(tmp_path / "file").frames() == {}


def test_others_read_the_file(tmp_path: Path) -> None:
    fastparquet = pytest.importorskip("fastparquet", reason="another reader of Parquet")
    frames.write(tmp_path / "file", FRAMES, {})
    rows = fastparquet.ParquetFile(str(tmp_path / "file")).to_pandas()
    mine = rows[(rows["measure"] == "numbers") & (rows["column"] == "wide")]
    assert mine["integer"].to_list() == [-(2**63), 0, 2**63 - 1]
    mine = rows[(rows["measure"] == "text") & (rows["column"] == "name")]
    assert mine["text"].to_list() == FRAMES["text"]["name"].to_list()
    mine = rows[(rows["measure"] == "nullable") & (rows["column"] == "ratio")]
    assert mine["missing"].to_list() == [False, True, False]


@pytest.mark.parametrize(
    "frame",
    [
        pd.DataFrame({"a": [object()]}),
        pd.DataFrame({"a": [b"bytes"]}),
        pd.DataFrame({"a": [1 + 2j]}),
        pd.DataFrame({0: [1]}),
        pd.DataFrame({"a": [1]}, index=pd.MultiIndex.from_tuples([(1, 2)])),
        pd.DataFrame({"a": pd.to_datetime([0]).tz_localize("UTC")}),
        pd.DataFrame({"a": [{1}]}),
    ],
    ids=["object", "bytes", "complex", "number as a name", "two levels", "time zone", "set"],
)
def test_what_would_not_come_back_is_refused(frame: pd.DataFrame, tmp_path: Path) -> None:
    with pytest.raises(frames.NotPlain):
        frames.write(tmp_path / "file", {"odd": frame}, {})


@pytest.mark.parametrize("value", [{"dict": 1}, {1: "a", (2,): [None]}, [], (), np.bool_(True), "\ud800", 10**40])
def test_values_come_back_from_json(value: Any) -> None:
    found = frames.from_json(frames.to_json(value))
    assert found == value
    assert type(found) is type(value)


def test_what_is_missing_stays_missing() -> None:
    assert frames.from_json(frames.to_json(pd.NA)) is pd.NA


def test_json_of_no_known_type_is_refused() -> None:
    with pytest.raises(DlprofError, match="no known type: 'code'"):
        frames.from_json({"code": "1 + 1"})


def test_a_footer_that_lies_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = frames._spec
    for place, lie in ((3, 4), (3, 2), (3, -1), (1, "code"), (2, "object\0"), (2, "int7")):

        def lying(name: str, frame: pd.DataFrame, sections: list[Any], place: int = place, lie: Any = lie) -> Any:
            told = spec(name, frame, sections)
            told["columns"][0][place] = lie
            return told

        with monkeypatch.context() as patched:
            patched.setattr(frames, "_spec", lying)
            frames.write(tmp_path / "file", {"numbers": FRAMES["numbers"]}, {})
        with pytest.raises(DlprofError, match="file: damaged: ") as e:
            frames.Stored(tmp_path / "file").frames()
        assert "\n" not in str(e.value)
