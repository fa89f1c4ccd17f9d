"""Constructors are called with other arguments, once; what overrides did is counted, with the lines of the user's."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from dlprof.record.overrides import constructors
from dlprof.record.overrides.constructors import Effects, wanted, watched
from tests.fixtures.overriding import done, effect


class Kind(constructors.Kind):
    """Takes ddp.bucket_cap_mb, and changes what it is asked to."""

    group = "ddp"

    def __init__(self) -> None:
        super().__init__({"bucket_cap_mb": 7}, Effects({"ddp.bucket_cap_mb": 7}))
        self.fails = False
        self.made: list[Mapping[str, Any]] = []
        self.taken_back = 0

    def change(self, made: Any, given: Mapping[str, Any]) -> Mapping[str, Any]:  # noqa: ARG002 - see Kind
        if self.fails:
            raise RuntimeError("ours")
        return {"bucket_cap_mb": 7}

    def refused(self, made: Any, given: Mapping[str, Any]) -> None:  # noqa: ARG002 - see Kind
        self.taken_back += 1

    def done(self, made: Any, given: Mapping[str, Any], changed: Mapping[str, Any]) -> None:  # noqa: ARG002
        self.made.append(changed)


class Base:
    """An object of the script's."""

    def __init__(self, module: str, bucket_cap_mb: int | None = None, *, other: int = 1) -> None:
        if bucket_cap_mb == 7 and module == "refuses":
            raise ValueError("not 7")
        if module == "broken":
            raise KeyError("theirs")
        self.seen = (module, bucket_cap_mb, other)


class Derived(Base):
    """One whose constructor calls the one above."""

    def __init__(self, module: str, bucket_cap_mb: int | None = None) -> None:
        super().__init__(module, bucket_cap_mb, other=5)


@pytest.fixture
def kind(monkeypatch: pytest.MonkeyPatch) -> Kind:
    kind = Kind()
    for one in (Base, Derived):
        monkeypatch.setattr(one, "__init__", watched(kind, one.__init__))
    return kind


# What the script makes, what it gets, and what is noted: how often it took effect, what was there before, what failed.
MADE: dict[str, tuple[Callable[[], Base], tuple[Any, ...], tuple[Any, ...]]] = {
    "an argument by default": (lambda: Base("m", other=2), ("m", 7, 2), (1, [None], None)),
    "by position": (lambda: Base("m", 3), ("m", 7, 1), (1, [3], None)),
    "by name": (lambda: Base(module="m", bucket_cap_mb=3), ("m", 7, 1), (1, [3], None)),
    "once with the class above": (lambda: Derived("m", 3), ("m", 7, 5), (1, [3], None)),
    "refused, made as the script says": (lambda: Base("refuses", 3), ("refuses", 3, 1), (0, [], "ValueError: not 7")),
    "a failure of ours": (lambda: Base("m", 3), ("m", 3, 1), (0, [], "RuntimeError: ours")),
}


@pytest.mark.parametrize(("make", "seen", "noted"), MADE.values(), ids=MADE)
def test_objects_are_made_with_the_changed_argument(make: Any, seen: Any, noted: Any, kind: Kind) -> None:
    kind.fails = noted[2] == "RuntimeError: ours"
    assert make().seen == seen
    assert done(kind.effects, "ddp.bucket_cap_mb") == noted
    assert len(kind.made) == noted[0] + kind.fails
    assert kind.taken_back == (noted[2] == "ValueError: not 7")


def test_the_scripts_own_mistakes_are_raised_as_they_are_and_the_signature_stays(kind: Kind) -> None:
    with pytest.raises(KeyError, match="theirs"):
        Base("broken")
    with pytest.raises(TypeError, match="unexpected keyword"):
        Base("m", nonsense=1)  # type: ignore[call-arg]
    assert list(inspect.signature(Base).parameters) == ["module", "bucket_cap_mb", "other"]
    assert wanted({"loader.pin_memory": True, "ddp.static_graph": True}, "ddp") == {"static_graph": True}


NAME = "loader.num_workers"


@pytest.mark.parametrize(
    ("before", "kept"),
    [
        ([], []),
        (range(10, 110), list(range(10, 18))),  # few, and each once
        ([4, 0, 4], [4, 0]),  # the value that is set counts only where it is the first
        ([0, 4], [0]),
    ],
)
def test_values_that_were_there_before_are_kept_within_bounds(before: Any, kept: list[int]) -> None:
    effects = Effects({NAME: 4})
    for n, value in enumerate(before):
        effects.took(NAME, value, placed=("train.py", n // 2, "main"))
    places = [["train.py", n, "main"] for n in range(min((len(before) + 1) // 2, 8))]
    expected = {"value": 4, "applied": len(before), "before": kept, "places": places, "error": None}
    assert effect(effects, NAME) == expected


def test_the_place_is_the_innermost_line_in_no_library() -> None:
    library = "/x/lib/python3/site-packages/library.py"
    within: dict[str, Any] = {"effects": Effects({NAME: 4}), "own": lambda: within["effects"].took(NAME, 0)}
    theirs = "def call(f):\n    f()\ndef took():\n    effects.took('loader.num_workers', 0)\n"
    exec(compile(theirs, library, "exec"), within)
    here, line = str(Path(__file__).relative_to(Path.cwd())), within["own"].__code__.co_firstlineno
    for function, place in (("own", [here, line, "<lambda>"]), ("took", ["train.py", 3, "main"])):
        within["effects"] = Effects({NAME: 4})
        main = f"def main():\n\n    call({function})\nmain()"
        exec(compile(main, f"{Path.cwd()}/train.py", "exec"), within)
        assert effect(within["effects"], NAME)["places"] == [place]


def test_there_is_news_of_a_first_time_and_of_a_new_value_only() -> None:
    effects, news = Effects({NAME: 4}), []
    for before in (0, 0, 1):
        effects.written()
        effects.took(NAME, before, placed=False)
        news.append(effects.news)
    assert news == [True, False, True]


def test_the_first_reason_is_kept_and_what_was_undone_does_not_count() -> None:
    effects = Effects({NAME: 4})
    effects.took(NAME, 0)
    effects.failed(NAME, ValueError("no"), undone=True)
    effects.failed(NAME, "later")
    assert done(effects, NAME) == (0, [0], "ValueError: no")


def test_values_are_plain_and_secrets_are_not_kept() -> None:
    effects = Effects({"env.API_TOKEN": "hush", NAME: 4})
    effects.took("env.API_TOKEN", "before", placed=False)
    effects.took(NAME, object(), placed=False)
    assert effect(effects, "env.API_TOKEN")["value"] == effect(effects, "env.API_TOKEN")["before"][0] == "[redacted]"
    assert isinstance(effect(effects, NAME)["before"][0], str)
