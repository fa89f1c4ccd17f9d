"""What is read is what was written, and its arrays lie where they were written."""

import os

import numpy as np
import pytest

from dlprof.read.kineto.split import decoding

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux")


def test_several_messages_in_one_file() -> None:
    file = os.memfd_create("test")
    told = [
        {"a": np.arange(100_000), "b": [np.empty(0, np.int32), "größe"]},
        None,
        (np.arange(7, dtype=np.int8), np.arange(3.0)),
    ]
    at, places = 0, []
    for message in told:
        at = decoding.next_page(at)
        length = decoding.write(file, at, message)
        places.append((at, length))
        at += length
    found = [decoding.read(file, *place) for place in places]
    os.close(file)  # the arrays keep the memory
    np.testing.assert_array_equal(found[0]["a"], np.arange(100_000))
    assert found[0]["b"][0].dtype == np.int32
    assert found[0]["b"][1] == "größe"
    assert found[1] is None
    np.testing.assert_array_equal(found[2][0], np.arange(7))
    np.testing.assert_array_equal(found[2][1], np.arange(3.0))
    assert not found[0]["a"].flags.owndata
    assert not found[0]["a"].flags.writeable
    assert all(array.ctypes.data % array.itemsize == 0 for array in (found[0]["a"], *found[2]))
