"""A collective that ranks never entered: found, with who and where; completed ones, and one rank, left alone."""

from __future__ import annotations

from pathlib import Path

from dlprof.analysis.communication.rules.hung_collective import RULE
from dlprof.analysis.diagnosis import diagnose
from dlprof.analysis.rules import RULES
from dlprof.read.run import open_run
from dlprof.report import verdict
from tests.fixtures import dumps, runs, traces
from tests.fixtures.asking import ask
from tests.fixtures.dumps import OPEN, STARTED, call, dumped
from tests.fixtures.places import GOLDEN

DONE = [call(n) for n in range(1, 4)]


def test_the_ranks_that_never_came_are_named_first(tmp_path: Path) -> None:
    found = ask(RULE, dumps.hung(tmp_path / "d"))
    assert (found.state, found.scope, found.ranks, found.saving_ns) == ("found", "failure", (3, 5), 0.0)
    assert found.verdict.startswith("Ranks 3 and 5 never entered all_reduce #4 of the default group; ranks 0 to 2")
    assert found.evidence is not None
    assert [row[:3] for row in found.evidence.rows][2:4] == [
        (2, "waits in", "all_reduce #4 of the default group"),
        (3, "last issued", "all_reduce #3 of the default group"),
    ]


def test_a_rank_without_a_dump_is_not_blamed(tmp_path: Path) -> None:
    waits = [*DONE, call(4, **OPEN)]
    found = ask(RULE, dumped(tmp_path / "d", waits, None, waits))
    assert (found.state, found.ranks) == ("found", (1,))
    assert "never entered" not in found.verdict
    assert "left no dump" in found.verdict


def test_a_collective_that_all_entered(tmp_path: Path) -> None:
    found = ask(RULE, dumped(tmp_path / "d", [*DONE, call(4, **STARTED)], [*DONE, call(4, **OPEN)]))
    assert (found.state, found.ranks) == ("found", (0, 1))
    assert "only queued on rank 1" in found.summary


def test_other_operations_are_another_rules(tmp_path: Path) -> None:
    answer = ask(RULE, dumped(tmp_path / "d", [*DONE, call(4, **OPEN)], [*DONE, call(4, "broadcast", **OPEN)]))
    assert (answer.state, "mismatched_collectives" in answer.summary) == ("clear", True)


def test_a_healthy_job_is_left_alone(tmp_path: Path) -> None:
    assert ask(RULE, dumped(tmp_path / "d", DONE, DONE)).state == "clear"


def test_without_dumps_it_abstains(tmp_path: Path) -> None:
    two = runs.foreign(tmp_path, traces.training(rank=0), traces.training(rank=1))
    assert "TORCH_FR_BUFFER_SIZE" in ask(RULE, two).why
    (tmp_path / "one").mkdir()
    assert ask(RULE, runs.cpu_run(tmp_path / "one", 5_000_000)).state == "does_not_apply"


def test_the_report_of_a_real_hang_begins_with_it() -> None:
    result = diagnose(open_run(GOLDEN / "flight_recorder"), RULES, jobs=1)
    assert not [o for o in result.outcomes if o.state == "error"]
    first, second, _ = verdict.headline(result)
    assert first.startswith(
        "Rank 2 never entered all_reduce #6 of the default group; ranks 0, 1 and 3 wait in it since"
    )
    assert "until this is fixed" in second


def test_it_comes_before_any_saving(tmp_path: Path) -> None:
    for rank in range(2):
        traces.write(tmp_path / f"rank{rank}.json", traces.training(rank=rank))
    dumped(tmp_path, [*DONE, call(4, **OPEN)], DONE)
    result = diagnose(open_run(tmp_path), RULES, jobs=1)
    assert result.found[0].id == "hung_collective"
    assert verdict.headline(result)[0].startswith("Rank 1 never entered")
