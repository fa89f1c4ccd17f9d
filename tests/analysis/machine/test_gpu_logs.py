"""What GPU logs say on the whole, beside a trace and alone."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from dlprof.analysis.machine.clocks import clocks
from dlprof.analysis.machine.gpu_logs import gpu_logs, gpu_uses
from dlprof.commands.report import analyse
from dlprof.errors import NotMeasured
from tests.fixtures import runs, traces
from tests.fixtures.logged import smi
from tests.fixtures.runs import measured

BEGIN = datetime(2026, 3, 4, 5, 6, 7)


def test_a_log_alone_is_judged_as_a_whole(tmp_path: Path) -> None:
    (tmp_path / "gpus.csv").write_text(smi(BEGIN, 30, 1980, 1300, reasons=0x40))
    made = measured(tmp_path / "gpus.csv", gpu_logs, gpu_uses)
    uses = made.frame(gpu_uses).set_index("source")
    hot = uses.loc["nvidia-smi 1"]
    assert (hot["readings"], hot["seconds"], hot["at"]) == (30, 29.0, "log")
    assert (hot["busy_share"], hot["power_w"], hot["sm_clock_mhz"]) == (pytest.approx(0.9), 400, 1300)
    assert hot["memory_used_bytes"] / hot["memory_total_bytes"] == 0.5
    assert hot["held_by"] == "heat"
    assert hot["clock_lost"] == pytest.approx(1 - 1300 / 1980)
    assert "power_limit" not in hot["lacks"]


def test_what_it_lacks_is_named_with_the_option_that_brings_it(tmp_path: Path) -> None:
    rows = "".join(f"2026/03/04 05:06:{s:02d}.000, 0, 50 %\n" for s in range(9))
    (tmp_path / "gpus.csv").write_text("timestamp, index, utilization.gpu [%]\n" + rows)
    made = measured(tmp_path / "gpus.csv", gpu_logs, clocks)
    assert "clocks_event_reasons.active" in made.frame(gpu_logs)["lacks"].iloc[0]
    with pytest.raises(NotMeasured, match=r"clocks\.max\.sm"):
        made.frame(clocks)


def test_a_log_of_no_times_is_a_summary(tmp_path: Path) -> None:
    (tmp_path / "dmon").write_text("# gpu   pwr    sm\n# Idx     W     %\n" + "    0   300    80\n" * 5)
    row = measured(tmp_path / "dmon", gpu_logs).frame(gpu_logs).iloc[0]
    assert (row["readings"], row["seconds"], row["at"], row["why"]) == (5, 0.0, "log", "it has no times")


def test_a_run_without_a_log_has_none(tmp_path: Path) -> None:
    with pytest.raises(NotMeasured):
        measured(runs.foreign(tmp_path / "a", traces.training()), gpu_logs).frame(gpu_logs)


def test_a_log_beside_a_trace_is_put_on_its_clock(tmp_path: Path) -> None:
    """Its times are of a zone two hours east, which it does not say; ten of its twelve readings lie in the trace."""
    traces.write(tmp_path / "rank0.json.gz", traces.training(steps=40, world_size=1))
    begun_s = traces.BASE_NS / 1e9 + 0.010
    lines = ["timestamp, index, utilization.gpu [%], clocks.sm [MHz]"]
    for n in range(12):
        at = datetime.fromtimestamp(begun_s - 0.002 + 0.004 * n, timezone.utc) + timedelta(hours=2)
        lines.append(f"{at:%Y/%m/%d %H:%M:%S}.{at.microsecond // 1000:03d}, 0, {50 + n} %, 1980 MHz")
    (tmp_path / "gpus.csv").write_text("\n".join(lines) + "\n")
    panels = {panel.title: panel for panel in analyse(tmp_path, 1).panels}
    assert panels["GPUs by their logs"].rows[0][:3] == ("nvidia-smi 0", 10, pytest.approx(0.555))
    assert "UTC+2 is where it lies with the run" in panels["GPUs by their logs"].note
    drawn = panels["GPU: some kernel ran"].rows
    assert drawn[0][0] == 0
    assert [float(str(share)) for _, share in drawn] == sorted(float(str(share)) for _, share in drawn)
