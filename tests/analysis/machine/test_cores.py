"""How ranks wait for cores, which they are bound to or could use, and what programs outside the job take of them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from dlprof.analysis.diagnosis import diagnose
from dlprof.analysis.engine import Job, Maybe
from dlprof.analysis.machine.cores import bindings, core_waits, cores_of, spare_cores
from dlprof.analysis.machine.samples import foreign_load
from dlprof.errors import DoesNotApply, NotMeasured
from dlprof.read.run import open_run
from tests.fixtures import runs
from tests.fixtures.readings import crowded
from tests.fixtures.runs import MS


def frame_of(measure: Any, path: Path) -> pd.DataFrame:
    frame: pd.DataFrame = runs.measured(path, measure).frame(measure)
    return frame


def on_gpu(path: Path) -> Path:
    facts = path / "ranks/00000/facts.json"
    facts.write_text(json.dumps(json.loads(facts.read_text()) | {"device": {"type": "cuda"}}))
    return path


def test_on_a_gpu_with_as_many_threads_as_cores_all_of_the_wait_counts(tmp_path: Path) -> None:
    frame = frame_of(core_waits, on_gpu(crowded(tmp_path, 0.3)))
    assert frame["waits_ns"].to_list() == pytest.approx([270 * MS])


@pytest.mark.parametrize(
    ("ranks", "how", "more"),
    [
        (1, {}, 8),
        (2, {}, 4),
        (2, {"others": 3.4}, 2),
        (2, {"affinity": 3}, 3),
        # More threads than cores are no reason for fewer here.
        (2, {"threads": 8}, 8),
    ],
)
def test_a_core_that_nobody_uses_is_one_for_another_thread(
    tmp_path: Path, ranks: int, how: dict[str, Any], more: int
) -> None:
    """A rank uses two of eight cores with two threads."""
    frame = frame_of(spare_cores, crowded(tmp_path, *[0.0] * ranks, **{"threads": 2, **how}))
    assert frame["more"].to_list() == [more] * ranks
    assert how or frame["idle"].to_list() == [pytest.approx(6.0 if ranks == 1 else 2.0)] * ranks


def test_without_samples_of_the_host_no_core_is_known_to_be_idle(tmp_path: Path) -> None:
    path = crowded(tmp_path, 0.0)
    (path / "hosts/node-1/host.jsonl").write_text("")
    with pytest.raises(NotMeasured, match="not sampled"):
        frame_of(spare_cores, path)


# ---- bindings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "cores"), [("0-3,8", {0, 1, 2, 3, 8}), ("5", {5}), ("", set()), (None, set()), ("a-b,-,1", {1})]
)
def test_a_list_of_the_kernels(text: str, cores: set[int]) -> None:
    assert cores_of(text) == cores


@pytest.mark.parametrize(
    ("cores", "gpu", "rows"),
    [
        (("0-1", "0-1"), None, [(2, 2, 6, 0, -1), (2, 2, 6, 0, -1)]),
        (("0-2", "2-4"), None, [(3, 1, 3, 0, -1), (3, 1, 3, -1, -1)]),
        (("0-3", "4-7"), 0, [(4, 0, 0, 0, 0), (4, 0, 0, 1, 0)]),
        (("0-7", "0-7"), None, []),
    ],
)
def test_which_cores_ranks_share_and_on_which_node_they_are(
    tmp_path: Path, cores: tuple[str, ...], gpu: int | None, rows: list[tuple[int, ...]]
) -> None:
    nodes = {"0": "0-3", "1": "4-7"}
    facts: list[dict[str, Any]] = [{**runs.CPU, "cpu": {"count": 8, "allowed": c, "nodes": nodes}} for c in cores]
    if gpu is not None:
        facts = [f | {"device": {**runs.A100, "index": 0, "node": gpu}} for f in facts]
    path = runs.recorded(tmp_path, *((None, [runs.light(n, 100 * MS) for n in range(20)], f) for f in facts))
    if not rows:
        with pytest.raises(DoesNotApply):
            frame_of(bindings, path)
        return
    columns = ["cores", "shared", "left", "node", "gpu_node"]
    assert list(frame_of(bindings, path)[columns].itertuples(index=False, name=None)) == rows


def test_cores_that_were_not_recorded_are_not_measured(tmp_path: Path) -> None:
    with pytest.raises(NotMeasured, match="not recorded"):
        frame_of(bindings, runs.recorded(tmp_path, (None, [runs.light(0, MS)], runs.CPU)))


# ---- programs outside the job --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("waits", "how", "used", "foreign", "lost", "disturbs"),
    [
        # Two ranks of two cores each, half a core of their launcher's, and 3.5 of somebody else.
        ((0.3, 0.1), {"others": 4.0, "ours": 4.5}, 8.0, 3.5, 0.3, 1),
        # With too many threads the job makes itself wait, but for the others' share of what is used.
        ((0.3, 0.3), {"threads": 8, "others": 1.0, "ours": 4.0}, 4.96, 0.96, 0.3 * 0.96 / 4.96, 1),
        ((0.3, 0.3), {"others": 0.0, "ours": 4.0}, 4.0, 0.0, 0.3, 0),  # nobody else is there
        ((0.01, 0.01), {"others": 2.0, "ours": 4.0}, 6.0, 2.0, 0.01, 0),  # they have cores of their own
        ((0.01, 0.01), {"others": 4.0, "ours": 4.0}, 8.0, 4.0, 0.01, 1),  # no core is left
        ((0.3, 0.3), {"others": 0.2, "ours": 4.0}, 4.16, 0.16, 0.3, 0),  # a host's own services
        ((0.2, 0.2), {"others": 2.0, "ours": 4.0}, 6.0, 2.0, 0.2, 1),
        # Nobody knows what a GPU without a trace leaves idle.
        ((0.3,), {"others": 2.0, "ours": 2.0}, 4.0, 2.0, 0.3, 1),
    ],
)
def test_what_programs_outside_the_job_take(
    tmp_path: Path, waits: Any, how: dict[str, Any], used: float, foreign: float, lost: float, disturbs: int
) -> None:
    path = crowded(tmp_path, *waits, **{"threads": 4, **how})
    (row,) = frame_of(foreign_load, on_gpu(path) if len(waits) == 1 else path).to_dict("records")
    assert (row["host"], row["cores"], row["waited"]) == ("node-1", 8, pytest.approx(max(waits)))
    assert [row["used"], row["foreign"], row["lost"]] == pytest.approx([used, foreign, lost], abs=1e-3)
    assert (row["ours"], row["disturbs"]) == (pytest.approx(how["ours"]), disturbs)


def test_a_job_whose_workers_need_its_cores_makes_itself_wait(tmp_path: Path) -> None:
    path = crowded(tmp_path, 0.3, threads=4, others=6.0, ours=6.0)
    processes = path / "ranks/00000/processes.jsonl"
    lines = [json.loads(line) for line in processes.read_text().splitlines()]
    processes.write_text("".join(json.dumps(row | {"children_cpu_s": 4.0 * n}) + "\n" for n, row in enumerate(lines)))
    assert frame_of(foreign_load, path)["lost"].iloc[0] == pytest.approx(0.3 * 2 / 8)


def test_on_a_gpu_no_more_is_lost_than_it_leaves_idle(tmp_path: Path) -> None:
    path = on_gpu(crowded(tmp_path, 0.3, threads=4, others=2.0, ours=2.0))
    idle = pd.DataFrame({"rank": [0, 0], "category": ["computation", "host"], "ns": [810.0 * MS, 90.0 * MS]})

    def traced(sample_means: pd.DataFrame, job: Job) -> pd.DataFrame:
        return foreign_load(sample_means, Maybe(lambda: idle), 900.0 * MS, job)

    row = runs.asked(runs.measured(path, foreign_load), traced).iloc[0]
    assert (row["waited"], row["lost"]) == (pytest.approx(0.1), pytest.approx(0.1))


@pytest.mark.parametrize(
    ("waits", "how", "foreign"),
    [(0.3, {"others": 6.0, "ours": 2.0}, 6.0), (0.0, {"ours": 2.0}, 0.0), (0.3, {"others": 6.0}, math.nan)],
)
def test_the_result_has_the_host_that_felt_it_and_warns(
    tmp_path: Path, waits: float, how: dict[str, Any], foreign: float
) -> None:
    found = diagnose(open_run(crowded(tmp_path, waits, threads=4, **how)), (), jobs=1)
    load = found.foreign_load
    assert (math.nan if load is None else load.foreign) == pytest.approx(foreign, nan_ok=True)
    assert (load is not None and load.disturbs) == (foreign > 0)
    warned = any("programs outside the job used 6 of 8 cores" in warning for warning in found.run.warnings)
    assert warned == (foreign > 0)
