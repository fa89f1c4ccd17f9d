"""The warnings that a report begins with: what each run has of them, and what a calm one has not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from dlprof.analysis import notices
from dlprof.analysis.engine import Job, Maybe
from dlprof.analysis.step import savings
from dlprof.analysis.timeline.steps import step_means
from tests.fixtures import runs, traces
from tests.fixtures.places import TRACES
from tests.fixtures.readings import write
from tests.fixtures.runs import CPU, GPU, MS, asked_for_none, light, recorded

NINE = [light(n, 100 * MS) for n in range(9)]


def warned(path: Path) -> list[str]:
    return runs.measured(path, notices.warnings).call(notices.warnings)


def found(job: Job, load: pd.DataFrame | None = None, **window: float) -> list[str]:
    """Return the warnings about a window whose steps are like that, beside such a load of other programs."""
    likeness = {"ratio": 1.0, "after": 1.0, "after_noise": 0.0, "left_out": "", "linked": 1.0} | window
    frame = pd.DataFrame([likeness]).assign(longer="")
    nothing: Maybe[pd.DataFrame] = Maybe(lambda: None)  # type: ignore[arg-type, return-value]
    others: Maybe[pd.DataFrame] = nothing if load is None else Maybe(lambda: load)
    rest = [nothing] * 7
    return notices.warnings(job, nothing, nothing, Maybe(lambda: frame), others, *rest)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Return a job of which rank 1 of 3 left nothing."""
    folder = tmp_path_factory.mktemp("job")
    for rank in (0, 2):
        traces.write(folder / f"rank{rank}.json", traces.training(rank=rank, world_size=3))
    return runs.measured(folder).job


def test_missing_ranks_are_named_and_those_that_were_asked_for_no_trace_are_not(job: Job, tmp_path: Path) -> None:
    (missing,) = found(job)
    assert (missing.startswith("1 of 3 ranks"), missing.endswith(": 1")) == (True, True)
    # Their part that nothing explains is no news: it is not known because they were not asked.
    run = runs.cpu_run(tmp_path, 10 * MS, 10 * MS, 30 * MS, 10 * MS)
    for rank in (1, 2):
        asked_for_none(run / f"ranks/{rank:05d}", "0,last")
    told = notices.all_warnings(runs.measured(run, notices.warnings))
    assert [text for text in told if "missing" in text or "no step was traced" in text] == []
    (asked,) = (text for text in told if "--ranks" in text)
    assert asked.startswith("traces of 2 of 4 ranks were asked for (--ranks 0,last): ")


def test_what_slows_a_process_for_debugging_is_named(tmp_path: Path) -> None:
    process = {"nice": 0, "development": True, "sanitizer": None, "malloc": "debug", "tracemalloc": True}
    facts = {**CPU, "process": process, "env": {"CUDA_LAUNCH_BLOCKING": "1", "NCCL_DEBUG": "INFO"}}
    run = recorded(tmp_path / "run", (None, NINE, facts), (None, NINE, {**CPU, "process": {"development": False}}))
    told = [text for text in warned(run) if "debugging" in text]
    cost = ", on rank 0: what that costs is not known; it is for debugging"
    assert told == [
        f"Python's development mode is on (`-X dev`, `PYTHONDEVMODE`){cost}",
        f"`PYTHONMALLOC=debug` is set{cost}",
        f"`CUDA_LAUNCH_BLOCKING=1`: the host waits for each kernel{cost}",
    ]


@pytest.mark.parametrize(
    ("backends", "told"), [([None, None], 1), ([None, "gloo"], 0), ([None], 0), ([None, "unknown"], 0)]
)
def test_ranks_that_never_meet_are_trainings_of_their_own(
    backends: list[str | None], told: int, tmp_path: Path
) -> None:
    facts: list[dict[str, Any]] = [{**CPU, **({} if one == "unknown" else {"backend": one})} for one in backends]
    run = recorded(tmp_path / "run", *((None, NINE, one) for one in facts))
    assert len([text for text in warned(run) if "no process group" in text]) == told


def test_other_programs_are_named_where_they_disturb(job: Job) -> None:
    hosts = {"host": ["a", "b"], "cores": [8.0, 4.0], "foreign": [2.5, 1.0], "waited": [0.25, float("nan")]}
    both = pd.DataFrame(hosts | {"disturbs": [1, 1]})
    _, first = found(job, both)
    assert first.startswith("on a, the most disturbed of 2 hosts, programs outside the job used 2.50 of 8 cores")
    assert "25 % of the time" in first
    _, alone = found(job, both.iloc[1:])
    assert alone.startswith("programs outside the job used 1 of 4 cores: ")
    assert len(found(job, both.assign(disturbs=0))) == 1


def test_a_job_that_gives_way_to_other_programs_is_named(tmp_path: Path) -> None:
    load = pd.DataFrame({"host": ["a"], "cores": [8.0], "foreign": [2.5], "waited": [0.25], "disturbs": [1]})
    for nice, told in ((10, True), (0, False)):
        run = recorded(tmp_path / f"run-{nice}", (None, NINE, {**CPU, "process": {"nice": nice}}))
        (warning,) = found(runs.measured(run).job, load)
        assert ("rank 0 gave way to them: niceness 10" in warning) == told


