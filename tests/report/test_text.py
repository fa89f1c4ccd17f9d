"""The words of a report: figures with their units, the headline and its gain, notices, and what sharing takes away."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from dlprof.analysis.estimate import change
from dlprof.plain import NBSP, plain
from dlprof.report import first, formatting, html, terminal, verdict
from dlprof.report.figures import drawing, modules, ranks, screen, shapes
from dlprof.result import (
    Blame,
    Change,
    Fact,
    Forecast,
    ForeignLoad,
    HostLimited,
    HostPart,
    MemoryPeak,
    Outcome,
    Panel,
    Result,
    RunInfo,
    Together,
    Window,
)
from dlprof.result.figures import DeviceWork, GpuLog, InModule, LineWork, Modules, Outside, Profile, WorkKind
from dlprof.result.stored import shareable, to_json
from dlprof.trial import planning
from tests.fixtures import results
from tests.fixtures.results import MS

FIRST = results.ddp().found[0]


def words(text: str) -> str:
    return text.replace(NBSP, " ")


def headline(result: Result) -> tuple[str, str]:
    diagnosis, gain, _ = verdict.headline(result)
    return words(diagnosis), words(gain)


@pytest.mark.parametrize(
    ("command", "again"),
    [
        (("/venv/bin/python3", "train.py", "--lr", "0.1"), "train.py --lr 0.1"),
        (("python", "-m", "torch.distributed.run", "a b.py"), "-m torch.distributed.run 'a b.py'"),
        (("torchrun", "--nproc-per-node", "4", "train.py"), "-- torchrun --nproc-per-node 4 train.py"),
        (("python", "-u", "train.py"), "-- python -u train.py"),
        (("python", "train.py", "--token", "…"), "train.py --token …"),
    ],
)
def test_the_command_that_records_again_starts_the_same_job(command: tuple[str, ...], again: str) -> None:
    result = results.ddp()
    result = replace(result, run=replace(result.run, command=command))
    assert formatting.recording(result, "--memory") == f"dlprof wrap --memory {again}"


# Figures.


@pytest.mark.parametrize(
    ("write", "value", "written"),
    [
        (formatting.duration, 0, "0 ns"),
        (formatting.duration, 640, "640 ns"),
        (formatting.duration, 18_340, "18.3 µs"),
        (formatting.duration, 999_960, "1.00 ms"),
        (formatting.duration, 214.6e6, "214.6 ms"),
        (formatting.duration, 999.96e6, "1.00 s"),
        (formatting.duration, -66e6, "−66.0 ms"),
        (formatting.duration, 7.2e12, "7,200 s"),
        (formatting.duration, math.nan, "—"),
        (formatting.percent, 0, "0 %"),
        (formatting.percent, 0.0001, "< 0.1 %"),
        (formatting.percent, 0.012, "1.2 %"),
        (formatting.percent, 0.314, "31 %"),
        (formatting.percent, 1, "100 %"),
        (formatting.percent, math.inf, "—"),
        (formatting.times, 1.4449, "1.44 ×"),
        (formatting.times, 9.94, "9.94 ×"),
        (formatting.times, 10, "10.00 ×"),
        (formatting.times, 11.94, "over 10 ×"),
        (formatting.times, 3.5e6, "over 10 ×"),
        (formatting.times, math.inf, "—"),
        (formatting.ranks, [3], "rank 3"),
        (formatting.ranks, [7, 0, 1, 2, 3], "ranks 0–3, 7"),
        (formatting.ranks, [4, 5], "ranks 4, 5"),
        (formatting.ranks, [], ""),
        (modules.spelled, "stages.{1-3}.blocks.*.mlp", "stages.1–3.blocks.*.mlp"),
        (modules.spelled, "{0,2-5}.conv", "0,2–5.conv"),
        (modules.spelled, "{3-5,7-8,10-11}.layers.3", "3…11.layers.3"),
        (modules.spelled, "{not an index}", "{not an index}"),
    ],
)
def test_figures_are_written_in_units_that_suit_them(write: Callable[[Any], str], value: Any, written: str) -> None:
    assert words(write(value)) == written


@pytest.mark.parametrize(
    ("names", "written"),
    [
        (["void at::(anonymous namespace)::softmax<4, at::Half>(int)"], ["softmax<4, Half>"]),
        (["ncclDevKernel_AllReduce(ncclArgs)"], ["ncclDevKernel_AllReduce"]),
        (
            [
                f"void at::native::reduce_kernel<512, 1, ReduceOp<{of}, at::F<int, 2>>>(x)"
                for of in ("float", "c10::Half")
            ],
            ["reduce_kernel<…, ReduceOp<float, F<int, 2>>>", "reduce_kernel<…, ReduceOp<Half, F<int, 2>>>"],
        ),
        (["k<a, b, c, d>(int)", "k<a, x, c, d>(int)"], ["k<…, b, …>", "k<…, x, …>"]),
        (
            ["k<1, f(a::B&)::{lambda(int, float)#1}, c…", "k<1, g(a…"],
            ["k<…, f(B&)::{lambda(int, float)#1}, c…>", "k<…, g(a…>"],
        ),
        (["triton_poi_fused_0", "<script>", "operator<", ""], ["triton_poi_fused_0", "<script>", "operator", ""]),
    ],
)
def test_kernels_are_named_by_what_differs_among_those_of_one_name(names: list[str], written: list[str]) -> None:
    assert formatting.kernels(names) == written
    table = drawing.plain_table(("kernel", "calls"), [(name, 1) for name in names])
    assert [row[0] for row in table.rows] == written


@pytest.mark.parametrize(
    ("value", "unit", "written"),
    [
        (1.2e9, "bytes", "1.20 GB"),
        (12, "bytes", "12 B"),
        (0.5, "share", "50 %"),
        (1980, "MHz", "1,980 MHz"),
        (3, "", "3"),
    ],
)
def test_quantities_of_known_units_are_written_in_multiples(value: float, unit: str, written: str) -> None:
    assert words(formatting.quantity(value, unit)) == written


def test_control_characters_are_escaped_and_letters_of_all_scripts_stay() -> None:
    assert plain("a\x1b[31m\x00\u202eb\ud800\n") == "a\\x1b[31m\\x00\\u202eb\\ud800\\x0a"
    assert plain("naïve – שלום 漢字 \u00a0") == "naïve – שלום 漢字 \u00a0"
    assert plain("a\nb", keep="\n") == "a\nb"
    assert plain("abcdef", 4) == "abc…"


def test_a_speed_up_has_its_margin_and_says_whether_it_is_a_bound() -> None:
    found = replace(FIRST, saving_ns=20 * MS, share=0.2, speedup=1.25, error_ns=2 * MS)
    # The step after is 80 ± 2 ms: 2.5 % of the speed-up.
    assert words(formatting.gained(found)) == "1.25 × faster (± 0.03)"
    assert [words(f(found)) for f in (formatting.margin, formatting.speedup)] == ["± 0.03", "1.25 ×"]
    most = replace(found, at_most=True)
    assert words(formatting.gained(most)) == "at most 1.25 × faster"
    assert [words(f(most)) for f in (formatting.margin, formatting.speedup)] == ["", "≤ 1.25 ×"]
    # What is known to a thousandth is not known exactly.
    assert words(formatting.margin(replace(found, error_ns=100.0))) == "± 0.01"
    assert words(formatting.noise(replace(found, error_ns=3 * MS))) == "± 3.00 ms"
    assert formatting.noise(replace(found, error_ns=3 * MS, scope="risk", saving_ns=0.0)) == ""
    for error in (math.nan, math.inf):
        assert (
            formatting.margin(replace(found, error_ns=error)) == formatting.noise(replace(found, error_ns=error)) == ""
        )
    assert formatting.margin(replace(found, error_ns=-1.0)) == formatting.noise(replace(found, error_ns=0.0)) == ""


def test_findings_together_are_bounded_where_there_are_several() -> None:
    assert words(formatting.together(results.ddp())) == "All of these together: at most 1.79 × faster (−94.8 ms)."
    # No job becomes eighteen times as fast by what dlprof advises.
    absurd = replace(results.ddp(), together=Together(204 * MS, 0.95, 18.1))
    for result in (absurd, results.many(), results.healthy(), results.hostile()):
        assert formatting.together(result) == ""


def test_how_far_traced_steps_stand_for_the_job() -> None:
    result = results.ddp()
    window = result.window
    assert window is not None

    def limits(**changes: Any) -> str:
        return words(formatting.limits(replace(result, window=replace(window, **changes))))

    assert limits() == "5 traced steps took 1.04 × as long as the others"
    assert limits(overhead=None) == ""
    assert limits(overhead=None, source="trace").startswith("every steady step was traced")
    assert limits(overhead=None, source="trace", steps=1).startswith("the only steady step was traced")
    assert limits(overhead=None, source="trace", unit="trace") == ""
    assert formatting.limits(replace(result, window=None)) == ""
    traced = replace(result, window=replace(window, overhead=None, source="trace"))
    assert headline(traced)[1] == "Fixing it at train.py:61 would make the traced steps 1.44 × faster."


def test_outliers_are_the_ranks_unlike_the_mean() -> None:
    assert formatting.outliers(results.many(64).time, 4) == [37]
    assert formatting.outliers(results.healthy().time, 4) == []


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (("torchrun", "--nproc-per-node=4", "jobs/train.py", "x.py"), "train.py"),
        (("python", "-m", "pkg.train", "--lr", "1"), "pkg.train"),
        (("./launch.sh",), "launch.sh"),
        ((), "dead"),
    ],
)
def test_a_run_is_named_by_its_script(command: tuple[str, ...], name: str) -> None:
    result = results.empty()
    assert formatting.name(replace(result, run=replace(result.run, command=command))) == name


# The headline.


def test_the_headline_of_findings_of_a_healthy_run_and_of_none() -> None:
    said = (
        "31 % of each step waits for data on rank 1.",
        "Fixing it at train.py:61 would make this job 1.44 × faster.",
    )
    assert headline(results.ddp()) == headline(results.training()) == said  # changes of the training are not in it
    diagnosis, gain = headline(results.healthy())
    assert diagnosis.startswith("Computation takes 89")
    assert "5" in gain
    assert "2 could not be measured" in gain
    apart = replace(results.healthy(), outcomes=(results.LARGER, *results.healthy().outcomes))
    assert headline(apart) == (diagnosis, gain)
    whole = headline(replace(results.healthy(), time=()))[0]
    assert whole.startswith("Each step lasts ")
    assert whole.endswith("; where it goes was not measured.")
    diagnosis, gain = headline(results.empty())
    assert diagnosis == "No steady step was recorded."
    assert gain.startswith("No rule could be checked")


def remedy(saving: float = 1.05, workers: int = 6, **changes: Any) -> str:
    """Return the gain of a finding whose forecast is for 6 workers, and saves so many times what the finding does."""
    forecast = Forecast("num_workers", "6", 214.6 * MS - saving * FIRST.saving_ns)
    changed = (change("more workers", num_workers=(2, workers)),)
    made = replace(FIRST, **{"forecasts": (forecast,), "changes": changed, **changes})
    return headline(replace(results.ddp(), outcomes=(made, *results.ddp().outcomes[1:])))[1]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ({}, "num_workers=6 at train.py:61 would make this job 1.44 × faster."),
        ({"saving": 0.5}, "Fixing it at train.py:61 would make this job 1.44 × faster."),
        ({"workers": 60}, "Fixing it at train.py:61 would make this job 1.44 × faster."),
        ({"forecasts": ()}, "Fixing it at train.py:61 would make this job 1.44 × faster."),
        ({"forecasts": (), "at_most": True}, "Fixing it at train.py:61 would make this job at most 1.44 × faster."),
        ({"forecasts": (), "where": ()}, "Fixing it would make this job 1.44 × faster."),
    ],
)
def test_the_remedy_is_the_setting_that_the_saving_was_predicted_for(case: dict[str, Any], words: str) -> None:
    assert remedy(**case) == words


def test_the_gain_of_what_was_traced_and_of_a_small_finding() -> None:
    result, window = results.ddp(), results.ddp().window
    assert window is not None
    traced = replace(result, window=replace(window, unit="trace", source="trace"))
    assert headline(traced)[1] == "Fixing it at train.py:61 would make what was traced 1.44 × faster."
    for at_most, most in ((False, ""), (True, "at most ")):
        small = replace(result, outcomes=(replace(FIRST, speedup=1.001, at_most=at_most),))
        assert headline(small)[1] == f"Fixing it would save {most}66.0 ms of each step."


@pytest.mark.parametrize(
    ("scope", "gain"),
    [
        ("failure", "The job cannot continue until this is fixed."),
        ("risk", "Fixing it saves no time, but may save the job."),
    ],
)
def test_a_finding_that_costs_no_time(scope: Any, gain: str) -> None:
    found = replace(FIRST, scope=scope, saving_ns=0.0)
    assert headline(replace(results.ddp(), outcomes=(found,)))[1] == gain
    assert (formatting.saving(found), formatting.saving(FIRST)[-2:]) == (scope, "ms")


@pytest.mark.parametrize(
    ("category", "ns", "said"),
    [
        ("host", 30 * MS, ["Ranks 0, 2, 3 wait 90.1 ms a step for rank 1, which mostly waits for its loader."]),
        ("input_wait", 1.0, ["Ranks 0, 2, 3 wait 60.1 ms a step for rank 1, which waits for its loader."]),
    ],
)
def test_late_ranks_are_named_with_what_makes_them_late(category: str, ns: float, said: list[str]) -> None:
    more = tuple(Blame(rank, 1, category, ns, 0.1) for rank in (0, 2, 3))
    result = replace(results.ddp(), blame=(*results.ddp().blame, *more))
    assert [words(one) for one in verdict.blamed(result)] == said
    assert verdict.blamed(replace(result, blame=more[:1] if ns == 1.0 else ())) == []


def divided(**shares: float) -> Any:
    return results.time_of(0, 42.0, **shares)


def test_a_larger_part_that_no_rule_could_judge_comes_before_the_findings() -> None:
    mute = results.outcome("queued_wait", "not_measured", "Queued work that waits", why="it is a graph")
    result = replace(results.ddp(), outcomes=(*results.ddp().outcomes, mute))
    larger = replace(
        result, time=divided(computation=0.05, queued_wait=FIRST.share + 0.2, input_wait=0.75 - FIRST.share)
    )
    first, second = headline(larger)
    assert first.endswith(": it is a graph.")
    assert "31 % of each step waits for data on rank 1." in second
    smaller = replace(
        result, time=divided(computation=0.05, queued_wait=FIRST.share - 0.1, input_wait=1.05 - FIRST.share)
    )
    assert headline(smaller)[0].startswith("31")
    healthy = results.healthy()
    mute = results.outcome("host_bound", "not_measured", "Waiting for the host", why="1 kernel a step")
    busy = replace(results.outcome("busy_thread", "found", "Another thread keeps the interpreter"), share=0.4)
    known = replace(healthy, outcomes=(busy, mute), time=divided(host=0.5, computation=0.5))
    assert "kernel" not in "".join(headline(known))
    judged = replace(healthy, outcomes=(*healthy.outcomes, mute))
    late = replace(judged, time=divided(host=0.9, computation=0.1))
    assert headline(late) == ("90 % of each step waits for the host: 1 kernel a step.", headline(judged)[1])
    assert "1 kernel a step" not in " ".join(headline(judged))


def test_where_nothing_is_found_the_rule_of_the_largest_part_says_why() -> None:
    copies = results.outcome("pageable_copy", "clear", "Copies", summary="pinning them would not help")
    copies = replace(copies, lost_share=0.5)
    result = replace(results.healthy(), time=divided(copy=0.6, computation=0.4), outcomes=(copies,))
    assert headline(result)[0].endswith(" of each step. Pinning them would not help.")
    # Not where that costs little, nor where another part is the largest.
    little = replace(result, outcomes=(replace(copies, lost_share=0.01),))
    other = replace(result, time=divided(computation=0.6, copy=0.4))
    assert not any("inning" in headline(one)[0] for one in (little, other))


@pytest.mark.parametrize(
    ("parts", "begins"),
    [
        ({"other": 0.7, "copy": 0.2, "host": 0.1}, "70 % of each step is not attributed to any category."),
        ({"other": 1.0}, "100"),
    ],
)
def test_unattributed_time_is_not_named_as_a_category(parts: dict[str, float], begins: str) -> None:
    assert headline(replace(results.healthy(), time=divided(**parts)))[0].startswith(begins)


def test_a_step_that_is_nearly_all_computation_says_so_before_a_small_finding() -> None:
    others = (o for o in results.ddp().outcomes if o.state != "found")
    result = replace(results.ddp(), outcomes=(replace(FIRST, share=0.04), *others))
    said = headline(replace(result, time=divided(computation=0.95, input_wait=0.05)))[0]
    assert said.startswith("Computation takes 95 % of each step. 31 % of each step waits")


@pytest.mark.parametrize(
    ("whole", "parts", "is_said"),
    [
        (10, [("loop", 4), ("loop", 2), ("launches", 3), ("waits", 0.1)], True),
        (10, [("loop", 9), ("launches", 0.1)], False),
        (1, [("loop", 0.9), ("launches", 0.9)], False),
    ],
    ids=["divided", "one part", "little"],
)
def test_what_a_device_waits_for_its_host_for(whole: float, parts: list[tuple[str, float]], is_said: bool) -> None:
    """Of a step of 42 ms; two loops are one part, and what is below 2 % of the step is left out."""
    limited = HostLimited(0, whole * MS, tuple(HostPart(part, "", 0.0, ns * MS) for part, ns in parts))
    window = results.ddp().window
    assert window is not None
    result = replace(results.ddp(), host_limited=limited, window=replace(window, step_ns=42.0 * MS))
    said = words(verdict.host_limited(result))
    assert bool(said) == is_said
    if is_said:
        assert "would take 32.0 ms instead of 42.0 ms" in said
        assert "6.00 ms, launches of kernels 3.00 ms." in said
        assert said in words(html.render(result))


def test_a_run_beside_other_programs_clears_the_job_of_nothing() -> None:
    load = ForeignLoad("node-1", cores=8.0, used=8.0, foreign=2.5, waited=0.3, disturbs=True)
    healthy = headline(results.healthy())
    assert headline(replace(results.healthy(), foreign_load=replace(load, disturbs=False))) == healthy
    diagnosis, gain = headline(replace(results.healthy(), foreign_load=load))
    assert diagnosis == healthy[0]
    assert gain.startswith("Programs outside the job used 2.50 of 8 cores")
    assert "nothing" not in gain
    # A finding stays the first sentence; the warning is beside it.
    assert headline(replace(results.ddp(), foreign_load=load)) == headline(results.ddp())


def test_notices_say_how_the_run_ended_and_which_ranks_are_missing() -> None:
    killed, missing = verdict.notices(results.empty())
    assert "signal 9" in killed
    assert missing == "3 of 4 ranks are not here: 1, 2, 3"
    assert verdict.notices(results.healthy()) == []


# Files of other tools alone.

PROFILE = Profile("p.json", "py-spy", "samples", 400.0, "decode", "/me/data.py", 41, 0.5, own=True)
GPU = GpuLog("nvidia-smi 3", 100, 99.0, busy_share=0.63, power_w=412.0, memory_used_bytes=1e9, memory_total_bytes=8e9)


def read(*found: Profile | GpuLog) -> Result:
    profiles, logs = (tuple(f for f in found if isinstance(f, kind)) for kind in (Profile, GpuLog))
    return Result(RunInfo("x"), None, profiles=profiles, gpu_logs=logs)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("one", "parts", "share"),
    [
        (PROFILE, ("decode", "data.py:41", "py-spy", "400"), "50"),
        (GPU, ("GPU 3", "412"), "63"),
        (replace(GPU, held_by="heat", clock_lost=0.25, sm_clock_mhz=1300.0), ("GPU 3", "hot"), "25"),
        (replace(GPU, busy_share=0.95, memory_used_bytes=7.9e9), ("memory", "GPU 3"), "99"),
    ],
)
def test_the_headline_of_a_profile_or_a_log_of_gpus(one: Profile | GpuLog, parts: tuple[str, ...], share: str) -> None:
    said = verdict.headline(read(one))
    assert all(part in said.diagnosis for part in (*parts, said.share))
    assert said.share.startswith(share)


def test_absurd_profiles_and_empty_logs_and_a_snapshot_beside_a_profile() -> None:
    assert verdict.of_logs(read(Profile("p", "t", "ns", 1.0, "f", "", 0, 7.0))) is None
    assert verdict.of_logs(read()) is None
    assert verdict.of_logs(read(GpuLog("x", 0, 0.0, memory_used_bytes=9e9, memory_total_bytes=1e9))) is not None
    assert "400" in verdict.described(read(PROFILE, GPU))
    peak = MemoryPeak(0, 0, 5e8, 6e8, "forward (a.py:1)", 1e8)
    diagnosis, gain = headline(Result(RunInfo("run"), None, memory=(peak,), profiles=(PROFILE,)))
    assert "decode (data.py:41)" in diagnosis
    assert "500 MB" in gain
    assert "forward (a.py:1)" in gain


# A device's own work.

CONVOLUTION = WorkKind("convolution", 216, 10 * MS, 4.0 * MS, flops=3.11e12, bytes=13e9)
NORM = WorkKind("normalization", 212, 31 * MS, 3.0 * MS, bytes=14e9)
LAYOUT = WorkKind("layout and type changes", 339, 7 * MS, 0.0)
WORK = DeviceWork((NORM, CONVOLUTION, LAYOUT), 7.0 * MS, 0.0, 6.0 * MS)


def healthy(work: DeviceWork | None, step_ms: float = 50, **window: Any) -> Result:
    return replace(results.healthy(), device_work=work, window=Window(20, "steps", step_ms * MS, **window))


def said(*args: Any, **window: Any) -> list[str]:
    return [words(one) for one in verdict.device_floor(healthy(*args, **window))]


def test_the_floor_of_a_step_and_what_is_farthest_above_it() -> None:
    first, second = said(WORK)
    assert "at least 7.00 ms on this GPU, or 6.00 ms with chains" in first
    assert "its kernels take 48.0 ms" in first
    assert "Of the 41.0 ms above that bound, they spend 28.0 ms in normalization and 7.00 ms in layout" in first
    assert "at most 5.56 × faster" in second  # 2 of the 50 ms are not kernels
    assert headline(healthy(WORK))[1].endswith(second)
    assert said(replace(WORK, floor_ns=1.0 * MS), 48)[1] == ""  # a bound that is far away helps nobody
    shared = replace(NORM, floor_ns=0.0, shared_ns=31.0 * MS)
    first, _ = said(DeviceWork((shared, CONVOLUTION), 12.0 * MS, shared_floor_ns=8.0 * MS), 41)
    assert "they spend at least 23.0 ms in normalization and 6.00 ms in convolution" in first
    near = DeviceWork((replace(NORM, floor_ns=29.5 * MS), replace(CONVOLUTION, floor_ns=9.5 * MS)), 39.0 * MS)
    first, second = said(near, 41.5)
    assert first.endswith("its kernels take 41.0 ms.")
    assert "at most 1.05 × faster" in second


@pytest.mark.parametrize(
    ("work", "window"),
    [
        (None, {}),
        (replace(WORK, floor_ns=None, why="the limits are not known"), {}),
        (WORK, {"step_ms": 70}),  # the host limits it
        (WORK, {"step_ms": 40}),  # kernels run beside each other
        (WORK, {"unit": "trace"}),
    ],
)
def test_no_bound_is_given_where_the_device_is_not_the_limit(work: DeviceWork, window: Any) -> None:
    assert said(work, **window) == ["", ""]


def test_the_table_of_work_has_rates_and_floors_and_says_what_is_missing() -> None:
    def table(work: DeviceWork) -> Any:
        return ranks.device_kinds(replace(results.healthy(), device_work=work))

    norm, convolution, layout = ([words(cell) for cell in row] for row in table(WORK).table.rows)
    assert convolution == ["convolution", "216", "10.0 ms", "21 %", "311", "1.30 TB", "4.00 ms", "6.00 ms"]
    assert norm[4:] == ["—", "451.6 GB", "3.00 ms", "28.0 ms"]
    assert layout[4:] == ["—", "—", "0 ns", "7.00 ms"]
    assert ranks.device_kinds(results.healthy()) is None
    why = "the limits of Else are not known"
    assert why in table(DeviceWork((replace(NORM, floor_ns=None),), why=why)).note
    shared = table(DeviceWork((replace(NORM, shared_ns=31.0 * MS),), 8.0 * MS, shared_floor_ns=8.0 * MS))
    assert "8.00" in shared.note
    assert "needs at least" not in shared.table.columns


# Where in the model, and in the script.


def test_the_line_that_computes_most_is_named_where_no_rule_finds_anything_unless_it_only_calls_the_model() -> None:
    def line(source: str, share: float) -> LineWork:
        return LineWork("net.py", 7, "forward", source, 2.0, share * 90 * MS, 0.0, share)

    healthy = results.healthy()
    for lines, named in (
        (
            (line("x = x.softmax(-1) @ v", 0.4),),
            "40 % of what is computed is called in `x = x.softmax(-1) @ v` (net.py:7)",
        ),
        ((line("loss = model(x)", 0.9), line("x = x.tanh()", 0.3)), "30 % of what is computed"),
        ((line("loss = model(x).loss", 0.9), line("x = x.tanh()", 0.1)), ""),
        ((line("x = x.tanh()", 0.2),), ""),
    ):
        said = words(verdict.headline(replace(healthy, lines=lines))[1])
        assert ("of what is computed" in said) is bool(named)
        assert named in said
    told = terminal.render(replace(healthy, lines=(line("x = x.tanh()", 0.3),)))
    assert "30 %  net.py:7 x = x.tanh()" in " ".join(told.split("\n"))


def test_modules_with_most_time_have_a_line_and_none_is_inside_another() -> None:
    found: Any = modules.lines_of(results.encoder())
    assert found == [
        (pytest.approx(80 / 214.6), "encoder.layer.*.attention × 12 (Attention)"),
        (pytest.approx(46 / 214.6), "encoder.layer.*.mlp × 12 (MLP)"),
        (pytest.approx(34.6 / 214.6), "device idle"),
        (pytest.approx(30 / 214.6), "communication of no single module"),
        (pytest.approx(18 / 214.6), "head (Linear)"),
    ]
    model = results.module("", "ResNet", 0, 190.0, own=130.0, communication_ns=128e6)
    layers = results.module("layers.*", "Block", 1, 60.0, own=60.0, count=3)
    lines = modules.lines_of(Modules(True, 214.6e6, (model, layers)))
    assert [name for _, name in lines] == ["ResNet, communication", "layers.* × 3 (Block)"]
    assert sum(share for share, _ in lines) == pytest.approx(190 / 214.6)
    computing = modules.lines_of(Modules(True, 214.6e6, (replace(model, communication_ns=0.0), layers)))
    assert computing[0][1] == "ResNet itself"
    assert modules.lines_of(Modules(False, 214.6e6, (), (Outside("other", 1e6, 0.004),))) == []


@pytest.mark.parametrize(
    ("where", "named"),
    [
        (
            [("layer.*.mlp", "MLP", 0.62), ("", "", 0.2), ("head.Linear_3", "Linear", 0.1), ("a", "A", 0.06)],
            "layer.*.mlp (MLP) 62 %, outside modules 20 %, head.Linear_3 10 %",
        ),
        ([], ""),
        ([("", "ResNet", 1.0)], ""),  # that all of it is in the model says nothing
        ([("", "ResNet", 0.6), ("", "", 0.4)], "ResNet 60 %, outside modules 40 %"),
    ],
)
def test_a_finding_names_a_few_modules_with_their_shares(where: list[tuple[str, str, float]], named: str) -> None:
    assert words(modules.named([InModule(*one) for one in where])) == named


# A result for anybody's eyes.


def test_sharing_takes_names_and_folders_away_and_leaves_what_is_measured() -> None:
    run = RunInfo(
        path="/scratch/alice/runs/train",
        command=("python", "/home/alice/project/train.py", "--out", "/scratch/alice/out", "--owner", "alice"),
        hosts=("gpu-17.cluster.example.org", "gpu-18"),
        warnings=("gpu-18: py-spy: permission denied: /home/alice/bin/py-spy",),
    )
    late = Outcome("input_wait", "found", "Waits", summary="rank 1 on gpu-17.cluster.example.org is late")
    facts = (Fact("Job", "folder", "/home/alice/project"), Fact("Job", "seen", "load (/home/alice/project/data.py:12)"))
    lines = (LineWork("/home/alice/project/net.py", 7, "forward", "x = self.a(x)", 1.0, 5.0, 3.0, 0.5),)
    shared = shareable(Result(run=run, window=None, outcomes=(late,), facts=facts, lines=lines))
    text = json.dumps(to_json(shared))
    assert [word for word in ("alice", "gpu-17", "gpu-18", "cluster", "scratch") if word in text] == []
    assert shared.run.hosts == ("host1", "host2")
    assert shared.run.command == ("python", "…/train.py", "--out", "…/out", "--owner", "user")
    assert shared.outcomes[0].summary == "rank 1 on host1 is late"
    assert shared.facts[1].value == "load (…/data.py:12)"
    assert shared.lines[0].file == "…/net.py"
    harmless = Result(run=RunInfo("run", command=("python", "train.py"), hosts=("localhost",)), window=None)
    assert shareable(harmless) == harmless


@pytest.mark.parametrize(
    ("changes", "spans", "traced", "span"),
    [
        # Two steps of 214.6 ms, 1.5 times as long while traced.
        (
            {"overhead": 1.5, "traced_steps": 2},
            900,
            "which tracing made 1.50 × as long",
            "900.0 ms is longer than the 2 traced",
        ),
        ({"overhead": 1.0, "traced_steps": 2}, 900, "as the profiler saw them. A wait", "429.2 ms together"),
        ({"overhead": 1.5, "traced_steps": 2, "lag_ns": 52 * MS}, 900, "tracing made", "it is 52.0 ms behind its host"),
        ({"overhead": 1.5, "traced_steps": 2}, 650, "tracing made", ""),
        ({"overhead": None, "source": "trace"}, 900, "", ""),
        ({"unit": "trace"}, 9000, "", ""),
    ],
)
def test_why_figures_of_traced_steps_differ_is_said(
    changes: dict[str, Any], spans: float, traced: str, span: str
) -> None:
    result = results.ddp()
    device = tuple(replace(one, span_ns=int(spans * MS)) for one in result.device)
    assert result.window is not None
    result = replace(result, window=replace(result.window, **changes), device=device)
    for said, wanted in ((verdict.traced(result), traced), (verdict.span(result), span)):
        assert wanted in words(said)
        assert bool(said) == bool(wanted)


EDIT = """--- a/train.py
+++ b/train.py
@@ -5,6 +5,7 @@
 five
 six
 seven
