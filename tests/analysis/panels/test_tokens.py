"""The table of tokens per rank, also where only some ranks are here."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.experts.tokens import destinations, expert_balance, routed
from dlprof.analysis.panels.experts import draw
from dlprof.result import Panel
from tests.fixtures import runs
from tests.fixtures.routed import routed as made
from tests.fixtures.runs import asked

FULL = ((100, 100, 100, 500), (100, 100, 200, 400))


def test_the_fullest_rank_is_the_first_row(tmp_path: Path) -> None:
    run = runs.measured(runs.foreign(tmp_path, *made(*FULL)), expert_balance, destinations, routed)
    (panel,) = asked(run, draw)
    assert panel.columns[:3] == ("rank", "tokens a dispatch", "of the mean_times")
    assert panel.rows[0] == pytest.approx((3, 450, 2.25, 550_000, 0))
    assert len(panel.rows) == 4
    assert "2.25 × the mean rank's tokens" in panel.note


def of_job(folder: Path, *experts: int, backward: bool = False) -> Panel:
    """Draw a recorded job of two layers whose ranks hold so many experts of each."""
    ranks: list[tuple[Any, list[Any], Any]] = [(one, [], runs.GPU) for one in made(*FULL, backward=backward)]
    run = runs.recorded(folder, *ranks)
    for rank, number in enumerate(experts):
        write_modules(run / "ranks" / f"{rank:05d}", number)
    (panel,) = asked(runs.measured(run, expert_balance, destinations, routed), draw)
    return panel


def write_modules(rank: Path, experts: int) -> None:
    """Write the modules of two layers with so many experts each, and one that all tokens pass."""
    kinds = {"": "Model", "0.shared_experts": "MLP", "1.shared_experts": "MLP"}
    for layer in (0, 1):
        kinds[f"{layer}.experts"] = "ModuleList"
        for number in range(experts):
            kinds |= {f"{layer}.experts.{number}": "MLP", f"{layer}.experts.{number}.up": "Linear"}
    rows = [{"path": path, "kind": kind, "parameters": 8, "parameter_bytes": 32} for path, kind in kinds.items()]
    more = {"bucket": -1, "forward_flops": -1, "recompute_flops": -1, "backward_flops": -1, "sharded": 0}
    (rank / "modules.jsonl").write_text("".join(json.dumps(row | more) + "\n" for row in rows))


def test_tokens_of_a_rank_are_its_experts_where_it_holds_one_of_each_layer(tmp_path: Path) -> None:
    panel = of_job(tmp_path, 1, 1, 1, 1, backward=True)
    assert panel.title == "Tokens per expert"
    assert panel.columns[:3] == ("expert", "rank", "tokens a dispatch")
    # The tokens of one dispatch, not those of the forward and the backward pass together.
    assert [row[:3] for row in panel.rows] == [(3, 3, 450), (2, 2, 150), (0, 0, 100), (1, 1, 100)]
    assert "one expert of each of 2 layers" in panel.note


@pytest.mark.parametrize(
    ("experts", "why"),
    [
        ((2, 2, 2, 2), "not in the trace: each rank holds 2 experts of a layer"),
        ((1, 1, 1, 2), "not in the trace: ranks hold up to 2 experts of a layer"),
        ((1, 1, 1, 0), "not every rank holds an expert"),
        ((1, 1, 1), "how many experts each rank holds is not known"),
        ((), "how many experts each rank holds is not known"),
    ],
)
def test_else_the_page_says_why_tokens_per_expert_are_not_known(
    tmp_path: Path, experts: Sequence[int], why: str
) -> None:
    panel = of_job(tmp_path, *experts)
    assert panel.title == "Tokens per rank"
    assert panel.columns[0] == "rank"
    assert why in panel.note


def test_of_missing_ranks_it_is_known_what_the_others_send_them(tmp_path: Path) -> None:
    run = runs.measured(runs.foreign(tmp_path, *made(*FULL)[:2]), expert_balance, destinations, routed)
    (panel,) = asked(run, draw)
    assert panel.title == "Tokens sent to each rank"
    assert panel.rows[0] == pytest.approx((3, 225, 2.25))
