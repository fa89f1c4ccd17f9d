"""What `dlprof.open` gives a script or a notebook: the same figures as the report, as frames and figures."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import nbformat
import pandas as pd
import pytest
from nbclient import NotebookClient
from plotly.graph_objects import Figure

import dlprof
from dlprof.analysis.diagnosis import diagnose
from dlprof.analysis.rules import RULES
from dlprof.api import CALLS, Run
from dlprof.errors import DlprofError, DoesNotApply, NotMeasured
from dlprof.read.run import open_run
from dlprof.result import Result, Window
from dlprof.result.stored import to_json
from tests.fixtures import runs, traces
from tests.fixtures.places import ROOT, TRACES
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


# What the calls say of the traces of `gpu`, as `traces.training` writes them: of rank 0 in ns of a step of 1 ms.
KERNELS = [
    ("computation", "sm90_gemm", 300_000),
    ("computation", "sm90_gemm_backward", 200_000),
    ("communication", "all_reduce", 200_000),
    ("computation", "multi_tensor_apply", 50_000),
    ("copy", "HtoD pageable", 25_000),
]


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return the traces of two ranks with a device each."""
    folder = tmp_path_factory.mktemp("gpu") / "traces"
    for rank in range(2):
        traces.write(folder / f"rank{rank}.json", traces.training(5, rank=rank, world_size=2))
    return dlprof.open(folder)


def test_the_calls_are_the_traces_figures(gpu: Run) -> None:
    kernels = gpu.kernels()
    mine = kernels[kernels["rank"] == 0]
    assert [tuple(row) for row in mine[["kind", "name", "ns"]].itertuples(index=False)] == KERNELS
    assert (mine["calls"] == 1).all()
    assert kernels.groupby("rank")["share"].sum().tolist() == pytest.approx([1.0, 1.0])
    overlap = gpu.overlap().set_index("rank").loc[0]
    assert overlap.to_dict() == {
        "communication_ns": 200_000.0,
        "hidden_ns": 80_000.0,
        "exposed_ns": 120_000.0,
        "hidden_share": pytest.approx(0.4),
    }
    wide = gpu.breakdown()
    assert (wide.index.name, list(wide.columns[:2])) == ("rank", ["step_ns", "computation_ns"])
    assert wide.drop(columns="step_ns").sum(axis="columns").tolist() == pytest.approx(wide["step_ns"].tolist())
    idle = gpu.idle()
    assert list(idle.columns) == ["rank", "category", "ns", "share"]
    busy = wide.loc[0, ["computation_ns", "communication_ns", "copy_ns"]].sum()
    assert idle[idle["rank"] == 0]["ns"].sum() + busy == pytest.approx(wide.loc[0, "step_ns"])
    queue = gpu.queue()
    assert list(queue.columns) == ["rank", "mean", "std", "min", "25%", "50%", "75%", "max", "lag_ns"]
    assert len(queue) == 2
    assert (queue["max"] >= queue["mean"]).all()


def test_each_call_has_a_figure_of_its_name(gpu: Run) -> None:
    assert gpu.figures()["name"].tolist()[: len(CALLS)] == list(CALLS)
    assert all(len(gpu.figure(call).data) for call in CALLS)


# What runs do not have, and the words of why: of the run on CPUs, and of the traces of GPUs.
ABSENT: list[tuple[str, str, Callable[[Run], object], type[NotMeasured], str]] = [
    ("run", "kernels", lambda run: run.kernels(), DoesNotApply, "trains on the CPU"),
    ("run", "idle", lambda run: run.idle(), DoesNotApply, "trains on the CPU"),
    ("run", "queue", lambda run: run.queue(), DoesNotApply, "trains on the CPU"),
    ("run", "queue's figure", lambda run: run.figure("queue"), DoesNotApply, "trains on the CPU"),
    ("run", "tried", lambda run: run.part("tried"), NotMeasured, "nothing was tried"),
    ("run", "host_limited", lambda run: run.part("host_limited"), NotMeasured, "what the host costs is not known"),
    ("gpu", "throughput", lambda run: run.part("throughput"), NotMeasured, "no record of every step"),
    ("gpu", "mfu", lambda run: run.part("mfu"), NotMeasured, "were not counted"),
    ("gpu", "footprint", lambda run: run.part("footprint"), NotMeasured, "not counted what memory holds"),
    ("gpu", "loop", lambda run: run.part("loop"), NotMeasured, "this run has no loop"),
]


@pytest.mark.parametrize(("of", "what", "ask", "kind", "why"), ABSENT, ids=[f"{of}: {what}" for of, what, *_ in ABSENT])
def test_what_a_run_does_not_have_is_absent_with_a_reason(
    of: str, what: str, ask: Callable[[Run], object], kind: type[NotMeasured], why: str, request: pytest.FixtureRequest
) -> None:
    with pytest.raises(NotMeasured, match=why) as e:
        ask(request.getfixturevalue(of))
    assert type(e.value) is kind
    assert what not in set(request.getfixturevalue(of).figures()["name"])


def _part_or_why(run: Run, name: str) -> object:
    try:
        return run.part(name)
    except NotMeasured as e:
        return str(e)


