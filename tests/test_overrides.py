"""The settings that can be overridden."""

import pytest

from dlprof.errors import DlprofError
from dlprof.overrides import OVERRIDES, Outcome, changes_numbers, checked, described, named, outcomes, parse


def test_words_become_values_by_name() -> None:
    words = ["loader.num_workers=4", "loader.pin_memory=off", "ddp.bucket_cap_mb=12.5", "env.OMP_NUM_THREADS=1"]
    assert parse(words) == {
        "loader.num_workers": 4,
        "loader.pin_memory": False,
        "ddp.bucket_cap_mb": 12.5,
        "env.OMP_NUM_THREADS": "1",
    }


BAD = """
loader.num_workers loader.num_workers=-1 loader.num_workers=² loader.num_workers=99999999999999999999 loader.nothing=1
loader.pin_memory=maybe ddp.bucket_cap_mb=much ddp.bucket_cap_mb=nan ddp.comm_hook=x torch.compile=fast env.=1 env.A-B=1
env.PYTHONPATH=/x env.DLPROF_RUN=/x =1
"""


@pytest.mark.parametrize("word", BAD.split())
def test_what_cannot_be_set_is_one_clear_error(word: str) -> None:
    with pytest.raises(DlprofError, match="--set"):
        parse([word])


def test_values_of_a_process_are_checked_as_words_are() -> None:
    settings = {"loader.num_workers": 4, "loader.pin_memory": False, "ddp.bucket_cap_mb": 12.5, "torch.compile": "off"}
    assert checked(settings) == settings
    assert checked({}) == {}


@pytest.mark.parametrize(
    "settings",
    [
        {"loader.num_workers": -1},
        {"loader.num_workers": True},
        {"loader.nothing": 1},
        {"loader.pin_memory": None},
        {"env.OMP_NUM_THREADS": "1"},
        {"optimizer.fused": True, "optimizer.foreach": True},
        {4: 4},
    ],
)
def test_a_value_that_cannot_be_set_is_an_error(settings: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"^set: "):
        checked(settings)


def test_those_that_change_numbers_are_known() -> None:
    assert changes_numbers({"torch.autocast": "bf16", "loader.num_workers": 2, "env.X": "1"}) == ["torch.autocast"]


def test_a_change_names_its_override() -> None:
    assert named("num_workers") == "loader.num_workers"
    assert named("OMP_NUM_THREADS") == "env.OMP_NUM_THREADS"
    assert named("shuffle") is None
    assert len({o.setting for o in OVERRIDES}) == len(OVERRIDES)


def test_two_that_exclude_each_other_are_an_error() -> None:
    with pytest.raises(DlprofError, match="one of them"):
        parse(["optimizer.fused=True", "optimizer.foreach=True"])
    assert parse(["optimizer.fused=True", "optimizer.foreach=False"])


def test_what_ranks_report_adds_up_and_nothing_is_taken_for_granted() -> None:
    entry = {"value": 4, "applied": 2, "before": [0], "places": [["a.py", 1, "f"]], "error": None}
    other = entry | {"applied": 1, "before": [0, None], "places": [["b.py", 2, "g"]], "error": "no"}
    found = outcomes(
        ["loader.num_workers", "gc.freeze"], [{"loader.num_workers": entry}, {"loader.num_workers": other}]
    )
    places = (("a.py", 1, "f"), ("b.py", 2, "g"))
    assert found == {"loader.num_workers": Outcome(3, (0, None), places, "no"), "gc.freeze": Outcome()}


@pytest.mark.parametrize("report", [None, 3, [], {"gc.freeze": None}, {"gc.freeze": {"applied": [], "places": 3}}])
def test_a_report_of_another_kind_counts_as_none(report: object) -> None:
    assert outcomes(["gc.freeze"], [report]) == {"gc.freeze": Outcome()}


@pytest.mark.parametrize(
    ("outcome", "says"),
    [
        (Outcome(), "4 never applied"),
        (Outcome(error="no"), "4 never applied: no"),
        (Outcome(1, (0,), (("a.py", 12, "main"),)), "0 → 4 at a.py:12, 1 time"),
        (
            Outcome(3, (None, 1), (("a.py", 1, "f"), ("a.py", 1, "g"), ("b.py", 2, "h")), "no"),
            "None, 1 → 4 at a.py:1, b.py:2, 3 times: no",
        ),
        (Outcome(2, ("x",)), "x → 4, 2 times"),
    ],
)
def test_an_outcome_says_before_value_places_and_how_often(outcome: Outcome, says: str) -> None:
    assert described(4, outcome) == says
