"""Frames travel as arrays, and are the same afterwards: together what pd.concat makes of them."""

from __future__ import annotations

import pickle

import numpy as np
import pandas as pd
import pytest

from dlprof.analysis.engine.packed import Packed, packed, together
from dlprof.analysis.engine.ranks import RankAnswer

FRAMES = {
    "numbers and texts": [
        pd.DataFrame({"n": [1, 2], "x": [0.5, np.nan], "is": [True, False], "t": ["a", "b"]}),
        pd.DataFrame({"n": [3], "x": [1.5], "is": [True], "t": ["b"]}, index=[7]),
    ],
    "a text is missing": [
        pd.DataFrame({"t": pd.array(["a", None], dtype="str")}),
        pd.DataFrame({"t": pd.array([None, "c"], dtype="str")}),
    ],
    "no rows": [pd.DataFrame({"n": [1], "t": ["a"]}), pd.DataFrame({"n": [1], "t": ["a"]}).iloc[:0]],
    "other columns": [pd.DataFrame({"n": [1]}), pd.DataFrame({"n": [2], "m": [3]})],
    "other kinds": [pd.DataFrame({"n": [1]}), pd.DataFrame({"n": [2.5]})],
    "categories": [pd.DataFrame({"c": pd.Categorical(["a"])}), pd.DataFrame({"c": pd.Categorical(["b"])})],
    "objects": [pd.DataFrame({"o": [(1, 2)]}), pd.DataFrame({"o": [None]})],
    "columns of one block, some left out": [pd.DataFrame(np.arange(12).reshape(3, 4), columns=list("abcd"))[["d", "a"]]]
    * 2,
}


@pytest.mark.parametrize("frames", FRAMES.values(), ids=FRAMES.keys())
def test_what_travelled_is_together_what_it_was(frames: list[pd.DataFrame]) -> None:
    travelled = [pickle.loads(pickle.dumps(packed(frame))) for frame in frames]
    pd.testing.assert_frame_equal(together(travelled), pd.concat(frames, ignore_index=True))


def test_frames_and_arrays_mix() -> None:
    frames = FRAMES["numbers and texts"]
    pd.testing.assert_frame_equal(together([packed(frames[0]), frames[1]]), pd.concat(frames, ignore_index=True))


def test_an_answer_travels_packed_and_the_rest_as_it_is() -> None:
    frame = FRAMES["numbers and texts"][0]
    answer = RankAnswer({"a": frame, "b": None}, {"host": "x"}, {}, ("w",), ("t",))
    there = pickle.loads(pickle.dumps(answer))
    assert isinstance(there.answers["a"], Packed)
    pd.testing.assert_frame_equal(there.answers["a"].frame(), frame)
    assert (there.answers["b"], there.facts, there.warnings, there.tables) == (None, {"host": "x"}, ("w",), ("t",))
    # And once more, from there.
    assert isinstance(pickle.loads(pickle.dumps(there)).answers["a"], Packed)