def test_every_part_of_a_result_is_there_or_says_why_not(run: Run, gpu: Run) -> None:
    for of in (run, gpu):
        for name in (*Result.__struct_fields__, *Window.__struct_fields__):
            assert _part_or_why(of, name) not in (None, (), "")
    with pytest.raises(DlprofError, match="did you mean throughput"):
        run.part("thruput")


def test_one_rank_that_exchanges_nothing_has_no_overlap(tmp_path: Path) -> None:
    kernel = traces.ahead(4, 500_000, 400_000)
    with pytest.raises(DoesNotApply, match="no rank communicates"):
        dlprof.open(traces.write(tmp_path / "trace.json", kernel)).overlap()


def test_two_runs_compared(gpu: Run, run: Run, tmp_path: Path) -> None:
    found = gpu.compare(gpu)
    columns = ["kind", "name", "a_ns", "b_ns", "change_ns", "noise_ns", "verdict", "a_calls", "b_calls"]
    assert list(found.columns) == columns
    assert found["kind"].unique().tolist() == ["step", "part", "collective", "kernel", "operator", "range"]
    assert set(found["change_ns"]) == {0.0}
    assert found["a_ns"][0] == gpu.breakdown()["step_ns"].mean()
    assert found.attrs.keys() == {"doubts", "not_compared"}
    assert len(gpu.figure("compare", gpu).data) == 2
    with pytest.raises(DlprofError, match="no such file"):
        gpu.compare(tmp_path / "nothing")
    traces.write(tmp_path / "unmarked.json", traces.trace(traces.op("aten::mm", 0, 10)))
    with pytest.raises(NotMeasured, match="steps and their parts"):
        run.compare(tmp_path / "unmarked.json")


def test_frames_are_listed_by_subject_in_plain_words(run: Run) -> None:
    listed = run.frames()
    assert listed[["group", "name"]].equals(listed[["group", "name"]].sort_values(["group", "name"]))
    assert {"communication", "input", "memory", "step"} <= set(listed["group"])
    for column in ("what", "help"):
        assert not listed[column].str.contains(r"^Return|[−-]1[:,;).]", regex=True).any()
        assert listed[column].str.match(r"[A-Z`]").all()


FURTHER = [pytest.param(name, marks=pytest.mark.slow) for name in ("dlrm_v100_8ranks", "h200/g01_gpt_fp32")]


@pytest.mark.parametrize("name", ["run", "gpu", "memory", *FURTHER])
def test_what_is_not_known_is_na_and_never_minus_one(name: str, request: pytest.FixtureRequest) -> None:
    if name in ("run", "gpu"):
        opened = request.getfixturevalue(name)
    elif (TRACES / name).is_dir():
        opened = dlprof.open(TRACES / name)
    else:
        pytest.skip(f"needs {name} beside the repository")
    frames = {name: _frame_or_why(opened, name) for name in opened.frames()["name"]}
    with suppress(NotMeasured):
        frames["spans"] = opened.spans(opened.ranks[0])
    odd = [
        f"{name}: {column}"
        for name, frame in frames.items()
        if isinstance(frame, pd.DataFrame)
        for column, values in frame.select_dtypes("number").items()
        if column not in ("ahead_ns", "offset_ns") and (values == -1).any()
    ]
    assert odd == []
    if name == "gpu":
        spans = frames["spans"]
        assert isinstance(spans, pd.DataFrame)
        assert str(spans["bytes"].dtype) == "Int64"
        assert spans["bytes"].isna().any()
        assert spans["bytes"].dropna().min() >= 0


def test_the_package_shows_what_it_offers_and_the_result_is_plain_data(run: Run, path: Path) -> None:
    assert dir(dlprof) == sorted(dlprof.__all__)
    assert all(getattr(dlprof, name) is not None for name in dir(dlprof))
    assert run.result.to_dict() == to_json(run.result)


def test_every_figure_of_the_report_is_a_figure_of_plotly(run: Run) -> None:
    listed = run.figures()
    assert {"breakdown", "timeline", "steps_over_the_run"} <= set(listed["name"])
    for name in listed["name"]:
        figure = run.figure(name)
        assert isinstance(figure, Figure)
        assert len(figure.data)
    with pytest.raises(DlprofError, match="did you mean timeline"):
        run.figure("timelin")


@pytest.mark.slow
def test_the_notebook_of_the_documentation_runs_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # the simulator is in the repository alone
    stored = nbformat.read(ROOT / "docs" / "notebook.ipynb", 4)  # type: ignore[no-untyped-call]
    kinds = [[sorted(one.get("data", {})) for one in c.outputs] for c in stored.cells if c.cell_type == "code"]
    client = NotebookClient(stored, resources={"metadata": {"path": str(tmp_path)}}, timeout=240)
    done = [cell for cell in client.execute().cells if cell.cell_type == "code"]
    for cell, before in zip(done, kinds, strict=True):
        assert [set(kind) <= set(one.get("data", {})) for one, kind in zip(cell.outputs, before, strict=True)] == [
            True
        ] * len(before), cell.source
    called = "\n".join(cell.source for cell in done)
    assert [
        name for name in (*CALLS, "compare") if f"run.{name}(" not in called or f'figure("{name}"' not in called
    ] == []
