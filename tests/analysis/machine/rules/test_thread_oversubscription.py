"""Too many threads: found where they wait for a core; silent with as many as cores, or where others cause the wait."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dlprof.analysis.machine.rules.thread_oversubscription import RULE
from dlprof.result import Setting
from tests.fixtures import runs
from tests.fixtures.asking import ask
from tests.fixtures.readings import crowded
from tests.fixtures.runs import MS


def test_four_ranks_with_eight_threads_on_eight_cores_are_found(tmp_path: Path) -> None:
    found = ask(RULE, crowded(tmp_path, 0.2, 0.25, 0.2, 0.2, workers=1))
    assert found.state == "found"
    assert found.share == pytest.approx(0.2, abs=0.001)  # all wait for the rank that gains least
    assert found.ranks == (0, 1, 2, 3)
    assert found.summary.startswith("Rank 1 computes with 8 threads and has 2 cores to itself: for 25 % of the time")
    # One of the two cores is for the loader's worker.
    assert [change.settings for change in found.changes] == [(Setting("OMP_NUM_THREADS", 8, 1),)]
    assert [cost.ns for cost in found.by_rank] == pytest.approx([180 * MS, 225 * MS, 180 * MS, 180 * MS])
    assert "outside the job" not in found.sure
    # They use the two cores that each has: if all of that is work, no number of threads does it sooner.
    assert found.sure.endswith("never spun while they waited for each other, nothing is saved.")
    assert found.evidence is not None
    assert found.evidence.rows[1] == (
        "rank 1",
        8,
        2,
        pytest.approx(225 * MS),
        pytest.approx(225 * MS),
        pytest.approx(2.0),
        pytest.approx(900.0),
        None,
    )


def test_threads_that_the_script_sets_are_not_those_of_the_environment(tmp_path: Path) -> None:
    set_in_script = ask(RULE, crowded(tmp_path / "set", 0.3, 0.3, 0.3, 0.3, env={"OMP_NUM_THREADS": "2"}))
    assert [change.settings for change in set_in_script.changes] == [(Setting("num_threads", 8, 2),)]
    assert "although `OMP_NUM_THREADS=2` is set" in set_in_script.changes[0].text
    by_environment = ask(RULE, crowded(tmp_path / "env", 0.3, 0.3, 0.3, 0.3, env={"OMP_NUM_THREADS": "8"}))
    assert [change.settings for change in by_environment.changes] == [(Setting("OMP_NUM_THREADS", 8, 2),)]
    workers = ask(RULE, crowded(tmp_path / "w", 0.3, 0.3, threads=4, workers=3, ours=4.0, env={"OMP_NUM_THREADS": "1"}))
    assert "--set torch.num_threads=1`" in workers.why


def test_as_many_threads_as_cores_are_not_blamed_but_a_long_wait_is_no_all_clear(tmp_path: Path) -> None:
    """Then somebody else has the cores."""
    others = ask(RULE, crowded(tmp_path / "two", 0.3, 0.3, 0.3, 0.3, threads=2, others=4.0))
    assert (others.state, others.share, others.by_rank) == ("not_measured", 0.0, ())
    assert others.why.startswith("30 % of the time its main thread waits for a core, with 2 threads and 2 cores a rank")
    told = ask(RULE, crowded(tmp_path / "told", 0.3, 0.3, threads=4, others=4.0, ours=4.0))
    assert told.why.endswith("a rank: programs outside the job used 4 cores")
    bound = ask(RULE, crowded(tmp_path / "bound", 0.3, 0.3, 0.3, 0.3, threads=2, affinity=2))
    assert bound.state == "not_measured"
    seldom = ask(RULE, crowded(tmp_path / "seldom", 0.04, 0.03, threads=2))
    assert (seldom.state, seldom.summary) == (
        "clear",
        "2 threads and 4 cores a rank; 4.0 % of the time its main thread waits for one",
    )


def test_workers_on_the_cores_of_the_threads_are_what_a_trial_measures(tmp_path: Path) -> None:
    threads = ask(RULE, crowded(tmp_path / "threads", 0.3, 0.3, threads=4, workers=3, ours=4.0))
    assert (threads.state, threads.share) == ("not_measured", 0.0)
    assert "with 4 threads, 3 loader workers and 4 cores a rank; what fewer threads or workers save" in threads.why
    assert "--set env.OMP_NUM_THREADS=1`" in threads.why
    alone = ask(RULE, crowded(tmp_path / "alone", 0.3, 0.3, threads=1, workers=3, ours=4.0))
    assert "--set loader.num_workers=2`" in alone.why
    # Nobody's fault but that of programs outside the job, which are told too.
    told = ask(RULE, crowded(tmp_path / "told", 0.3, 0.3, threads=4, workers=3, others=4.0, ours=4.0))
    assert "programs outside the job used 4 cores; what" in told.why
    clear = ask(RULE, crowded(tmp_path / "seldom", 0.04, 0.03, threads=2, workers=3, ours=4.0))
    assert clear.state == "clear"


def test_an_operator_waits_for_all_threads_of_its_pool(tmp_path: Path) -> None:
    """Main thread and the other one each have a core for 45 % of the time; all of the step may be one operator."""
    both = ask(RULE, crowded(tmp_path / "both", 0.55, 0.55, threads=2, pool=0.55, count=2, affinity=2))
    assert both.state == "found"
    assert both.share == pytest.approx(1 - 0.45 * 0.45 * 2)
    # A pool that waits for less than the main thread does adds little: then the main thread's own waiting is the most.
    main = ask(RULE, crowded(tmp_path / "main", 0.55, 0.55, threads=2, pool=0.1, count=2, affinity=2))
    assert main.share == pytest.approx(0.55)


def test_more_threads_that_seldom_wait_are_left_alone(tmp_path: Path) -> None:
    clear = ask(RULE, crowded(tmp_path, 0.01, 0.02))
    assert clear.state == "clear"
    assert clear.share == pytest.approx(0.01)
    # Both have more threads than cores, and the one waits twice as long.
    assert [cost.ns for cost in clear.by_rank] == pytest.approx([9 * MS, 18 * MS])


def test_what_other_programs_on_the_host_cause_is_no_saving(tmp_path: Path) -> None:
    """The two ranks use four cores, and somebody else the other four."""
    found = ask(RULE, crowded(tmp_path, 0.3, 0.3, others=4.0))
    assert found.share == pytest.approx(0.15)
    assert "50 % of the used cores that programs outside the job have" in found.sure


def test_workers_that_take_all_cores_are_named(tmp_path: Path) -> None:
    found = ask(RULE, crowded(tmp_path, 0.3, 0.3, workers=6))
    assert found.changes[0].settings == (Setting("OMP_NUM_THREADS", 8, 1),)
    assert found.advice[1] == "fewer loader workers: 6 of them and the rank share 4 cores"


def test_what_fewer_threads_save_at_least_is_told(tmp_path: Path) -> None:
    """A rank uses two of three cores: with all of them it would take two thirds of the time."""
    found = ask(RULE, crowded(tmp_path, 0.5, 0.5, count=6, affinity=6))
    assert found.share == pytest.approx(0.5)
    assert found.sure.endswith("each other, 300.0 ms is saved.")


def test_without_samples_or_a_kernel_that_counts_it_abstains(tmp_path: Path) -> None:
    uncounted = ask(RULE, crowded(tmp_path / "uncounted", None))
    assert (uncounted.state, "does not count" in uncounted.why) == ("not_measured", True)
    plain = runs.recorded(tmp_path / "plain", (None, [runs.light(n, MS) for n in range(9)], runs.CPU))
    assert "nothing was sampled" in ask(RULE, plain).why
    unknown = crowded(tmp_path / "unknown", 0.3)
    facts = unknown / "ranks/00000/facts.json"
    facts.write_text(json.dumps(json.loads(facts.read_text()) | {"cpu": None}))
    assert "not recorded" in ask(RULE, unknown).why


def test_on_a_gpu_without_a_trace_it_abstains(tmp_path: Path) -> None:
    path = crowded(tmp_path, 0.3)
    facts = path / "ranks/00000/facts.json"
    facts.write_text(json.dumps(json.loads(facts.read_text()) | {"device": {"type": "cuda"}}))
    # One rank of 8 cores has its 8 threads: with more of them it needs to know when the GPU was idle.
    assert ask(RULE, path).why.endswith("with 8 threads and 8 cores a rank")
    facts.write_text(
        json.dumps(json.loads(facts.read_text()) | {"cpu": {"count": 8, "affinity": 8, "torch_threads": 64}})
    )
    assert ask(RULE, path).state == "not_measured"
