"""Memory that grows: found with when it is used up; what fills, jumps or wavers is left alone."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from dlprof.analysis.memory.rules.memory_growth import RULE
from tests.fixtures import runs, traces
from tests.fixtures.allocator import GB, GPU, reading, write
from tests.fixtures.asking import ask
from tests.fixtures.runs import MS, light

MB = 1_000_000
SECOND = 1_000 * MS


def sampled(
    folder: Path,
    held: Callable[[int], int],
    *,
    children: Callable[[int], int] = lambda _: 0,
    mapped: Callable[[int], int] = lambda _: 0,
    left: int | None = 2 * GB,
    ranks: int = 1,
    n: int = 60,
    profiled: range = range(0),
    read: Sequence[int] | None = None,
) -> Path:
    """Record a step a second; in second n each rank's process holds held(n) bytes, and maps so much of files beside.

    They are read in each second, or in these.
    """
    steps = [light(k, 900 * MS, profiled=int(k in profiled)) for k in range(n)]
    runs.recorded(folder, *((None, steps, runs.CPU) for _ in range(ranks)))
    for rank in range(ranks):
        lines = [
            {"at_ns": traces.BASE_NS + k * SECOND, "rss_bytes": held(k) + mapped(k), "anonymous_bytes": held(k)}
            | {"children_rss_bytes": children(k), "children_anonymous_bytes": children(k)}
            for k in read or range(n)
        ]
        at = folder / f"ranks/{rank:05d}/processes.jsonl"
        at.write_text("".join(json.dumps(row) + "\n" for row in lines))
    if left is not None:
        (folder / "hosts/node-1").mkdir(parents=True)
        host = [{"at_ns": traces.BASE_NS + k * SECOND, "memory_available_bytes": left} for k in range(n)]
        (folder / "hosts/node-1/host.jsonl").write_text("".join(json.dumps(row) + "\n" for row in host))
    return folder


def test_a_process_that_grows_is_told_when_the_host_is_full(tmp_path: Path) -> None:
    found = ask(RULE, sampled(tmp_path, lambda n: GB + n * 10 * MB))
    assert (found.state, found.scope, found.saving_ns) == ("found", "risk", 0)
    # 10 MB a step of 0.9 s, and 2 GB left.
    assert found.title == "Memory grows, and is used up in 3.0 min"
    assert "by 10 MB a step of 900.0 ms; 2 GB are left on the host, enough for 200 steps" in found.summary
    assert found.ranks == (0,)
    assert found.evidence is not None
    assert found.evidence.columns == ("time_ns", "held")
    assert found.evidence.rows[-1] == (59 * SECOND, GB + 590 * MB)


def test_all_ranks_of_a_host_use_up_the_same_memory(tmp_path: Path) -> None:
    found = ask(RULE, sampled(tmp_path, lambda n: GB + n * 10 * MB, ranks=2))
    assert found.title == "Memory grows, and is used up in 90 s"
    assert found.ranks == (0, 1)


def test_workers_that_grow_are_named(tmp_path: Path) -> None:
    found = ask(RULE, sampled(tmp_path, lambda _: GB, children=lambda n: GB // 2 + n * 10 * MB))
    assert "its workers' memory grew" in found.summary
    assert [(c.settings, c.numerics, "data set" in c.text) for c in found.changes] == [((), False, True)]


def test_tensors_that_stay_on_the_gpu_are_told_with_the_gpus_memory(tmp_path: Path) -> None:
    path = runs.recorded(tmp_path / "run", (None, [light(n, 900 * MS) for n in range(60)], GPU))
    rows = [reading(n, (20 * GB) + n * GB // 10) for n in range(60)]
    write(path, rows)
    found = ask(RULE, path)
    assert found.state == "found"
    assert "on the GPU" in found.summary
    assert any("--memory" in a for a in found.advice)
    assert found.evidence is not None
    assert found.evidence.columns == ("step", "held")


@pytest.mark.parametrize(
    "held",
    [
        lambda _: GB,
        lambda n: GB + 500 * MB * (n > 30),  # once, for a buffer
        lambda n: GB + int(500 * MB * (1 - 0.8**n)),  # a cache that fills
        lambda n: GB + n % 10 * 50 * MB,  # garbage that is collected
        lambda n: GB + n * 10_000,  # an interpreter's own
    ],
    ids=["same", "once", "fills", "wavers", "little"],
)
def test_what_does_not_go_on_is_left_alone(tmp_path: Path, held: Callable[[int], int]) -> None:
    assert ask(RULE, sampled(tmp_path, held)).state == "clear"


def test_of_a_job_that_is_read_less_often_the_older_it_is_each_step_counts_alike(tmp_path: Path) -> None:
    rarely = [*range(60), *(round(60 * 1.02**k) for k in range(1, 140))]
    last = rarely[-1]
    slows = sampled(tmp_path / "slows", lambda n: GB + int(200 * MB * math.log(n + 60)), n=last + 1, read=rarely)
    assert ask(RULE, slows).state == "clear"
    leaks = sampled(tmp_path / "leaks", lambda n: GB + n * 10 * MB, n=last + 1, read=rarely, left=10 * GB)
    assert ask(RULE, leaks).state == "found"


def test_what_is_mapped_from_files_is_left_alone(tmp_path: Path) -> None:
    assert ask(RULE, sampled(tmp_path, lambda _: GB, mapped=lambda n: n * 20 * MB)).state == "clear"


def test_what_lasts_for_days_is_left_alone(tmp_path: Path) -> None:
    clear = ask(RULE, sampled(tmp_path, lambda n: 100 * MB + n * 200_000, left=1_000 * GB))
    assert (clear.state, "would last for" in clear.summary) == ("clear", True)


def test_what_is_seen_for_a_minute_is_no_word_on_the_hours_after_it(tmp_path: Path) -> None:
    # An allocator that finds no use for what was freed: 2 MB a step, and 22 GB left.
    said = ask(RULE, sampled(tmp_path, lambda _: GB, children=lambda n: 300 * MB + n * 2 * MB, left=22 * GB))
    assert said.state == "not_measured"
    assert "its workers' memory grew by 94 MB in 47 steps, which may be what its allocator keeps" in said.why
    # Seen for as long as ten minutes, it is.
    longer = sampled(tmp_path / "longer", lambda _: GB, children=lambda n: 300 * MB + n * 2 * MB, left=22 * GB, n=600)
    assert ask(RULE, longer).state == "found"


def test_too_few_readings_or_an_unknown_end_abstain(tmp_path: Path) -> None:
    short = ask(RULE, sampled(tmp_path / "short", lambda n: GB + n * 10 * MB, n=15))
    assert (short.state, "fewer than 18 readings" in short.why) == ("not_measured", True)
    unknown = ask(RULE, sampled(tmp_path / "unknown", lambda n: GB + n * 10 * MB, left=None))
    assert (unknown.state, "was not read" in unknown.why) == ("not_measured", True)


def test_what_the_profiler_left_free_is_filled_first(tmp_path: Path) -> None:
    def held(n: int) -> int:
        # Ten readings long nothing is asked for: what is kept fits into what was freed.
        return GB + (200 * MB if n in range(5, 10) else max(100, 10 * (n - 10)) * MB * (n >= 10))

    found = ask(RULE, sampled(tmp_path, held, n=55, profiled=range(5, 10)))
    assert found.state == "found"
    assert "by 10 MB a step" in found.summary
    # One that never holds more than then does not grow.
    assert ask(RULE, sampled(tmp_path / "no", lambda n: min(held(n), GB + 200 * MB), n=55)).state == "clear"


def test_what_the_profiler_holds_meanwhile_does_not_hide_it(tmp_path: Path) -> None:
    swollen = range(15, 25)
    found = ask(
        RULE, sampled(tmp_path, lambda n: GB + n * 10 * MB + (n in swollen) * GB + (n < 15) * GB, profiled=swollen)
    )
    assert found.title == "Memory grows, and is used up in 3.0 min"
    few = ask(RULE, sampled(tmp_path / "few", lambda _: GB, n=30, profiled=range(10, 20)))
    assert "fewer than 18 readings" in few.why


def test_what_grows_much_and_evenly_is_told_from_a_few_readings(tmp_path: Path) -> None:
    """3 GB in 17 s, with 22 GB left."""
    found = ask(RULE, sampled(tmp_path / "leaks", lambda n: GB + n * 176 * MB, left=22 * GB, n=17))
    assert found.state == "found"
    assert found.title == "Memory grows, and is used up in 112 s"
    assert "by 176 MB a step" in found.summary
    noisy = ask(RULE, sampled(tmp_path / "noisy", lambda n: GB + n * 176 * MB + n % 3 * 60 * MB, left=22 * GB, n=17))
    assert noisy.state == "found"


@pytest.mark.parametrize(
    "held",
    [
        lambda n: GB + 3 * GB * (n > 8),  # once, for a buffer
        lambda n: GB + int(3 * GB * (1 - 0.8**n)),  # a cache that fills
        lambda n: GB + n % 5 * 700 * MB,  # garbage that is collected
        lambda n: GB + n * 20 * MB,  # little
    ],
    ids=["once", "fills", "wavers", "little"],
)
def test_few_readings_of_anything_else_tell_nothing(tmp_path: Path, held: Callable[[int], int]) -> None:
    assert ask(RULE, sampled(tmp_path, held, left=22 * GB, n=17)).state == "not_measured"
