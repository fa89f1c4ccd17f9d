"""Who waits for whom, by the flight recorders' dumps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dlprof.analysis.communication import recorder
from dlprof.analysis.communication.recorder import hangs, mismatches, moment, rank_places
from tests.fixtures import dumps, traces
from tests.fixtures.dumps import OPEN, STARTED, call, dumped
from tests.fixtures.places import GOLDEN
from tests.fixtures.runs import measured

DONE = [call(n) for n in range(1, 4)]


def found(path: Path) -> tuple[recorder.Hang, ...]:
    return measured(path, hangs).frame(hangs)


def differing(path: Path) -> Any:
    return measured(path, mismatches).frame(mismatches)


def test_ranks_that_never_came(tmp_path: Path) -> None:
    (hang,) = found(dumps.hung(tmp_path / "d"))
    assert (hang.missing, hang.waiting, hang.unknown) == ((3, 5), (0, 1, 2, 4, 6, 7), ())
    assert (hang.op, hang.sequence, hang.since_ns) == ("all_reduce", 4, traces.BASE_NS + 4_000_000)
    assert hang.named == "all_reduce #4 of the default group"
    assert (hang.site, hang.timeout_ms) == ("train (train.py:28)", 600_000)


def test_where_each_rank_is(tmp_path: Path) -> None:
    path = dumps.hung(tmp_path / "d")
    frame = measured(path, rank_places).frame(rank_places)
    places = {row["rank"]: [row[c] for c in ("doing", "op", "sequence", "state")] for row in frame.to_dict("records")}
    assert places[3] == ["last issued", "all_reduce", 3, "completed"]
    assert places[0] == ["waits in", "all_reduce", 4, "scheduled"]


def test_a_rank_without_a_dump_is_not_known_to_be_missing(tmp_path: Path) -> None:
    waits = [*DONE, call(4, **OPEN)]
    (hang,) = found(dumped(tmp_path / "d", waits, None, waits))
    assert (hang.missing, hang.unknown, hang.waiting) == ((), (1,), (0, 2))


def test_a_collective_that_all_entered_and_that_does_not_end(tmp_path: Path) -> None:
    (hang,) = found(dumped(tmp_path / "d", [*DONE, call(4, **STARTED)], [*DONE, call(4, **OPEN)]))
    assert (hang.missing, hang.waiting, hang.began) == ((), (0, 1), (0,))


def test_the_oldest_of_several_queued_collectives_counts(tmp_path: Path) -> None:
    queued = [call(n, **OPEN) for n in range(4, 9)]
    (hang,) = found(dumped(tmp_path / "d", [*DONE, *queued], DONE))
    assert (hang.sequence, hang.missing) == (4, (1,))


def test_a_rank_whose_ring_lost_the_entry_did_enter(tmp_path: Path) -> None:
    """Its later number, or its status, shows it."""
    later = [call(9, **OPEN)]
    hang = found(dumped(tmp_path / "later", [*DONE, call(4, **OPEN)], later))[0]
    assert 1 not in hang.missing
    status = {"0": {"last_enqueued_collective": 4}}
    (hang,) = found(dumped(tmp_path / "status", [*DONE, call(4, **OPEN)], DONE, pg_status=status))
    assert hang.missing == ()


def test_completed_collectives_are_no_hang(tmp_path: Path) -> None:
    assert found(dumped(tmp_path / "d", [*DONE, call(4)], DONE)) == ()
    # Gloo's never leave "scheduled": what the process waits for no more, and all entered, is done.
    gloo = [call(n, state="scheduled") for n in range(1, 5)]
    assert found(dumped(tmp_path / "gloo", gloo, gloo)) == ()


def test_what_was_left_unfinished_is_a_hang_that_is_over(tmp_path: Path) -> None:
    """A rank that gave up waiting has retired the call; gloo's broadcast ends on its source before others come."""
    gloo = [call(n, state="scheduled") for n in range(1, 5)]
    (hang,) = found(dumped(tmp_path / "gloo", gloo, gloo[:3]))
    assert (hang.left, hang.missing, hang.waiting) == (True, (1,), (0,))
    sent = [*gloo[:3], call(4, "broadcast", state="scheduled")]
    assert found(dumped(tmp_path / "sent", sent, gloo[:3])) == ()


