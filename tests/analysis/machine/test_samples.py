"""Readings become rates and means over the steady steps; logs of other tools are put on the run's clock."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.machine.gpus import clocks, gpu_logs, gpu_uses
from dlprof.analysis.machine.samples import MOST_POINTS, _clock, sample_means, sample_series
from dlprof.commands.report import analyse
from dlprof.errors import NotMeasured
from tests.fixtures import runs, traces
from tests.fixtures.logged import smi
from tests.fixtures.readings import NORMAL, SECOND, clocked, sampled
from tests.fixtures.runs import MS, light, measured


def means(path: Path) -> dict[str, tuple[float, float]]:
    frame = measured(path, sample_means).frame(sample_means)
    return {m: (mean, most) for m, mean, most in zip(frame["metric"], frame["mean"], frame["largest"], strict=True)}


def at(seconds: int, **read: float) -> dict[str, float]:
    return {"at_ns": traces.BASE_NS + seconds * SECOND, **read}


BEGUN = 1 << 50  # of what links carried since the machine began
OFTEN, RARELY = [*range(5, 15)], [*range(18, 30, 4), 30]
# Readings, of how many steps and in which file; mean and most of each metric.
READ: dict[str, tuple[list[dict[str, float]], dict[str, Any], dict[str, tuple[float, float]]]] = {
    "what only grows is a rate, the rest a mean": (
        [
            {"cpu_s": 3 + 0.5 * n, "rss_bytes": 100 + n % 2, "energy_j": 600 * n, "main_thread_waited_ns": n * 250 * MS}
            for n in range(40)
        ],
        {},
        {
            "cpu_cores": (0.5, 0.5),
            "mean_power_w": (600, 600),
            "main_thread_waited_share": (0.25, 0.25),
            "rss_bytes": (100.5, 101),
        },
    ),
    # Ten steps of a hundred readings: what was burnt after the last step is not training.
    "only steady steps count": (
        [{"cpu_s": float(n) if n < 10 else 9.0 + 100 * (n - 9)} for n in range(100)],
        {"steps": 10},
        {"cpu_cores": (1, 1)},
    ),
    "a counter that begins again says nothing of that time": (
        [{"pcie_sent_bytes": 1000 * (n % 20)} for n in range(40)],
        {"name": "gpu.jsonl"},
        {"pcie_sent_bytes_per_s": (1000, 1000)},
    ),
    "links": (
        [{"nvlink_sent_bytes": BEGUN + 7_000 * n, "nvlink_received_bytes": 5_000 * n} for n in range(40)],
        {"name": "gpu.jsonl"},
        {"nvlink_sent_bytes_per_s": (7_000, 7_000), "nvlink_received_bytes_per_s": (5_000, 5_000)},
    ),
    "a rate that the GPU tells itself stands once": (
        [{"nvlink_sent_bytes": 7_000 * n, "nvlink_sent_bytes_per_s": 6_900.0} for n in range(40)],
        {"name": "gpu.jsonl"},
        {"nvlink_sent_bytes_per_s": (6_900, 6_900)},
    ),
    # Ten seconds without a reading, in which all ten CPU seconds were used.
    "a long gap weighs as long as it was": (
        [at(s, cpu_s=0 if s < 20 else 10) for s in [*range(5, 15), *range(25, 35)]],
        {},
        {"cpu_cores": (10 / 29, 10 / 11)},
    ),
    "what is read less often later weighs as much": (
        [*(at(s, memory_share=0) for s in OFTEN), *(at(s, memory_share=1) for s in RARELY)],
        {},
        {"memory_share": (16 / 26, 1)},
    ),
    "but not for readings that were missed": (
        [*(at(s, memory_share=0) for s in OFTEN), at(30, memory_share=1)],
        {},
        {"memory_share": (5 / 15, 1)},
    ),
}


@pytest.mark.parametrize("name", READ)
def test_means_of_the_steady_steps(tmp_path: Path, name: str) -> None:
    rows, how, expected = READ[name]
    assert means(sampled(tmp_path, rows, **how)) == {m: pytest.approx(v, rel=1e-3) for m, v in expected.items()}


def test_the_time_in_which_the_job_was_suspended_counts_for_nothing(tmp_path: Path) -> None:
    """Ten seconds in which nothing was read or used; the first reading after them tells of them."""
    rows = [at(s, cpu_s=float(min(s, 15) + max(s - 25, 0))) for s in range(40) if not 15 < s < 25]
    folder = sampled(tmp_path, rows)
    assert means(folder)["cpu_cores"][0] < 0.9
    told = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(told | {"resumed_ns": [traces.BASE_NS + 25 * SECOND - 600 * MS]}))
    assert means(folder)["cpu_cores"] == pytest.approx((1, 1))


def test_a_run_without_samples_or_with_too_few_says_so(tmp_path: Path) -> None:
    with pytest.raises(NotMeasured, match="fewer than 3 readings"):
        means(sampled(tmp_path / "few", [{"cpu_s": n} for n in range(3)], steps=3))
    runs.recorded(tmp_path / "none", (None, [light(n, MS) for n in range(9)], runs.CPU))
    with pytest.raises(NotMeasured, match="nothing was sampled"):
        measured(tmp_path / "none", sample_series).frame(sample_series)


def test_a_long_series_is_thinned_to_means(tmp_path: Path) -> None:
    frame = measured(sampled(tmp_path, [{"rss_bytes": n % 2} for n in range(2000)]), sample_series).frame(sample_series)
    assert MOST_POINTS / 2 < len(frame) <= MOST_POINTS
    assert frame["value"].mean() == pytest.approx(0.5, abs=0.05)
    assert frame["at_ns"].is_monotonic_increasing
    assert frame["at_ns"].iloc[-1] > traces.BASE_NS + 1900 * SECOND


# ---- clocks and logs of GPUs ---------------------------------------------------------------------------------------


def test_each_reason_for_a_clock_has_its_share_and_its_clock(tmp_path: Path) -> None:
    read = ((1_800, 0), (1_000, 0x24), (200, 0x1), (1_400, 0x4))  # of which the third is idle
    path = clocked(tmp_path, *(NORMAL | {"sm_clock_mhz": mhz, "clock_reasons_bits": bits} for mhz, bits in read))
    (row,) = measured(path, clocks).frame(clocks).to_dict("records")
    assert row["clock_mhz"] == pytest.approx(1_400, rel=0.03)
    assert (row["free_mhz"], row["heat_mhz"], row["power_cap_mhz"]) == (1_800, 1_000, pytest.approx(1_200, rel=0.03))
    assert row["heat"] == pytest.approx(1 / 3, abs=0.03)
    assert (row["power_brake"], row["max_mhz"], row["limit_w"]) == (0, 1_980, 700)


def test_a_log_alone_is_judged_as_a_whole(tmp_path: Path) -> None:
    (tmp_path / "gpus.csv").write_text(smi(datetime(2026, 3, 4, 5, 6, 7), 30, 1980, 1300, reasons=0x40))
    hot = measured(tmp_path / "gpus.csv", gpu_uses).frame(gpu_uses).set_index("source").loc["nvidia-smi 1"]
    assert (hot["readings"], hot["seconds"], hot["at"]) == (30, 29.0, "log")
    assert (hot["busy_share"], hot["power_w"], hot["sm_clock_mhz"]) == (pytest.approx(0.9), 400, 1300)
    assert hot["memory_used_bytes"] / hot["memory_total_bytes"] == 0.5
    assert (hot["held_by"], hot["clock_lost"]) == ("heat", pytest.approx(1 - 1300 / 1980))
    assert "power_limit" not in hot["lacks"]


def test_what_a_log_lacks_is_named_with_the_option_that_brings_it(tmp_path: Path) -> None:
    rows = "".join(f"2026/03/04 05:06:{s:02d}.000, 0, 50 %\n" for s in range(9))
    (tmp_path / "gpus.csv").write_text("timestamp, index, utilization.gpu [%]\n" + rows)
    made = measured(tmp_path / "gpus.csv", gpu_logs, clocks)
    assert "clocks_event_reasons.active" in made.frame(gpu_logs)["lacks"].iloc[0]
    with pytest.raises(NotMeasured, match=r"clocks\.max\.sm"):
        made.frame(clocks)


def test_a_log_of_no_times_is_a_summary_and_a_run_without_a_log_has_none(tmp_path: Path) -> None:
    (tmp_path / "dmon").write_text("# gpu   pwr    sm\n# Idx     W     %\n" + "    0   300    80\n" * 5)
    row = measured(tmp_path / "dmon", gpu_logs).frame(gpu_logs).iloc[0]
    assert (row["readings"], row["seconds"], row["at"], row["why"]) == (5, 0.0, "log", "it has no times")
    with pytest.raises(NotMeasured):
        measured(runs.foreign(tmp_path / "a", traces.training()), gpu_logs).frame(gpu_logs)


def test_a_log_beside_a_trace_is_put_on_its_clock(tmp_path: Path) -> None:
    """Its times are of a zone two hours east, which it does not say; ten of its twelve readings lie in the trace."""
    traces.write(tmp_path / "rank0.json.gz", traces.training(steps=40, world_size=1))
    begun_s = traces.BASE_NS / 1e9 + 0.010
    lines = ["timestamp, index, utilization.gpu [%], clocks.sm [MHz]"]
    for n in range(12):
        when = datetime.fromtimestamp(begun_s - 0.002 + 0.004 * n, timezone.utc) + timedelta(hours=2)
        lines.append(f"{when:%Y/%m/%d %H:%M:%S}.{when.microsecond // 1000:03d}, 0, {50 + n} %, 1980 MHz")
    (tmp_path / "gpus.csv").write_text("\n".join(lines) + "\n")
    panels = {panel.title: panel for panel in analyse(tmp_path, 1).panels}
    assert panels["GPUs by their logs"].rows[0][:3] == ("nvidia-smi 0", 10, pytest.approx(0.555))
    assert "UTC+2 is where it lies with the run" in panels["GPUs by their logs"].note
    drawn = panels["GPU: some kernel ran"].rows
    assert drawn[0][0] == 0
    assert [float(str(share)) for _, share in drawn] == sorted(float(str(share)) for _, share in drawn)


HOUR = 3600 * SECOND
RUN = int(datetime(2026, 3, 4, 5, 6, tzinfo=timezone.utc).timestamp()) * SECOND
SPAN, MIDNIGHT = (RUN, RUN + 60 * SECOND), RUN // (24 * HOUR) * 24 * HOUR
LOG = (RUN - 20 * SECOND, RUN + 90 * SECOND)  # around the run


@pytest.fixture
def _utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.usefixtures("_utc")
@pytest.mark.parametrize(
    ("times", "moved", "span", "shift", "how"),
    [
        ("zone", 0, SPAN, 0, "zone"),  # it says its zone
        ("local", 0, SPAN, 0, "machine"),  # it lies with the run in this machine's
        *(("local", int(hours * HOUR), SPAN, -int(hours * HOUR), "fitted") for hours in (-8, 1, 5.5, 9)),
        ("local", 7 * 60 * SECOND, SPAN, 0, "machine"),  # none fits
        ("day", -MIDNIGHT, SPAN, MIDNIGHT, "fitted"),
        ("day", 2 * HOUR - MIDNIGHT, SPAN, MIDNIGHT - 2 * HOUR, "fitted"),
        ("day", -MIDNIGHT, (0, 0), 0, "none"),
        ("none", -RUN, SPAN, 0, "none"),
    ],
)
def test_whose_clock_the_times_of_a_log_are_of(
    times: str, moved: int, span: tuple[int, int], shift: int, how: str
) -> None:
    assert _clock(times, LOG[0] + moved, LOG[1] + moved, span)[:2] == (shift, how)


@pytest.mark.usefixtures("_utc")
def test_a_long_log_fits_in_many_zones_and_is_not_guessed() -> None:
    assert _clock("local", RUN + 20 * HOUR, RUN + 44 * HOUR, SPAN).how == "machine"
