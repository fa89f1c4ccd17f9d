"""What an override did is counted, and where it took effect is the user's line; what is kept is bounded."""

from __future__ import annotations

import inspect
from pathlib import Path

from dlprof.record.overrides.constructors import Effects
from tests.fixtures.overriding import done, effect

NAME = "loader.num_workers"


def test_an_override_that_did_nothing_is_there_with_its_value() -> None:
    assert effect(Effects({NAME: 4}), NAME) == {"value": 4, "applied": 0, "before": [], "places": [], "error": None}


def test_the_place_is_the_innermost_line_in_no_library() -> None:
    effects = Effects({NAME: 4})
    code = compile("def library(f):\n    f()\n", "/x/lib/python3/site-packages/library.py", "exec")
    within: dict[str, object] = {}
    exec(code, within)
    within["library"](lambda: effects.took(NAME, 0))  # type: ignore[operator]
    exec(compile("library(took)", "/x/lib/python3/site-packages/library.py", "exec"), within | {"took": _took(effects)})
    line = inspect.currentframe().f_lineno - 2  # type: ignore[union-attr]
    file = str(Path(__file__).relative_to(Path.cwd()))
    assert effect(effects, NAME)["places"][0] == [file, line, "<lambda>"]


def _took(effects: Effects) -> object:
    return lambda: effects.took(NAME, 0)


def test_places_and_values_are_kept_once_and_few_of_them() -> None:
    effects = Effects({NAME: 4})
    for n in range(100):
        effects.took(NAME, 10 + n, placed=("train.py", n // 2, "main"))
    entry = effect(effects, NAME)
    assert entry["applied"] == 100
    assert entry["before"] == list(range(10, 18))
    assert entry["places"] == [["train.py", n, "main"] for n in range(8)]


def test_a_value_that_is_there_already_is_kept_only_where_it_is_the_first() -> None:
    effects = Effects({NAME: 4})
    for before in (4, 0, 4):
        effects.took(NAME, before)
    assert done(effects, NAME)[:2] == (3, [4, 0])
    effects = Effects({NAME: 4})
    for before in (0, 4):
        effects.took(NAME, before)
    assert done(effects, NAME)[:2] == (2, [0])


def test_there_is_news_for_a_first_time_and_a_new_value_and_not_for_more_of_the_same() -> None:
    effects = Effects({NAME: 4})
    effects.written()
    effects.took(NAME, 0, placed=False)
    assert effects.news
    effects.written()
    effects.took(NAME, 0, placed=False)
    assert not effects.news
    effects.took(NAME, 1, placed=False)
    assert effects.news


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
