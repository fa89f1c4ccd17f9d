"""What `dlprof.open` gives a script or a notebook: the same figures as the report, as frames and figures."""

from __future__ import annotations

import json
from pathlib import Path

import nbformat
import pandas as pd
import pytest
from nbclient import NotebookClient
from plotly.graph_objects import Figure

import dlprof
from dlprof.analysis.diagnosis import diagnose
from dlprof.analysis.rules import RULES
from dlprof.api import Run
from dlprof.errors import DlprofError, NotMeasured
from dlprof.read.run import open_run
from dlprof.result.stored import to_json
from tests.fixtures import runs, traces
from tests.fixtures.runs import CPU, MS

STEPS = 12


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of two ranks that wait for their loaders in every step, the trace of rank 0 alone recorded."""
    steps = [runs.light(n, 100 * MS, fetch_ns=40 * MS) for n in range(STEPS)]
    made = traces.training(3)
    return runs.recorded(tmp_path_factory.mktemp("api") / "run", (made, steps, CPU), (None, steps, CPU))


@pytest.fixture(scope="module")
def run(path: Path) -> Run:
    return dlprof.open(path)


def test_the_result_is_the_one_of_the_report(run: Run, path: Path) -> None:
    assert to_json(run.result) == to_json(diagnose(open_run(path), RULES, jobs=1))
    assert run.ranks == run.result.run.ranks == (0, 1)


def test_findings_are_the_outcomes_that_were_found(run: Run) -> None:
    assert run.findings["id"].tolist() == [o.id for o in run.result.found]
    assert run.findings["saving_ns"].tolist() == [o.saving_ns for o in run.result.found]
    assert run.findings["id"].iloc[0] == "input_wait"


def test_steps_and_spans_are_the_tables(run: Run) -> None:
    assert run.steps().groupby("rank")["step"].count().to_dict() == {0: STEPS, 1: STEPS}
    assert run.spans(0)["name"].str.startswith("ProfilerStep#").sum() == 3
    with pytest.raises(NotMeasured):
        run.spans(1)
    with pytest.raises(DlprofError, match="no rank 7; there are: 0, 1"):
        run.spans(7)


def _frame_or_why(run: Run, name: str) -> pd.DataFrame | str:
    try:
        return run.frame(name)
    except NotMeasured as e:
        return str(e)


def test_every_frame_that_is_listed_is_there_or_says_why_not(run: Run) -> None:
    listed = run.frames()
    assert "breakdown" in set(listed["name"])
    assert listed["what"].str.endswith(".").all()
    found = {name: _frame_or_why(run, name) for name in listed["name"]}
    assert all(isinstance(it, pd.DataFrame) or it for it in found.values())
    assert isinstance(found["breakdown"], pd.DataFrame)
    assert isinstance(found["sample_means"], str)  # nothing was sampled
    with pytest.raises(DlprofError, match="did you mean breakdown"):
        run.frame("brekdown")


def test_every_figure_of_the_report_is_a_figure_of_plotly(run: Run) -> None:
    listed = run.figures()
    assert {"breakdown", "timeline", "steps_over_the_run"} <= set(listed["name"])
    for name in listed["name"]:
        figure = run.figure(name)
        assert isinstance(figure, Figure)
        assert len(figure.data)
    with pytest.raises(DlprofError, match="did you mean timeline"):
        run.figure("timelin")


CELLS = """
import dlprof
run = dlprof.open({path!r})
run
# cell
run.frame("breakdown").groupby("category")["ns"].sum()["input_wait"]
# cell
print(run.figure("breakdown").to_json())
"""


@pytest.mark.long
def test_a_notebook_shows_the_verdict_and_the_frames(path: Path, run: Run) -> None:
    cells = [nbformat.v4.new_code_cell(text) for text in CELLS.format(path=str(path)).split("# cell\n")]  # type: ignore[no-untyped-call]
    done = NotebookClient(nbformat.v4.new_notebook(cells=cells)).execute()  # type: ignore[no-untyped-call]
    shown, value, figure = (cell.outputs[0] for cell in done.cells)
    assert shown.data["text/html"] == run._repr_html_()
    assert run.findings["title"].iloc[0] in shown.data["text/html"]
    measured = run.frame("breakdown")
    assert float(value.data["text/plain"].strip("np.float64()")) == pytest.approx(
        measured.loc[measured["category"] == "input_wait", "ns"].sum()
    )
    assert json.loads(figure.text)["data"]
