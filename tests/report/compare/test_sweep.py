"""A sweep in words: the best point, the knee, what was left out and how far it has come."""

from __future__ import annotations

from msgspec.structs import replace

from dlprof.report.compare.summary import page, text
from dlprof.report.compare.sweep import knee, summary
from dlprof.result.sweep import Axis, Point, Reading, Sweep


def of(rates: dict[str, float | None], samples: float | None = 10.0, **more: object) -> Sweep:
    """Return a sweep over n with so many samples a second at each value."""
    points = [
        Point(
            {"loader.num_workers": n},
            (Reading(1e9 * (samples or 1.0) / r, samples),) * 2 if r else (),
            why="" if r else "it died",
        )
        for n, r in rates.items()
    ]
    axes = (Axis("loader.num_workers", tuple(rates)),)
    return replace(Sweep(("python", "train.py"), axes, tuple(points), 2, 30, "complete"), **more)


CURVE = of({"0": 100.0, "1": 190.0, "2": 297.0, "4": 300.0, "8": None})


def test_the_best_and_the_knee() -> None:
    s = summary(CURVE)
    assert s.headline.replace("\u00a0", " ") == (
        "loader.num_workers=4 is the best: 300 samples a second, 3.00 × those of loader.num_workers=0."
    )
    assert "The knee is loader.num_workers=2" in s.second
    assert s.notices == ("loader.num_workers=8 is left out: it died",)
    found = knee(CURVE)
    assert found is not None
    assert found.values == {"loader.num_workers": "2"}
    assert "it died" in text(s, 110)
    assert "Samples a second by loader.num_workers" in page(s)


def test_nothing_to_gain() -> None:
    assert summary(of({"0": 100.0, "1": 101.0})).headline.startswith("Nothing to gain")


def test_nothing_measured() -> None:
    s = summary(of({"0": None}))
    assert s.headline == "No point was measured."
    assert knee(of({"0": None})) is None
    page(s)


def test_how_far_it_has_come() -> None:
    assert "it goes on" in summary(of({"0": 100.0}, state="interrupted")).notices[0]
    assert "the time was up" in summary(of({"0": 100.0}, state="out_of_time")).notices[0]


def test_the_predicted_curve_stands_beside_the_measured_one() -> None:
    points = tuple(replace(p, predicted_ns=1.1e8 if p.readings else None) for p in CURVE.points)
    s = summary(replace(CURVE, points=points))
    (panel,) = s.panels
    assert panel.columns == ("loader.num_workers", "measured", "predicted")
    assert panel.rows[0][1:] == (100.0, 1e9 * 10 / 1.1e8)
    assert "predicted" in text(s, 120)


def test_two_axes_have_a_line_for_each_value_of_the_second() -> None:
    axes = (Axis("a.x", ("0", "1")), Axis("b.y", ("0", "1")))
    points = tuple(Point({"a.x": x, "b.y": y}, (Reading(1e8 + int(x) * 1e7),)) for x in "01" for y in "01")
    s = summary(Sweep(("train.py",), axes, points, 1, 30, "complete"))
    (panel,) = s.panels
    assert panel.columns == ("a.x", "b.y=0", "b.y=1")
    assert len(panel.rows) == 2
    three = Sweep(
        ("t",), (*axes, Axis("c.z", ("0",))), tuple(replace(p, values={**p.values, "c.z": "0"}) for p in points), 1, 30
    )
    assert summary(three).panels[0].shape == "bars"


def test_other_work_without_samples_is_told() -> None:
    axes = (Axis("size", ("1", "2")),)
    points = tuple(Point({"size": n}, (Reading(1e8 * int(n)),)) for n in "12")
    s = summary(Sweep(("train.py",), axes, points, 1, 30, "complete"))
    assert any("How many samples" in n for n in s.notices)