def test_a_host_that_swaps_is_named(tmp_path: Path) -> None:
    for rate, told in ((5_000_000, True), (1_000, False)):
        run = recorded(tmp_path / f"run-{rate}", (None, [light(n, 900 * MS) for n in range(40)], CPU))
        write(run / "hosts/node-1/host.jsonl", ({"core_percent": [50], "swap_in_bytes": rate * n} for n in range(40)))
        warnings = [text for text in warned(run) if "swap" in text]
        assert [text.startswith("a host reads 5") for text in warnings] == [True] * told


@pytest.mark.parametrize(
    ("window", "warned"),
    [
        ({"ratio": 0.95}, False),
        ({"ratio": 1.4}, True),
        ({"ratio": 0.8}, True),
        ({"after": 1.2}, True),
        ({"after": 1.2, "after_noise": 0.03}, True),
        ({"after": 1.2, "after_noise": 0.05}, False),
        ({"after": 1.2, "after_noise": float("nan")}, False),
        ({"left_out": "2 at the end"}, True),
        ({"linked": 0.0}, True),
        ({"linked": 0.4}, True),
        ({"linked": 0.6}, False),
    ],
)
def test_a_window_unlike_the_job_is_said_to_be_so(job: Job, window: dict[str, float], warned: bool) -> None:
    assert len(found(job, None, **window)) == 1 + warned  # and the missing rank


# Steps in ms: ten of a calm machine, and stretches of one that is slower for some steps in a row.
CALM = [20.0, 20.2, 19.9, 20.1, 20.0, 19.8, 20.1, 20.0, 20.3, 19.9]
DRIFTS = [*[24.0] * 5, *[27.0] * 7, *[24.5] * 6, *[31.0] * 5, *[23.9] * 8, *[29.0] * 9]
SLOWER = [1.15 * ms for ms in CALM * 6]


@pytest.mark.parametrize(
    ("before", "after", "backward", "torn_down", "said"),
    [
        (CALM, SLOWER, 0.0, False, ": the profiler is still attached to the GPU"),
        (CALM, SLOWER, 2.0, True, ", most of the difference in the backward pass"),
        (CALM, SLOWER, 1.0, True, ""),
        (CALM, CALM * 6, 0.0, False, None),
        (CALM[:9], DRIFTS, 0.0, False, None),  # five steady steps
        ([*DRIFTS, *DRIFTS], [1.15 * ms for ms in DRIFTS * 2], 0.0, False, None),
        (CALM[:9], SLOWER[:5], 0.0, False, None),  # nothing tells how far the machine drifts
    ],
)
def test_steps_after_the_window_are_compared_with_how_far_the_machine_drifts(
    tmp_path: Path, before: list[float], after: list[float], backward: float, torn_down: bool, said: str | None
) -> None:
    steps = []
    for n, ms in enumerate([*before, *[30.0] * 4, *after]):
        more = backward if n >= len(before) + 4 else 0.0
        profiled, length = int(len(before) <= n < len(before) + 4), round(ms * MS)
        steps.append(light(n, length, device_step_ns=length, profiled=profiled, backward_ns=round((5 + more) * MS)))
    facts = {**GPU, "window": {"cupti_torn_down": torn_down}}
    made = traces.ahead(4, host=30 * MS, busy=20 * MS, synchronises=True)
    told = [text for text in warned(recorded(tmp_path, (made, steps, facts))) if "after the traced" in text]
    assert [text.partition(" × as long as those before")[2] for text in told] == ([] if said is None else [said])


@pytest.mark.skipif(not (TRACES / "h200").is_dir(), reason="the recordings of an H200 are not here (../shared/traces)")
@pytest.mark.parametrize("name", ["g04_optimizer_loop", "g06_grad_norm_items"])
def test_of_a_virtual_machine_that_drifts_nothing_is_said(name: str) -> None:
    assert [text for text in warned(TRACES / "h200" / name) if "after the traced" in text] == []


@pytest.mark.parametrize(
    ("long_s", "then_s", "warns"),
    [
        (40, 1, True),
        (40, 6, False),  # a small part of it
        (0.9, 0.01, False),  # a short trial is mostly that
    ],
)
def test_a_run_that_warms_up_for_long_says_so_after_all_else(
    tmp_path: Path, long_s: float, then_s: float, warns: bool
) -> None:
    steps = [light(n, round((long_s if n < 3 else then_s) * 1e9)) for n in range(103)]
    told = warned(recorded(tmp_path, (None, steps, CPU), warnings=["the disk was full"]))
    assert ["warming up" in text for text in told] == [False] * (len(told) - warns) + [True] * warns
    assert "(the first 3 steps, 120.0 s)" in told[-1] or not warns


