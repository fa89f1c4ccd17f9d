"""The pages of reports/: without plotly.js, which they share, and with a policy that still lets it run."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import reports, summary
from benchmarks.accuracy import ROW, Planted
from dlprof.report import html
from dlprof.result import Result
from dlprof.result.stored import to_json
from tests.fixtures import results, runs
from tests.fixtures.runs import MS


def test_a_shared_page_names_plotly_and_does_not_hold_it() -> None:
    page = html.render(results.ALL["ddp"]())
    shared = reports.sharing(page, "../../plotly-basic.min.js")
    assert '<script src="../../plotly-basic.min.js"></script>' in shared
    assert len(page) - len(shared) > 1_000_000
    with pytest.raises(ValueError, match="otherwise than it used to"):
        reports.sharing(shared, "plotly-basic.min.js")


def test_a_report_is_kept_under_its_machine_and_names_no_folder_of_its_recording(tmp_path: Path) -> None:
    one = Planted("job", "slow", "input_wait", fault="slow")
    made = reports.keep(one, results.ALL["ddp"](), "1 × NVIDIA H200", tmp_path)
    assert made.folder == "1-nvidia-h200/job-slow"
    assert '"path":"job-slow"' in (tmp_path / made.folder / "result.json").read_text()
    assert made.steps.endswith("ms") or "MFU" in made.steps
    assert (tmp_path / made.folder / "report.html").stat().st_size < 500_000


def test_a_run_that_was_kept_is_diagnosed_anew_and_tells_no_path_of_its_machine(tmp_path: Path) -> None:
    steps = [runs.light(n, 100 * MS, fetch_ns=40 * MS, forward_ns=30 * MS) for n in range(40)]
    root = "/home/somebody/clone"
    for number, (name, facts) in enumerate(
        (("late", {}), ("late", {"script": f"{root}/workloads/job.py"}), ("other", {}))
    ):
        out = runs.recorded(
            tmp_path / f"job-late-{number}",
            (None, steps, {**runs.CPU, "host": "a-machine", **facts}),
            command=["/opt/somebody/env/bin/torchrun", f"{root}/workloads/job.py", "--data", f"{tmp_path}/data"],
            cwd="/home/somebody/elsewhere",
            hosts=["a-machine"],
        )
        (out / ROW).write_text(json.dumps({"name": name}))
    late = Planted("job", "late", "input_wait", fault="late")
    result = reports.again(late, tmp_path)
    assert isinstance(result, Result)
    assert result.run.command == ("env/bin/torchrun", "workloads/job.py", "--data", "data")
    assert [o.id for o in result.outcomes if o.state == "found"] == ["input_wait"]
    told = json.dumps(to_json(result))
    assert not any(word in told for word in ("somebody", "a-machine", str(tmp_path)))
    assert reports.again(replace(late, workload="jo"), tmp_path) == "not among the recordings"


def test_what_cannot_be_recorded_says_why_and_takes_no_report_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "workloads").mkdir()
    for name in ("foreign", "job"):
        script = tmp_path / "workloads" / f"{name}.py"
        script.write_text('FAULTS = {"copies": "pageable_copy", "late": "input_wait"}')
    there = {("job", "healthy"), ("job", "late")}

    def record(one: Planted, steps: int) -> Result | str:
        able = (one.workload, one.name) in there
        return results.ALL["ddp"]() if able else f"{one.name} needs {steps} | libraries"

    monkeypatch.setattr(reports, "WORKLOADS", tmp_path / "workloads")
    monkeypatch.setattr(reports, "machine", lambda: "here")
    monkeypatch.setattr(reports, "record", record)
    monkeypatch.setattr(sys, "argv", ["reports", "--out", str(tmp_path / "out"), "--steps", "9"])
    reports.main()
    rows = {(r.workload, r.name): r for r in summary.reported(tmp_path / "out")}
    assert set(rows) == {("foreign", "healthy"), *there}
    assert rows["foreign", "healthy"].headline == "not run: healthy needs 9 | libraries"
    assert rows["foreign", "healthy"].folder == ""
    assert "not run: healthy needs 9 \\| libraries | |" in (tmp_path / "out" / "README.md").read_text()
    assert 'href="/report.html"' not in (tmp_path / "out" / "index.html").read_text()

    there.remove(("job", "late"))
    reports.main()
    assert {r.name: r.headline for r in summary.reported(tmp_path / "out") if r.workload == "job"} == {
        "healthy": rows["job", "healthy"].headline,
        "copies": "not run: copies needs 9 | libraries",
    }
    assert not (tmp_path / "out" / "here" / "job-late").exists()
    there.clear()
    reports.main()
    assert (tmp_path / "out" / "here" / "job-healthy" / "report.html").exists()
    assert any(r.folder for r in summary.reported(tmp_path / "out"))
