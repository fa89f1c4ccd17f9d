"""The terminal's lines fit, begin with the diagnosis, and repeat nothing that a terminal would obey."""

from __future__ import annotations

import re
import unicodedata

import pytest
from msgspec.structs import replace

from dlprof.report import looks, terminal
from dlprof.result import ForeignLoad, Place
from tests.fixtures import results


def shown_width(line: str) -> int:
    wide = sum(unicodedata.east_asian_width(c) in "WF" for c in line)
    return len(line) + wide - sum(1 for c in line if unicodedata.combining(c))


@pytest.mark.parametrize("width", [40, 80, 132])
@pytest.mark.parametrize("name", results.ALL)
def test_every_line_fits(name: str, width: int) -> None:
    for line in terminal.render(results.ALL[name](), width).split("\n"):
        assert shown_width(line) <= width, line


@pytest.mark.parametrize("name", results.ALL)
def test_colour_changes_nothing_but_colour(name: str) -> None:
    result = results.ALL[name]()
    coloured = terminal.render(result, 100, colour=True)
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == terminal.render(result, 100)
    assert "\x1b[" in coloured


@pytest.mark.parametrize("name", results.ALL)
def test_nothing_that_a_terminal_obeys_comes_through(name: str) -> None:
    text = terminal.render(results.ALL[name](), 80)
    acting = {c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")} - {"\n"}
    assert acting == set()


def test_the_diagnosis_comes_before_all_but_the_name_of_the_run() -> None:
    lines = terminal.render(results.ddp()).split("\n")
    assert lines[0] == "ddp_resnet.py · 4 × NVIDIA H200 · 412 steady steps of 214.6 ms"
    assert [line.strip() for line in lines[1:4]] == [
        "",
        "31 % of each step waits for data on rank 1.",
        "Fixing it at train.py:61 would make this job 1.44 × faster.",
    ]


def test_findings_are_numbered_largest_first_with_figures_ranks_and_advice() -> None:
    text = terminal.render(results.ddp(), 200)
    numbered = re.findall(r"^  (\d)  (\w+) +(−\S+ ms) +(\S+ ×)$", text, re.M)
    assert numbered == [
        ("1", "input_wait", "−66.0 ms", "1.44 ×"),
        ("2", "checkpoint_stall", "−25.7 ms", "1.14 ×"),
        ("3", "slow_worker_batches", "−3.10 ms", "1.01 ×"),
    ]
    assert "every 7 steps (rank 0)" in text
    assert "→ DataLoader(train, batch_size=64, num_workers=6" in text
    assert "clear: 5 rules · not measured: 2 (the report says why) · errors: slow_link2" in text
    assert "1.04 × as long" in text


def test_what_changes_the_training_stands_after_the_cures_and_without_a_number() -> None:
    text = terminal.render(results.training(), 200)
    cures, heading, apart = text.partition("  If the training may change:\n")
    assert heading
    assert (
        cures
        == terminal.render(results.ddp(), 200)
        .partition("\n  clear:")[0]
        .replace("Save less often, or with torch", "torch")
        .replace("async_save.", "async_save")
        + "\n"
    )
    assert "All of these together: at most 1.79 × faster (−94.8 ms)." in cures
    assert apart.startswith("  ·  memory_headroom   −100.0 ms    1.87 ×\n     A larger batch would fit")
    assert "     → batch_size=96 (is 64)\n" in apart
    assert heading not in terminal.render(results.ddp(), 200)
    assert "save every 70" not in text  # the first change is the cure


def test_a_healthy_run_has_bars_and_no_findings() -> None:
    text = terminal.render(results.healthy())
    assert "Computation takes 89 % of each step." in text
    assert "→" not in text
    assert len(re.findall(r"^  rank \d ", text, re.M)) == 2


def test_bars_are_as_long_as_each_other_and_divided_in_proportion() -> None:
    lines = [line for line in terminal.render(results.ddp(), 120).split("\n") if line.startswith("  rank ")]
    glyphs = "".join(look.glyph for look in looks.LOOKS.values())
    bars = [re.match(rf"  rank \d  ([{re.escape(glyphs)}]+)   ", line) for line in lines]
    lengths = {len(bar[1]) for bar in bars if bar}
    assert len(lines) == 4
    assert None not in bars
    assert lengths == {40}
    first = bars[0]
    assert first is not None
    assert abs(first[1].count("█") - 0.58 * 40) <= 1


def test_of_many_ranks_the_first_and_the_odd_one_are_drawn() -> None:
    text = terminal.render(results.many(64))
    drawn = [int(r) for r in re.findall(r"^  rank (\d+) ", text, re.M)]
    assert drawn == [0, 1, 2, 3, 4, 5, 6, 7, 37]
    assert "… 55 more: computation 59 % to 61 %" in text


def test_a_long_call_takes_two_lines() -> None:
    first = results.ddp().found[0]
    call = Place("train.py", 61, "main", what=f"DataLoader( data, {', '.join(f'option_{n}={n}' for n in range(20))}, )")
    lines = terminal.render(replace(results.ddp(), outcomes=(replace(first, where=(call,)),)), 60).split("\n")
    at = next(n for n, line in enumerate(lines) if line.strip().startswith("at train.py:61 in main: DataLoader(data,"))
    assert lines[at + 1].strip().startswith("option_")
    assert lines[at + 1].endswith("…")
    assert not any("option" in line for line in lines[at + 2 :])
    assert max(map(len, lines)) <= 60


def test_the_first_place_and_the_edit_stand_under_a_finding() -> None:
    lines = [line.strip() for line in terminal.render(results.ddp(), 120).split("\n")]
    at = lines.index("at train.py:61 in main: train = DataLoader(data, batch_size=64, num_workers=2)")
    assert not any("data.py:41" in line for line in lines)
    advice = next(n for n, line in enumerate(lines) if line.startswith("→ DataLoader(train"))
    edits = [line for line in lines if line.startswith(("-  ", "+  "))]
    assert at < advice < lines.index(edits[0])
    assert [line.split(" ", 1)[1].strip() for line in edits] == [
        "train = DataLoader(data, batch_size=64, num_workers=2)",
        "train = DataLoader(data, batch_size=64, num_workers=6, persistent_workers=True)",
    ]


def test_rules_are_not_clear_where_other_programs_used_the_cores() -> None:
    load = ForeignLoad("node-1", cores=2.0, used=2.0, foreign=1.0, waited=None, disturbs=True)
    text = terminal.render(replace(results.healthy(), foreign_load=load))
    assert "clear beside other programs: " in text
    assert "clear: " not in text
    assert "clear: " in terminal.render(results.healthy())