def test_what_many_ranks_warn_of_is_one_warning_and_of_very_many_the_first_are_listed(tmp_path: Path) -> None:
    run = runs.measured(recorded(tmp_path / "few", *[(None, NINE, CPU)] * 3), step_means)
    run.warnings.update({0: ("the disk was full",), 1: ("a signal came",), 2: ("the disk was full",)})
    said = notices.all_warnings(run)
    assert [sum(text in line for line in said) for text in ("the disk was full", "a signal came")] == [1, 1]
    run = runs.measured(recorded(tmp_path / "many", (None, NINE, CPU), warnings=[]))
    run.warnings[0] = tuple(f"warning {n}" for n in range(notices.MOST_WARNINGS + 3))
    said = notices.all_warnings(run)
    assert (said[-1], len(said)) == ("… and 3 more warnings", notices.MOST_WARNINGS + 1)


def test_ranks_of_two_jobs_in_one_folder(tmp_path: Path) -> None:
    def told(name: str, *jobs: str) -> list[str]:
        facts: list[Any] = [(None, NINE[:1], {**CPU, "env": {"SLURM_JOB_ID": number}}) for number in jobs]
        return [text for text in warned(recorded(tmp_path / name, *facts)) if "SLURM" in text]

    assert told("one", "7", "7") == []
    (warning,) = told("two", "7", "8")
    assert warning.startswith("the ranks are of 2 SLURM jobs (7, 8)")


@pytest.mark.parametrize(("fetch", "slower"), [(42, 21), (22, 0)])
def test_a_run_that_only_uses_up_what_was_made_ahead_is_told_so(tmp_path: Path, fetch: int, slower: int) -> None:
    # Two workers make a batch every 21, or every 11 ms; all 40 steps of 10 ms find theirs ready.
    gpu = {"device": {"type": "cuda", "name": "NVIDIA H200"}, "loaders": [{"role": "train", "num_workers": 2}]}
    path = recorded(tmp_path / "run", (None, [light(n, 10 * MS) for n in range(40)], gpu))
    runs.loading(path, 0, step=10 * MS, wait=0, fetch=fetch * MS, cpu=0, n=40, workers=2)
    told = [w for w in notices.all_warnings(runs.measured(path, notices.warnings)) if "use up" in w]
    assert [f"their loader needs {slower:.1f} ms for a step's" in text for text in told] == [True] * bool(slower)


def as_ever(_: int) -> dict[str, float]:
    return {}


WINDOW = {"number": 2, "why": "asked", "trace": "trace-2.json", "first_step": 150, "last_step": 154}
HINT = " (`dlprof report RUN --window 2` reads it)"


@pytest.mark.parametrize(
    ("of", "windows", "steps", "said"),
    [
        (
            lambda n: {"fetch": 1.0 if n < 120 else 9.0},
            [{**WINDOW, "why": "slower"}],
            200,
            "because they took 1.42 × as long as before: the loader's wait grew from 1.00 ms to 9.00 ms" + HINT,
        ),
        (
            lambda n: {"backward": 1.0 if n < 120 else 9.0},
            [WINDOW],
            200,
            "as asked: they took 1.42 × as long as before: the backward pass grew from 1.00 ms to 9.00 ms" + HINT,
        ),
        (as_ever, [WINDOW], 200, "as asked: steps were about as long as before" + HINT),
        (as_ever, [{**WINDOW, "why": "slower"}], 200, "because they took longer for a while" + HINT),
        (as_ever, [{**WINDOW, "trace": None}], 200, None),  # the job ended before it
        (as_ever, [], 200, None),
        (as_ever, [{**WINDOW, "first_step": 20, "last_step": 22}], 24, None),  # too few to compare
    ],
)
def test_what_had_become_slower_where_steps_were_traced_again(
    of: Callable[[int], dict[str, float]], windows: list[dict[str, Any]], steps: int, said: str | None, tmp_path: Path
) -> None:
    log = []
    for n in range(steps):
        phases = {"fetch": 1.0, "forward": 15.0, "backward": 1.0, "optimizer": 1.0, "rest": 1.0} | of(n)
        traced = 12 <= n <= 16 or any(w["first_step"] <= n <= w["last_step"] for w in windows)
        named = {f"{name}_ns": round(ms * MS) for name, ms in phases.items() if name != "rest"}
        log.append(light(n, round(sum(phases.values()) * MS), profiled=int(traced), **named))
    path = recorded(tmp_path / "run", (None, log, {**CPU, "windows": windows}))
    again = [text for text in warned(path) if "traced again" in text]
    assert [text.partition(" traced again")[2].lstrip(", ") for text in again] == ([] if said is None else [said])


@pytest.mark.parametrize(
    ("numbers", "read", "hint"),
    [
        ([2], 1, HINT),
        ([2], 2, ""),
        ([2, 3], 3, HINT),
        ([2, 3], 1, " (`dlprof report RUN --window 2` reads 2, 3)"),
    ],
)
def test_the_other_windows_are_named_where_there_are_any(numbers: list[int], read: int, hint: str) -> None:
    row = {"rank": 0, "first": 80, "last": 84, "slower": 0, "ratio": 1.0, "phase": "fetch", "before_ns": 1.0}
    windows = pd.DataFrame([{**row, "after_ns": 1.0, "number": number} for number in numbers])
    said = "steps 80 to 84 were traced again, as asked: steps were about as long as before"
    assert savings.traced_again(windows, read) == said + hint
