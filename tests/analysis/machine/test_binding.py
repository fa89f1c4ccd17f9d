"""Which cores ranks share, and on which NUMA node they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.machine.cores import bindings, cores_of
from dlprof.errors import DoesNotApply, NotMeasured
from tests.fixtures import runs
from tests.fixtures.runs import MS

NODES = {"0": "0-3", "1": "4-7"}


def job(folder: Path, *cores: str, count: int = 8, **device: Any) -> Path:
    rows = [runs.light(n, 100 * MS) for n in range(20)]
    facts = [{**runs.CPU, "cpu": {"count": count, "allowed": text, "nodes": NODES}} for text in cores]
    if device:
        facts = [f | {"device": {**runs.A100, "index": 0, **device}} for f in facts]
    return runs.recorded(folder, *((None, rows, f) for f in facts))


def found(path: Path) -> list[dict[str, Any]]:
    columns = ["rank", "cores", "shared", "left", "node", "gpu_node"]
    rows: Any = runs.measured(path, bindings).frame(bindings)[columns].to_dict("records")
    return list(rows)


@pytest.mark.parametrize(
    ("text", "cores"), [("0-3,8", {0, 1, 2, 3, 8}), ("5", {5}), ("", set()), (None, set()), ("a-b,-,1", {1})]
)
def test_a_list_of_the_kernels(text: str, cores: set[int]) -> None:
    assert cores_of(text) == cores


def test_ranks_that_share_cores(tmp_path: Path) -> None:
    assert found(job(tmp_path, "0-1", "0-1")) == [
        {"rank": r, "cores": 2, "shared": 2, "left": 6, "node": 0, "gpu_node": -1} for r in (0, 1)
    ]


def test_ranks_with_cores_of_their_own(tmp_path: Path) -> None:
    rows = found(job(tmp_path, "0-3", "4-7", node=0))
    assert [(r["shared"], r["left"], r["node"], r["gpu_node"]) for r in rows] == [(0, 0, 0, 0), (0, 0, 1, 0)]
    assert found(job(tmp_path / "across", "2-5"))[0]["node"] == -1


def test_without_a_binding_it_does_not_apply(tmp_path: Path) -> None:
    with pytest.raises(DoesNotApply):
        found(job(tmp_path / "a", "0-7", "0-7"))
    with pytest.raises(NotMeasured, match="not recorded"):
        found(runs.recorded(tmp_path / "b", (None, [runs.light(0, MS)], runs.CPU)))
