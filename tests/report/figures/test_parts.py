"""Where the step goes: every rank and part is there, for any number of ranks."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from dlprof.plain import NBSP
from dlprof.report import looks
from dlprof.report.figures import parts
from dlprof.result import Blame, TimePart
from tests.fixtures import results
from tests.fixtures.results import MS


def test_the_stack_holds_each_rank_and_its_parts_add_up_to_the_step() -> None:
    figure = parts.stack(results.ddp())
    assert figure is not None
    assert figure.spec is not None
    traces = figure.spec["data"]
    drawn = ("computation", "communication", "waiting", "copy", "input_wait", "checkpoint", "host", "other")
    assert figure.legend == drawn
    assert [t["marker"]["color"] for t in traces] == [looks.DRAWN[c].light for c in drawn]
    for i in range(4):
        assert sum(t["x"][i] for t in traces) == pytest.approx(214.6, rel=1e-4)
    assert [a["text"] for a in figure.spec["layout"]["annotations"]] == ["◀ finding 2", "◀ finding 1"]


def test_waiting_for_other_ranks_is_drawn_apart_from_what_else_communicates() -> None:
    figure = parts.stack(results.ddp())
    assert figure is not None
    assert figure.spec is not None
    transfer, waiting = figure.spec["data"][1:3]
    assert waiting["x"] == [pytest.approx(share * 214.6) for share in (0.28, 0, 0.28, 0.28)]
    assert transfer["x"] == [pytest.approx(share * 214.6) for share in (0.03, 0.04, 0.02, 0.01)]
    assert "all of it for rank 1" in waiting["hovertext"][0]
    assert figure.table.columns[1:4] == ("Computation", "Communication", "of it waiting")
    assert len({len(row) for row in figure.table.rows} | {len(figure.table.columns), len(figure.table.numeric)}) == 1


def test_what_is_too_short_to_be_seen_is_in_the_table_and_not_in_the_legend() -> None:
    short = replace(results.ddp(), time=(*results.ddp().time, TimePart(0, "compilation", 0.1 * MS, 0.0005)))
    figure = parts.stack(short)
    assert figure is not None
    assert "compilation" not in figure.legend
    assert "Compilation" in figure.table.columns


def test_no_divided_step_no_stack() -> None:
    assert parts.stack(results.empty()) is None


@pytest.mark.parametrize("ranks", [16, 17, 128, 129, 1000])
def test_the_stack_stays_readable_for_any_number_of_ranks(ranks: int) -> None:
    figure = parts.stack(results.many(ranks))
    assert figure is not None
    assert figure.spec is not None
    layout = figure.spec["layout"]
    bars = len(figure.spec["data"][0]["x"])
    assert bars <= parts.SINGLE_RANKS
    assert layout["height"] <= 1000
    assert len(layout["yaxis"]["tickvals"]) <= 30
    assert bool(figure.note) == (ranks > parts.SINGLE_RANKS)
    if ranks > parts.SINGLE_RANKS:  # the slow one still stands by itself
        assert layout["yaxis"]["ticktext"][0] == "rank 37"
        assert figure.spec["data"][0]["x"][0] == pytest.approx(0.9 * 512)


def test_the_device_table_starts_with_the_mean_and_its_parts_are_shares_of_the_span() -> None:
    table = parts.device(results.ddp())
    assert table is not None
    assert [row[0] for row in table.rows] == ["mean", "0", "1", "2", "3"]
    assert table.rows[2][3].replace(NBSP, " ").endswith("· 4.0 %")
    assert parts.device(results.healthy()) is None


def test_who_is_waited_for_stands_with_what_made_it_late() -> None:
    figure = parts.blame(results.ddp())
    assert figure is not None
    assert figure.spec is not None
    assert figure.legend == ("computation", "input_wait")
    # Three of four ranks wait: the mean is theirs, as in the sentence above it.
    assert [t["x"] for t in figure.spec["data"]] == [pytest.approx([share * 214.6]) for share in (0.02, 0.26)]
    assert [a["text"].replace(NBSP, " ") for a in figure.spec["layout"]["annotations"]] == ["3 ranks wait"]
    assert [row[0] for row in figure.table.rows] == ["rank 0", "rank 2", "rank 3"]


def test_of_hundreds_of_culprits_the_worst_are_drawn_and_short_waits_are_none() -> None:
    ranks = 256
    blame = tuple(
        Blame(rank, culprit, "host", (culprit + 1) * MS, 0.1)
        for rank in range(ranks)
        for culprit in range(40)
        if rank != culprit
    )
    made = replace(results.many(ranks), blame=blame)
    figure = parts.blame(made)
    assert figure is not None
    assert figure.spec is not None
    assert figure.spec["layout"]["yaxis"]["ticktext"] == [f"rank {c}" for c in range(39, 31, -1)]
    assert figure.note
    assert parts.blame(replace(made, blame=tuple(replace(b, ns=1.0) for b in blame))) is None
    assert parts.blame(replace(made, blame=())) is None