-\teight
+\t8
+\t8½
 nine
 ten
 eleven
@@ -40 +41 @@
-forty\r
+40
"""


HELPED = """--- a/train.py
+++ b/train.py
@@ -1,2 +1,4 @@
 import os
+import functools
+opened = functools.cache(File)

@@ -39,4 +41,3 @@
 def read(self):
-    with File(self.path) as file:
-        return file[0]
+    return opened(self.path)[0]

"""


def test_the_first_screen_shows_where_a_line_goes_not_the_function_that_helps() -> None:
    shown = first.edit(Change("", diff=HELPED))
    assert [line for line in shown if line.startswith(("-", "+"))] == HELPED.split("\n")[9:12]
    assert "+opened = functools.cache(File)" in first.edit(Change("", diff=HELPED[: HELPED.index("@@ -39")]))


def test_an_edit_shows_what_changes_with_two_lines_around_it_and_their_numbers() -> None:
    assert screen.edit(EDIT) == [
        ("span", 6, "six"),
        ("span", 7, "seven"),
        ("del", 8, "    eight"),
        ("ins", 8, "    8"),
        ("ins", 9, "    8½"),
        ("span", 10, "nine"),
        ("span", 11, "ten"),
        ("span", 0, "…"),
        ("del", 40, "forty"),
        ("ins", 41, "40"),
    ]
    assert screen.edit("") == screen.edit("-a\n+b\n") == []
    assert len(screen.edit("@@ -1 +1 @@\n" + "-a\n" * 99)) == screen.MOST_LINES


def test_bars_of_the_first_screen_add_up_and_what_is_gone_is_the_gain() -> None:
    result = results.ddp()
    made = screen.made(result, first.first(result, "", planning.named))
    assert made is not None
    assert made.job is not None
    for bar in (made.job, *made.steps):
        assert sum(part.width for part in bar.parts) == pytest.approx(100, abs=0.3)
    now, after = made.steps
    assert [words(part.text) for part in after.parts if not part.colour] == ["−66.0 ms"]
    assert after.parts[-1].width == pytest.approx(100 * 66 / 214.6, abs=0.3)
    assert {part.colour for part in now.parts} >= {"c-computation", "c-communication", "c-input_wait"}
    training = next(part for part in made.job.parts if part.colour == "bar")
    assert (training.width, made.zoom) == (80, "M8.0 0H88.0L100 10H0Z")
    told = {name: words(time) for _, name, time in made.legend}
    assert (told["Communication"], told["Computation"]) == ("50.4 → 4.43 ms", "124.5 ms")
    assert screen.made(results.empty(), first.first(results.empty(), "", planning.named)) is None


@pytest.mark.parametrize(
    ("edit", "kept"),
    [
        ("-c = f(b)\n+with g():\n+    c = f(b)", ["-c = f(b)", "+with g():", "+    c = f(b)"]),
        # What is put there is shown, however much goes.
        ("-c = 1\n-c = 2\n-c = 3\n-c = 4\n+with g(1): 2", ["-c = 1", "-       … and 3 more lines", "+with g(1): 2"]),
    ],
)
def test_of_an_edit_that_does_not_fit_the_changed_lines_are_kept(edit: str, kept: list[str]) -> None:
    diff = f"@@ -1,5 +1,6 @@\n a = 1\n b = 2\n{edit}\n d = 3\n e = 4\n"
    result = results.ddp()
    lead = replace(result.changes[0], change=replace(result.changes[0].change, diff=diff))
    crowded = replace(result, changes=(lead, *result.changes[1:]))
    shown = terminal.first(crowded, "runs/a", planning.named, 80).splitlines()
    assert len(shown) <= 22
    assert [line.strip() for line in shown if line.strip()[:2] in ("- ", "-c", "+w", "+ ")] == kept
    assert "    a = 1" not in shown


LINES_OF = Panel("table", "Line by line: f, in the rank", (("1", 2.0),), ("line", "hits"))


@pytest.mark.parametrize(
    ("lacking", "lead", "more", "said"),
    [
        (("no --memory", "no --memory", "no --shapes"), "", {}, "Not measured: 3; 2 of them with --memory."),
        (("none (--no-trace)", "x"), "", {}, "Not measured: 2; 1 of them without --no-trace."),
        (("too few steps", "record longer"), "", {}, "Not measured: 2; 2 of them in a longer run."),
        (("the job trains on the CPU",), "", {}, "Not measured: 1."),
        (
            ("no log (`dlprof wrap` has one)",),
            "",
            {"command": ()},
            "Not measured: 1; 1 of them if dlprof records the job.",
        ),
        (
            ("no --memory",),
            "host_bound",
            {},
            "Not measured: 1. --lines auto would time each line of the hottest functions.",
        ),
        (("no --memory",), "host_bound", {"panels": (LINES_OF,)}, "Not measured: 1; 1 of them with --memory."),
        (("no --memory",), "unfused_optimizer", {}, "Not measured: 1; 1 of them with --memory."),
    ],
)
def test_what_would_let_most_be_known(lacking: tuple[str, ...], lead: str, more: dict[str, Any], said: str) -> None:
    outcomes = tuple(results.outcome(f"rule{n}", "not_measured", "a check", why) for n, why in enumerate(lacking))
    if lead:
        found = next(o for o in results.ddp().outcomes if o.state == "found")
        outcomes = (replace(found, id=lead, changes=()), *outcomes)
    run = replace(results.ddp().run, command=more.get("command", ("python", "train.py")))
    result = replace(results.ddp(), outcomes=outcomes, changes=(), run=run, panels=more.get("panels", ()))
    assert first.looked_at(result) == said


def test_time_since_a_trace_began_is_written_in_units() -> None:
    queued = Panel("lines", "Launches queued", ((0.0, 1.0), (5e7, 9.0)), ("ns", "rank 0"))
    spec = shapes.panel(queued).spec
    assert spec is not None
    assert spec["layout"]["xaxis"]["ticksuffix"] == NBSP + "ms"
    assert spec["data"][0]["x"] == [0, 50]


@pytest.mark.parametrize("informs", [False, True])
def test_a_finding_without_a_known_change_promises_no_gain(informs: bool) -> None:
    one = Outcome(
        "x", "found", "Waits", saving_ns=2e7, share=0.2, speedup=1.25, changes=(Change("a", informs=informs),)
    )
    _, gain, _ = verdict.headline(Result(run=RunInfo("run"), window=Window(100, "steps", 1e8), outcomes=(one,)))
    assert ("1.25" in gain) != informs
