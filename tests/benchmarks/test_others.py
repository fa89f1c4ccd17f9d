"""The benchmark on recordings of others tells what is wrong, and its list is sound."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import others
from benchmarks.others import Recording, Truth
from tests.fixtures import traces

MS = 1_000_000


def test_the_list_is_sound() -> None:
    listed = others.recordings()
    assert len({(one.repo, one.path) for one in listed}) == len(listed) > 10
    assert all(len(one.repo.partition("@")[2]) == 40 for one in listed)
    assert all(bool(one.refused) != (one.truth != Truth()) for one in listed)


@pytest.mark.parametrize(
    ("truth", "errors"),
    [
        (Truth(steps=8, step_ms=2.0, computation=0.9, idle=0.1, first=""), []),
        (Truth(steps=20), ["8 steps, not 20"]),
        (Truth(step_ms=3.0), ["steps of 2.0 ms, not 3.0"]),
        (Truth(idle=0.5), ["idle 9.5 %, not 50 %"]),
        (Truth(device_ms=1.8), []),
        (Truth(device_ms=1.0), ["1.81 ms of the device, not 1.0"]),
        (Truth(gain=2.0), ["no gain"]),
        (Truth(first="input_wait", words=("no such words",)), ["nothing first, not input_wait", 'not "no such words"']),
    ],
)
def test_what_is_wrong_is_told(truth: Truth, errors: list[str], tmp_path: Path) -> None:
    events = [
        one
        for n in range(8)
        for one in (
            traces.step(n, n * 2 * MS, 2 * MS),
            *traces.launched("k", n * 2 * MS + 5_000, n * 2 * MS + 190_000, 1_810_000, n + 1),
        )
    ]
    path = traces.write(tmp_path / "t.json", traces.trace(*events, world_size=1))
    said, found = others.held(Recording("a/b@" + "0" * 40, "t.json", "", truth), path)
    assert (
        "8 steady steps of 2.00 ms" in said.replace("\u00a0", " "),
        [text.replace("\u00a0", " ") for text in found],
    ) == (True, errors)
    (tmp_path / "x").write_text("nothing")
    assert others.held(Recording("a/b", "x", "", refused=("x:",)), tmp_path / "x")[1] == []
    assert others.held(Recording("a/b", "x", "", truth), tmp_path / "x")[1] == ["it is refused"]
