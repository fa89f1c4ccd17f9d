"""A constructor is called with other arguments, once, and as the script calls it where that fails."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import pytest

from dlprof.record.overrides import constructors
from dlprof.record.overrides.constructors import Effects, wanted, watched
from tests.fixtures.overriding import done


class Kind(constructors.Kind):
    """Takes ddp.bucket_cap_mb, and changes what it is asked to."""

    group = "ddp"

    def __init__(self, *, fails: bool = False) -> None:
        super().__init__({"bucket_cap_mb": 7}, Effects({"ddp.bucket_cap_mb": 7}))
        self.fails = fails
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
    kind, making = Kind(), list[int]()
    for one in (Base, Derived):
        monkeypatch.setattr(one, "__init__", watched(kind, making, one.__init__))
    return kind


NAME = "ddp.bucket_cap_mb"


@pytest.mark.parametrize("args", [(("m",), {}), (("m", 3), {}), ((), {"module": "m", "bucket_cap_mb": 3})])
def test_the_argument_is_changed_however_it_is_given(args: tuple[Any, Any], kind: Kind) -> None:
    assert Base(*args[0], **args[1], other=2).seen == ("m", 7, 2)
    before = 3 if "3" in str(args) else None
    assert done(kind.effects, NAME) == (1, [before], None)


def test_a_class_and_the_one_above_it_count_once(kind: Kind) -> None:
    assert Derived("m", 3).seen == ("m", 7, 5)
    assert done(kind.effects, NAME) == (1, [3], None)
    assert len(kind.made) == 1


def test_what_is_refused_is_made_as_the_script_says(kind: Kind) -> None:
    assert Base("refuses", 3).seen == ("refuses", 3, 1)
    assert done(kind.effects, NAME) == (0, [], "ValueError: not 7")
    assert (kind.made, kind.taken_back) == ([], 1)


def test_the_scripts_own_mistakes_are_raised_as_they_are(kind: Kind) -> None:
    with pytest.raises(KeyError, match="theirs"):
        Base("broken")
    with pytest.raises(TypeError, match="unexpected keyword"):
        Base("m", nonsense=1)  # type: ignore[call-arg]


def test_a_failure_of_ours_costs_the_override_alone(kind: Kind) -> None:
    kind.fails = True
    assert Base("m", 3).seen == ("m", 3, 1)
    assert done(kind.effects, NAME) == (0, [], "RuntimeError: ours")


def test_the_signature_stays(kind: Kind) -> None:
    assert list(inspect.signature(Base).parameters) == ["module", "bucket_cap_mb", "other"]


def test_settings_of_a_group_are_named_without_it() -> None:
    assert wanted({"loader.pin_memory": True, "ddp.static_graph": True}, "ddp") == {"static_graph": True}
