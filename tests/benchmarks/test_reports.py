"""The pages of reports/: without plotly.js, which they share, and with a policy that still lets it run."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import reports
from benchmarks.accuracy import Planted
from dlprof.renderers import html
from tests.renderers import results


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
