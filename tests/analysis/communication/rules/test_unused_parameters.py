"""The search for unused parameters: found where there are none, silent elsewhere, abstaining where nobody tells."""

from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.communication.rules.unused_parameters import RULE
from dlprof.result import Outcome
from tests.fixtures import runs, traces
from tests.fixtures.asking import ask
from tests.fixtures.runs import MS

SEARCH = "torch.distributed.ddp.reducer::search_unused_parameters"


def trained(folder: Path, took: int = 100_000, **ddp: Any) -> Outcome:
    """Ask of three steps of 1 ms on a CPU, in each of which DDP searches for so many ns."""
    events: list[Any] = []
    for n in range(3):
        t = n * MS
        events += [traces.step(n, t, MS), traces.op("aten::mm", t, 500_000), traces.op(SEARCH, t + 500_000, took)]
    made = traces.trace(*events, device="", backend="gloo", world_size=1)
    told = {"find_unused_parameters": True, "unused_parameter_bytes": 0} | ddp
    return ask(
        RULE, runs.recorded(folder / "run", (made, [], {**runs.CPU, "models": [{"parameters": 9, "ddp": told}]}))
    )


def test_found_where_none_is_unused(tmp_path: Path) -> None:
    found = trained(tmp_path)
    assert found.state == "found"
    assert found.saving_ns == pytest.approx(100_000)
    assert "find_unused_parameters=False" in found.advice[0]


@pytest.mark.parametrize("ddp", [{"unused_parameter_bytes": 4096}, {"find_unused_parameters": False}])
def test_left_alone_where_it_is_needed_or_off(tmp_path: Path, ddp: dict[str, Any]) -> None:
    assert trained(tmp_path, **ddp).state == "clear"


def test_a_short_search_is_left_alone(tmp_path: Path) -> None:
    assert trained(tmp_path, took=5_000).state == "clear"


def test_where_ddp_did_not_tell_it_abstains(tmp_path: Path) -> None:
    answer = trained(tmp_path, unused_parameter_bytes=None)
    assert (answer.state, "does not report" in answer.why) == ("not_measured", True)


def test_a_foreign_trace_abstains(tmp_path: Path) -> None:
    assert ask(RULE, runs.foreign(tmp_path, traces.training(3))).state == "not_measured"
