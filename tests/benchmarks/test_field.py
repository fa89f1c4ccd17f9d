"""The benchmark on public scripts: its list, and the figures that it makes of what was tried."""

import struct
from pathlib import Path

import pytest

from benchmarks.field import PAGE, ROWS, Change, Row, page, render, scripts, summary
from benchmarks.field_data import MADE


def change(settings: str, predicted: float | None, measured: float | None, verdict: str, *findings: str) -> Change:
    low, high = (None, None) if measured is None else (measured * 0.99, measured * 1.01)
    return Change(settings, findings, predicted, measured, low, high, verdict)


MADE_UP = [
    Row(
        "right",
        "tuned",
        "",
        found=("input_wait",),
        changes=(
            change("loader.num_workers=2", 1.5, 1.5, "gain", "input_wait"),
            change("loader.num_workers=1", None, 1.6, "gain"),
            change("optimizer.fused=True", 1.1, 1.0, "no_gain", "unfused_optimizer"),
        ),
    ),
    Row(
        "wrong",
        "held_out",
        "",
        changes=(
            change("loader.num_workers=2", 1.2, 0.8, "slower", "input_wait"),
            change("torch.compile=default", None, 1.4, "gain"),
            change("gc.freeze=True", 1.3, None, "not_tried", "gc_pauses"),
        ),
    ),
    Row("unseen", "held_out", "", why="no report"),
]


def test_figures_of_the_advice() -> None:
    figures = summary(MADE_UP)
    assert (figures["scripts"], figures["tried"], figures["named"]) == (3, 2, 4)
    assert (figures["signs"], figures["signs_right"]) == (3, 2)
    # Steps predicted 1.5, 1.1 and 1.2 times faster are 1.5, 1 and 0.8 times faster.
    assert figures["median_error"] == pytest.approx(1 - 1.0 / 1.1)
    assert figures["ninth_tenth_error"] == pytest.approx(1 - 0.8 / 1.2)
    assert (figures["levers"], figures["levers_named"]) == (2, 1)


def test_another_value_of_a_named_setting_counts_as_named() -> None:
    assert MADE_UP[0].is_named
    assert MADE_UP[1].is_named is False
    assert MADE_UP[2].is_named is None


def test_the_page_marks_what_was_missed() -> None:
    missed = [line for line in render(MADE_UP).split("\n") if "**missed**" in line]
    assert len(missed) == 1
    assert "torch.compile=default" in missed[0]


def test_the_page_is_made_of_what_is_kept() -> None:
    assert PAGE.read_text() == page(ROWS)


def test_the_list_has_both_halves_and_data_for_each() -> None:
    listed = scripts()
    assert len(listed) >= 16
    assert len({s.name for s in listed}) == len(listed)
    assert {s.half for s in listed} == {"tuned", "held_out"}
    assert {s.data for s in listed} - {""} <= set(MADE)
    assert [s.name for s in scripts(["dlrm"])] == ["dlrm"]


def test_images_are_in_the_format_that_torchvision_reads(tmp_path: Path) -> None:
    MADE["mnist"](tmp_path / "mnist")
    images = (tmp_path / "data/MNIST/raw/t10k-images-idx3-ubyte").read_bytes()
    assert struct.unpack(">4i", images[:16]) == (2051, 2000, 28, 28)
    assert len(images) == 16 + 2000 * 28 * 28
