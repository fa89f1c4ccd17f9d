"""The page's tables and heat maps of many ranks: small, complete, and outliers by name."""

from __future__ import annotations

import json
from itertools import pairwise

from msgspec.structs import replace

from dlprof.plain import NBSP
from dlprof.report import html
from dlprof.report.figures import members, parts
from dlprof.result import Blame, Result, TimePart
from dlprof.result.figures import Member
from tests.fixtures import results
from tests.fixtures.results import MS

RANKS, HOST = 1_024, 8
SLOW = 338


def many() -> Result:
    """Return a run of 1,024 ranks in two stages: one computes longer, and the others of its stage wait for it."""
    time, found, blame = [], [], []
    for rank in range(RANKS):
        computes = 0.9 if rank == SLOW else 0.5 + 0.1 * (rank % 2)
        time.append(TimePart(rank, "computation", computes * 200 * MS, computes))
        time.append(TimePart(rank, "communication", (1 - computes) * 200 * MS, 1 - computes))
        of = (f"node-{rank // HOST + 1}", f"stage {rank % 2}")
        if rank == SLOW:
            found.append(Member(rank, *of, "computation", 180 * MS, 100 * MS))
        else:
            found.append(Member(rank, *of))
            if rank % 2 == SLOW % 2:
                blame.append(Blame(rank, SLOW, "computation", 60 * MS, 0.3))
    return replace(results.ddp(), time=tuple(time), members=tuple(found), blame=tuple(blame), outcomes=(), device=())


def test_the_page_of_many_ranks_is_small_and_names_who_stands_out() -> None:
    page = html.render(many())
    assert len(page.encode()) < 2_000_000
    assert "Ranks unlike the others" in page
    assert f'<th scope="row">rank {SLOW}</th>' in page


def test_few_ranks_have_no_groups() -> None:
    assert members.shown(results.ddp()) is None
    assert "Groups of like ranks" not in html.render(results.ddp())


def test_the_groups_have_all_ranks_but_those_that_stand_out() -> None:
    shown = members.shown(many())
    assert shown is not None
    assert [row[:3] for row in shown.groups.rows] == [("stage 0", "511", "128"), ("stage 1", "512", "128")]
    assert shown.unlike is not None
    assert [row[:4] for row in shown.unlike.rows] == [(f"rank {SLOW}", "node-43", "stage 0", "more computation")]


def test_the_stack_has_a_bar_a_group_and_one_for_who_stands_out() -> None:
    figure = parts.stack(many())
    assert figure is not None
    assert figure.spec is not None
    labels = figure.spec["layout"]["yaxis"]["ticktext"]
    assert labels == [f"rank {SLOW}", f"stage 0 · 511{NBSP}ranks", f"stage 1 · 512{NBSP}ranks"]


def test_the_heat_map_covers_every_rank_in_each_row_and_joins_what_is_alike() -> None:
    shown = members.shown(many())
    assert shown is not None
    spec = shown.by_category.spec
    assert spec is not None
    (trace,) = spec["data"]
    end = spec["layout"]["xaxis"]["range"][1]
    for row in (0, 1):
        cells = sorted((b, x) for b, x, y in zip(trace["base"], trace["x"], trace["y"], strict=True) if y == row)
        assert cells[0][0] == 0
        assert all(b + x == after for (b, x), (after, _) in pairwise(cells))
        assert sum(cells[-1]) == end
    darkest = max(range(len(trace["x"])), key=lambda i: (trace["y"][i] == 0) * trace["marker"]["opacity"][i])
    assert f"rank {SLOW}" in trace["hovertext"][darkest]
    assert len(json.dumps(spec)) < 20_000


def test_who_waits_for_whom_is_by_host() -> None:
    shown = members.shown(many())
    assert shown is not None
    assert shown.by_pair is not None
    assert shown.by_pair.spec is not None
    assert shown.by_pair.spec["layout"]["xaxis"]["ticktext"] == ["node-43"]
    (trace,) = shown.by_pair.spec["data"]
    # Half of each host's ranks wait 60 of 214.6 ms; of the slow one's own host, three of eight do.
    assert sum(trace["y"]) == RANKS / HOST
    assert f"14{NBSP}% of the step for node-43" in trace["hovertext"][0]


def test_nobody_waits_no_map_of_pairs() -> None:
    shown = members.shown(replace(many(), blame=()))
    assert shown is not None
    assert shown.by_pair is None
