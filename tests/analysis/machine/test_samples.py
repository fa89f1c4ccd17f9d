"""Readings become rates where they only grow, and means over the steps that are steady."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dlprof.analysis.machine.samples import MOST_POINTS, sample_means, sample_series
from dlprof.errors import NotMeasured
from tests.fixtures import readings, runs, traces
from tests.fixtures.readings import SECOND, sampled
from tests.fixtures.runs import MS, light


def means(path: Path) -> dict[str, tuple[float, float]]:
    frame = runs.measured(path, sample_means).frame(sample_means)
    return {
        m: (float(v), float(most)) for m, v, most in zip(frame["metric"], frame["mean"], frame["largest"], strict=True)
    }


def test_what_only_grows_is_a_rate_and_the_rest_a_mean(tmp_path: Path) -> None:
    rows = [
        {"cpu_s": 3 + 0.5 * n, "rss_bytes": 100 + n % 2, "energy_j": 600 * n, "main_thread_waited_ns": n * 250 * MS}
        for n in range(40)
    ]
    told = means(sampled(tmp_path, rows))
    assert told["cpu_cores"] == pytest.approx((0.5, 0.5))
    assert told["mean_power_w"] == pytest.approx((600, 600))
    assert told["main_thread_waited_share"] == pytest.approx((0.25, 0.25))
    assert told["rss_bytes"] == pytest.approx((100.5, 101), abs=0.1)
    assert set(told) == {"cpu_cores", "mean_power_w", "main_thread_waited_share", "rss_bytes"}


def test_only_the_steady_steps_count(tmp_path: Path) -> None:
    """Ten steps of a hundred readings: what was burnt after the last step is not training."""
    rows = [{"cpu_s": float(n) if n < 10 else 9.0 + 100 * (n - 9)} for n in range(100)]
    assert means(sampled(tmp_path, rows, steps=10))["cpu_cores"] == pytest.approx((1, 1))


def test_a_counter_that_begins_again_says_nothing_of_that_time(tmp_path: Path) -> None:
    rows = [{"pcie_sent_bytes": 1000 * (n % 20)} for n in range(40)]
    assert means(sampled(tmp_path, rows, name="gpu.jsonl"))["pcie_sent_bytes_per_s"] == pytest.approx((1000, 1000))


def test_what_links_have_carried_since_the_machine_began_is_a_rate(tmp_path: Path) -> None:
    rows = [{"nvlink_sent_bytes": (1 << 50) + 7_000 * n, "nvlink_received_bytes": 5_000 * n} for n in range(40)]
    told = means(sampled(tmp_path, rows, name="gpu.jsonl"))
    assert told == {
        "nvlink_sent_bytes_per_s": pytest.approx((7_000, 7_000)),
        "nvlink_received_bytes_per_s": pytest.approx((5_000, 5_000)),
    }


def test_a_rate_that_the_gpu_tells_itself_stands_once(tmp_path: Path) -> None:
    rows = [{"nvlink_sent_bytes": 7_000 * n, "nvlink_sent_bytes_per_s": 6_900.0} for n in range(40)]
    told = runs.measured(sampled(tmp_path, rows, name="gpu.jsonl"), sample_means).frame(sample_means)
    assert told[["metric", "mean"]].to_dict("records") == [{"metric": "nvlink_sent_bytes_per_s", "mean": 6_900.0}]


def test_a_long_gap_between_readings_weighs_as_long_as_it_was(tmp_path: Path) -> None:
    """Ten seconds without a reading, in which all ten CPU seconds were used."""
    seconds = [*range(5, 15), *range(25, 35)]
    folder = sampled(tmp_path, [])
    rows = [{"at_ns": traces.BASE_NS + s * SECOND, "cpu_s": 0 if s < 20 else 10} for s in seconds]
    readings.write(folder / "ranks/00000/processes.jsonl", rows)
    mean, largest = means(folder)["cpu_cores"]
    assert mean == pytest.approx(10 / 29)
    assert largest == pytest.approx(10 / 11)


def test_what_is_read_less_often_later_weighs_as_much_as_before_but_for_one_that_was_missed(tmp_path: Path) -> None:
    often, rarely = [*range(5, 15)], [*range(18, 30, 4), 30]
    folder = sampled(tmp_path, [])
    for shares, expected in (
        ({**dict.fromkeys(often, 0), **dict.fromkeys(rarely, 1)}, 16 / 26),
        ({**dict.fromkeys(often, 0), 30: 1}, 5 / 15),
    ):
        rows = [{"at_ns": traces.BASE_NS + s * SECOND, "memory_share": share} for s, share in shares.items()]
        readings.write(folder / "ranks/00000/processes.jsonl", rows)
        assert means(folder)["memory_share"][0] == pytest.approx(expected)


def test_the_time_in_which_the_job_was_suspended_counts_for_nothing(tmp_path: Path) -> None:
    """Ten seconds in which nothing was read or used; the first reading after them tells of them."""
    folder = sampled(tmp_path, [])
    used = [(s, float(min(s, 15) + max(s - 25, 0))) for s in range(40) if not 15 < s < 25]
    rows = [{"at_ns": traces.BASE_NS + s * SECOND, "cpu_s": cpu} for s, cpu in used]
    readings.write(folder / "ranks/00000/processes.jsonl", rows)
    assert means(folder)["cpu_cores"][0] < 0.9
    told = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(told | {"resumed_ns": [traces.BASE_NS + 25 * SECOND - 600 * MS]}))
    assert means(folder)["cpu_cores"] == pytest.approx((1, 1))


def test_a_run_without_samples_or_with_too_few_says_so(tmp_path: Path) -> None:
    run = runs.measured(sampled(tmp_path / "few", [{"cpu_s": n} for n in range(3)], steps=3), sample_means)
    with pytest.raises(NotMeasured, match="fewer than 3 readings"):
        run.frame(sample_means)
    runs.recorded(tmp_path / "none", (None, [light(n, MS) for n in range(9)], runs.CPU))
    with pytest.raises(NotMeasured, match="nothing was sampled"):
        runs.measured(tmp_path / "none", sample_means, sample_series).frame(sample_series)


def test_a_long_series_is_thinned_to_means(tmp_path: Path) -> None:
    run = runs.measured(sampled(tmp_path, [{"rss_bytes": n % 2} for n in range(5000)]), sample_series)
    frame = run.frame(sample_series)
    assert MOST_POINTS / 2 < len(frame) <= MOST_POINTS
    assert frame["value"].mean() == pytest.approx(0.5, abs=0.05)
    assert frame["at_ns"].is_monotonic_increasing
    assert frame["at_ns"].iloc[-1] > traces.BASE_NS + 4900 * SECOND
