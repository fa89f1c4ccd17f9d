"""Call sites are kept once, within bounds, and with the loaders that they are about."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dlprof.record.calls.seen import LOOKS, PLACES, Calls
from dlprof.record.loaders import LoaderSeen


class Loader:
    """Stands for a loader: it can be referred to weakly, and has a data set."""

    def __init__(self, dataset: object = None) -> None:
        self.dataset = dataset


def seen_loader(role: str) -> LoaderSeen:
    gone: Any = SimpleNamespace
    return LoaderSeen(gone, {}, role)


def test_a_place_is_kept_once_and_counted() -> None:
    calls = Calls()
    for _ in range(3):
        calls.see("save")
    calls.see("save")
    first, second = calls.facts()
    assert (first["kind"], first["count"], second["count"]) == ("save", 3, 1)
    assert first["function"].endswith("test_a_place_is_kept_once_and_counted")
    assert second["line"] == first["line"] + 1
    assert calls.news


def test_looks_and_places_are_bounded() -> None:
    calls = Calls()
    body = "\n".join(["look('copy')"] * 3 * PLACES)
    exec(compile(body, "/home/me/train.py", "exec"), {"look": calls.see})
    assert len(calls.facts()) == PLACES
    assert {call["file"] for call in calls.facts()} == {"/home/me/train.py"}
    for _ in range(2 * LOOKS):
        calls.see("save")
        if calls.looks:
            calls.see_backward()
    counts = {call["kind"]: call["count"] for call in calls.facts()}
    assert (counts["save"], counts["backward"]) == (LOOKS, LOOKS)


def test_a_loaders_calls_know_what_its_batches_were_for() -> None:
    calls, train, validation = Calls(), Loader(), Loader()
    calls.see_made(train)
    calls.see_made(validation)
    seen = seen_loader("unknown")
    calls.see_iteration(train, seen)
    calls.see_iteration(validation, seen_loader("validation"))
    seen.role = "train"  # it is only known later
    assert [(call["kind"], call["roles"]) for call in calls.facts()] == [
        ("loader", ["train"]),
        ("loader", ["validation"]),
        ("iteration", ["train"]),
        ("iteration", ["validation"]),
    ]


def test_a_loader_that_a_library_made_of_the_scripts_is_about_both() -> None:
    """Accelerate's prepare() makes a loader over the data set of the script's."""
    calls, data = Calls(), [1, 2]
    mine, other, prepared = Loader(data), Loader([3]), Loader(data)
    calls.see_made(mine)
    calls.see_made(other)
    library = "def prepare(see, loader):\n    see(loader)\n"
    names: dict[str, Any] = {}
    exec(compile(library, "/x/site-packages/fancy/prepare.py", "exec"), names)
    names["prepare"](calls.see_made, prepared)
    calls.see_iteration(prepared, seen_loader("train"))
    assert [call.get("roles") for call in calls.facts()] == [["train"], None, ["train"], ["train"]]
    assert calls.facts()[2]["via"] == "prepare (fancy/prepare.py:2)"


def test_what_goes_wrong_ends_it_and_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls()

    def broken(*_: object) -> None:
        raise ValueError("no such thing")

    calls.see("save")
    monkeypatch.setattr(calls._frames, "find", broken)
    assert calls.see("save") is None
    assert (calls.off, calls.looks) == (True, 0)
    assert calls.problem == "lines of the script are not named: ValueError: no such thing"
    assert len(calls.facts()) == 1