def in_group(name: str, number: int, **said: Any) -> dict[str, Any]:
    return call(number, process_group=(name, f"pg{name}"), **said)


def test_what_a_hang_follows_from_comes_first(tmp_path: Path) -> None:
    """Rank 2 waits for 3 in group 5; so it never comes to the default group's, in which 0 and 1 wait."""
    waits = [*DONE, call(4, **OPEN)]
    stuck = [*DONE, in_group("5", 1, **OPEN, time_created_ns=traces.BASE_NS + 9_000_000)]
    away = [*DONE, in_group("5", 0)]
    first, second = found(dumped(tmp_path / "d", waits, waits, stuck, away))
    assert (first.group, first.waiting, first.missing, first.follows) == ("group pg5", (2,), (3,), False)
    assert (second.group, second.missing) == ("the default group", (2, 3))


def test_ranks_that_wait_for_each_other_have_no_first(tmp_path: Path) -> None:
    one = [in_group("a", 1), in_group("b", 1), in_group("a", 2, **OPEN)]
    other = [in_group("a", 1), in_group("b", 1), in_group("b", 2, **OPEN)]
    both = found(dumped(tmp_path / "d", one, other))
    assert {(hang.waiting, hang.missing, hang.follows) for hang in both} == {((0,), (1,), False), ((1,), (0,), False)}


def test_groups_of_one_name_and_other_ranks_are_not_mixed(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    folder.mkdir()
    for rank, members in ((0, [0, 1]), (1, [0, 1]), (2, [2, 3]), (3, [2, 3])):
        held = dumps.dump([in_group("5", n) for n in range(1, 3 if rank < 2 else 8)], 4)
        held["pg_config"]["5"] = {"name": "5", "desc": "pg5", "ranks": str(members)}
        if rank == 0:
            held["entries"].append(in_group("5", 3, **OPEN))
        dumps.write(folder / f"fr_{rank}", held)
    (hang,) = found(folder)
    assert (hang.missing, hang.waiting) == ((1,), (0,))


def test_other_operations_types_and_sizes_of_one_number(tmp_path: Path) -> None:
    odd = [
        call(1),
        call(2, "broadcast"),
        call(3, input_sizes=[[999]], output_sizes=[[999]]),
        call(4, input_dtypes=["Half"], output_dtypes=["Half"]),
        call(5, "all_to_all", input_sizes=[[3]]),
    ]
    same = [*(call(n) for n in range(1, 5)), call(5, "all_to_all", input_sizes=[[4]])]
    frame = differing(dumped(tmp_path / "d", same, same, odd))
    assert frame[["sequence", "differs", "ranks", "op", "input", "dtype"]].to_numpy().tolist() == [
        [2, "operation", "0, 1", "all_reduce", "1000", "Float"],
        [2, "operation", "2", "broadcast", "1000", "Float"],
        [3, "size", "0, 1", "all_reduce", "1000", "Float"],
        [3, "size", "2", "all_reduce", "999", "Float"],
        [4, "element type", "0, 1", "all_reduce", "1000", "Float"],
        [4, "element type", "2", "all_reduce", "1000", "Half"],
    ]


def test_the_same_on_all_ranks_is_no_mismatch(tmp_path: Path) -> None:
    assert len(differing(dumps.hung(tmp_path / "d"))) == 0


def test_numbers_that_count_sends_too_are_not_compared(tmp_path: Path) -> None:
    def old(op: str, number: int) -> dict[str, Any]:
        made = call(number, op)
        del made["collective_seq_id"]
        return {**made, "seq_id": number}

    one = [old("send 0->1", 1), old("all_reduce", 2)]
    other = [old("all_reduce", 1), old("all_gather", 2)]
    assert len(differing(dumped(tmp_path / "d", one, other, version="1.0"))) == 0


def test_a_real_hang_of_gloo_ranks() -> None:
    (hang,) = found(GOLDEN / "flight_recorder")
    assert (hang.missing, hang.waiting, hang.op, hang.sequence) == ((2,), (0, 1, 3), "all_reduce", 6)
    assert (hang.site, hang.timeout_ms) == ("<module> (train.py:36)", 30_000)


def test_times_in_words() -> None:
    assert moment(1_700_000_000_000_000_000) == "2023-11-14 22:13:20 UTC"
    assert moment(-1) == ""
