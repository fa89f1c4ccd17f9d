"""Who waits for whom, and which calls differ, by the flight recorders' dumps; and what the two rules make of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.communication.recorder import hangs, mismatches, moment, rank_places
from dlprof.analysis.communication.rules import hung_collective, mismatched_collectives
from dlprof.analysis.diagnosis import diagnose
from dlprof.analysis.input.rules import input_wait
from dlprof.analysis.rules import RULES
from dlprof.read.run import open_run
from dlprof.report import verdict
from tests.fixtures import dumps, runs, traces
from tests.fixtures.asking import ask
from tests.fixtures.dumps import OPEN, STARTED, call, dumped
from tests.fixtures.places import GOLDEN
from tests.fixtures.runs import measured

DEFAULT = "the default group"
DONE = [call(n) for n in range(1, 4)]
WAITS = [*DONE, call(4, **OPEN)]
# Gloo's never leave "scheduled": what the process waits for no more is done where all entered it.
GLOO = [call(n, state="scheduled") for n in range(1, 5)]


def within(name: str, number: int, **said: Any) -> dict[str, Any]:
    return call(number, process_group=(name, f"pg{name}"), **said)


def hang(group: str, sequence: int, waiting: tuple[int, ...], missing: tuple[int, ...] = (), **more: Any) -> Any:
    told = {"unknown": (), "began": (), "left": False, "follows": False} | more
    return {"group": group, "sequence": sequence, "waiting": waiting, "missing": missing} | told


QUEUED = [*DONE, *(call(n, **OPEN) for n in range(4, 9))]
STATUS = {"pg_status": {"0": {"last_enqueued_collective": 4}}}
BROADCAST = [*GLOO[:3], call(4, "broadcast", state="scheduled")]
# Rank 2 waits for 3 in group 5; so it never comes to the default group's, in which 0 and 1 wait.
STUCK = [*DONE, within("5", 1, **OPEN, time_created_ns=traces.BASE_NS + 9_000_000)]
BOTH = [within("a", 1), within("b", 1)]
ONE, OTHER = [*BOTH, within("a", 2, **OPEN)], [*BOTH, within("b", 2, **OPEN)]

# The dumps of each rank, what is said beside them, the hangs, and the ranks that the rule names; none: clear.
HANGS: dict[str, tuple[list[Any], dict[str, Any], list[Any], tuple[int, ...]]] = {
    "two never came": (
        [DONE if rank in (3, 5) else WAITS for rank in range(8)],
        {},
        [hang(DEFAULT, 4, (0, 1, 2, 4, 6, 7), (3, 5))],
        (3, 5),
    ),
    "no dump is not known to be missing": ([WAITS, None, WAITS], {}, [hang(DEFAULT, 4, (0, 2), unknown=(1,))], (1,)),
    "one only queued": ([[*DONE, call(4, **STARTED)], WAITS], {}, [hang(DEFAULT, 4, (0, 1), began=(0,))], (0, 1)),
    "the oldest of several counts": ([QUEUED, DONE], {}, [hang(DEFAULT, 4, (0,), (1,))], (1,)),
    "a later number shows that it entered": (
        [WAITS, [call(9, **OPEN)]],
        {},
        [hang(DEFAULT, 9, (1,), (0,)), hang(DEFAULT, 4, (0,))],
        (0,),
    ),
    "so does its status": ([WAITS, DONE], STATUS, [hang(DEFAULT, 4, (0,))], (0,)),
    "completed": ([[*DONE, call(4)], DONE], {}, [], ()),
    "gloo's that all entered": ([GLOO, GLOO], {}, [], ()),
    "left unfinished": ([GLOO, GLOO[:3]], {}, [hang(DEFAULT, 4, (0,), (1,), left=True)], (1,)),
    "gloo's broadcast ends on its source first": ([BROADCAST, GLOO[:3]], {}, [], ()),
    "the cause comes first": (
        [WAITS, WAITS, STUCK, [*DONE, within("5", 0)]],
        {},
        [hang("group pg5", 1, (2,), (3,)), hang(DEFAULT, 4, (0, 1), (2, 3))],
        (3,),
    ),
    "of ranks that wait for each other none is first": (
        [ONE, OTHER],
        {},
        [hang("group pga", 2, (0,), (1,)), hang("group pgb", 2, (1,), (0,))],
        (1,),
    ),
    # That is mismatched_collectives'.
    "another operation": ([WAITS, [*DONE, call(4, "broadcast", **OPEN)]], {}, [hang(DEFAULT, 4, (0, 1))], ()),
}


@pytest.mark.parametrize(("ranks", "more", "expected", "guilty"), HANGS.values(), ids=HANGS)
def test_who_waits_in_what_for_whom(
    ranks: list[Any], more: Any, expected: list[Any], guilty: tuple[int, ...], tmp_path: Path
) -> None:
    path = dumped(tmp_path / "d", *ranks, **more)
    found = measured(path, hangs).frame(hangs)
    assert [{name: getattr(one, name) for name in hang("", 0, ())} for one in found] == expected
    outcome = ask(hung_collective.RULE, path)
    assert (outcome.state, outcome.scope) == ("found" if guilty else "clear", "failure")
    assert (outcome.ranks, outcome.saving_ns) == (guilty, 0.0)
    first = expected[0] if expected else hang("", 0, ())
    assert ("never entered" in outcome.verdict) is bool(first["missing"])
    assert ("left no dump" in outcome.verdict) is bool(first["unknown"])
    assert ("only queued on rank 1" in outcome.summary) is bool(first["began"])


def test_where_each_rank_is_and_since_when(tmp_path: Path) -> None:
    path = dumps.hung(tmp_path / "d")
    (one,) = measured(path, hangs).frame(hangs)
    assert (one.named, one.since_ns) == ("all_reduce #4 of the default group", traces.BASE_NS + 4_000_000)
    assert (one.site, one.timeout_ms) == ("train (train.py:28)", 600_000)
    frame = measured(path, rank_places).frame(rank_places)
    places = {row["rank"]: [row[c] for c in ("doing", "op", "sequence", "state")] for row in frame.to_dict("records")}
    assert places[3] == ["last issued", "all_reduce", 3, "completed"]
    assert places[0] == ["waits in", "all_reduce", 4, "scheduled"]
    found = ask(hung_collective.RULE, path)
    assert found.evidence is not None
    assert found.evidence.rows[3][:3] == (3, "last issued", "all_reduce #3 of the default group")
    assert (moment(1_700_000_000_000_000_000), moment(0)) == ("2023-11-14 22:13:20 UTC", "")


def test_groups_of_one_name_and_other_ranks_are_not_mixed(tmp_path: Path) -> None:
    for rank, members in ((0, [0, 1]), (1, [0, 1]), (2, [2, 3]), (3, [2, 3])):
        held = dumps.dump([within("5", n) for n in range(1, 3 if rank < 2 else 8)], 4)
        held["pg_config"]["5"] = {"name": "5", "desc": "pg5", "ranks": str(members)}
        if rank == 0:
            held["entries"].append(within("5", 3, **OPEN))
        dumps.write(tmp_path / f"fr_{rank}", held)
    (one,) = measured(tmp_path, hangs).frame(hangs)
    assert (one.missing, one.waiting) == ((1,), (0,))


def test_the_report_of_a_real_hang_begins_with_it() -> None:
    result = diagnose(open_run(GOLDEN / "flight_recorder"), RULES, jobs=1)
    assert not [o for o in result.outcomes if o.state == "error"]
    assert verdict.headline(result)[0].startswith(
        "Rank 2 never entered all_reduce #6 of the default group; ranks 0, 1 and 3 wait in it since"
    )
    (one,) = measured(GOLDEN / "flight_recorder", hangs).frame(hangs)
    assert (one.site, one.timeout_ms) == ("<module> (train.py:36)", 30_000)


def test_a_hang_comes_before_savings(tmp_path: Path) -> None:
    for rank in range(2):
        traces.write(tmp_path / f"rank{rank}.json", traces.training(rank=rank))
    dumped(tmp_path, WAITS, DONE)
    result = diagnose(open_run(tmp_path), (input_wait.RULE, hung_collective.RULE), jobs=1)
    assert [one.id for one in result.found] == ["hung_collective", "input_wait"]
    assert verdict.headline(result)[0].startswith("Rank 1 never entered")


def test_other_operations_types_and_sizes_of_one_number(tmp_path: Path) -> None:
    odd = [
        call(1),
        call(2, "broadcast"),
        call(3, input_sizes=[[999]], output_sizes=[[999]]),
        call(4, input_dtypes=["Half"], output_dtypes=["Half"]),
        call(5, "all_to_all", input_sizes=[[3]]),
    ]
    same = [*(call(n) for n in range(1, 5)), call(5, "all_to_all", input_sizes=[[4]])]
    path = dumped(tmp_path / "d", same, same, odd)
    frame = measured(path, mismatches).frame(mismatches)
    assert frame[["sequence", "differs", "ranks", "op", "input", "dtype"]].to_numpy().tolist() == [
        [2, "operation", "0, 1", "all_reduce", "1000", "Float"],
        [2, "operation", "2", "broadcast", "1000", "Float"],
        [3, "size", "0, 1", "all_reduce", "1000", "Float"],
        [3, "size", "2", "all_reduce", "999", "Float"],
        [4, "element type", "0, 1", "all_reduce", "1000", "Float"],
        [4, "element type", "2", "all_reduce", "1000", "Half"],
    ]
    found = ask(mismatched_collectives.RULE, path)
    assert (found.state, found.scope, found.ranks) == ("found", "failure", (2,))
    assert "all_reduce on ranks 0, 1 and broadcast on rank 2" in found.verdict
    assert found.evidence is not None
    assert found.evidence.rows[1][:4] == (DEFAULT, 2, "operation", "2")
    # Of two, nobody knows which is right.
    found = ask(mismatched_collectives.RULE, dumped(tmp_path / "two", [same[0], same[2]], [odd[0], odd[2]]))
    assert (found.ranks, "all_reduce of 999 elements on rank 1" in found.verdict) == ((0, 1), True)


def old(op: str, number: int) -> dict[str, Any]:
    """Return an entry of an old dump, whose numbers count sends too."""
    made = call(number, op)
    del made["collective_seq_id"]
    return {**made, "seq_id": number}


@pytest.mark.parametrize(
    ("ranks", "more", "state", "told"),
    [
        ([WAITS, WAITS, DONE], {}, "clear", "4 collectives"),
        ([DONE, None], {}, "not_measured", "one rank alone"),
        (
            [[old("send 0->1", 1), old("all_reduce", 2)], [old("all_reduce", 1), old("all_gather", 2)]],
            {"version": "1.0"},
            "clear",
            "",
        ),
    ],
)
def test_the_same_calls_are_left_alone(ranks: list[Any], more: Any, state: str, told: str, tmp_path: Path) -> None:
    answer = ask(mismatched_collectives.RULE, dumped(tmp_path / "d", *ranks, **more))
    assert answer.state == state
    assert told in answer.summary + answer.why


@pytest.mark.parametrize("rule", [hung_collective.RULE, mismatched_collectives.RULE], ids=lambda rule: rule.id)
def test_without_dumps_it_abstains(rule: Any, tmp_path: Path) -> None:
    two = runs.foreign(tmp_path, traces.training(rank=0), traces.training(rank=1))
    assert "TORCH_FR_BUFFER_SIZE" in ask(rule, two).why
    (tmp_path / "one").mkdir()
    assert ask(rule, runs.cpu_run(tmp_path / "one", 5_000_000)).state == "does_not_apply"
