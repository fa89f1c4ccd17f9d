"""The Horovod workload: it is recorded under its own launcher, and without Horovod it says in a line what it needs."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch.utils.data import DistributedSampler

from tests.fixtures.jobs import DLPROF, launch
from tests.workloads import FOLDER
from tests.workloads.scripts import load, losses

workload = load("horovod_resnet")
there = importlib.util.find_spec("horovod") is not None


@pytest.mark.slow
@pytest.mark.skipif(not there, reason="horovod is not installed")
def test_its_ranks_exchange_gradients_within_their_optimizer(tmp_path: Path) -> None:
    command = [*DLPROF, "run", str(FOLDER / "horovod_resnet.py"), "--procs", "2", "-o", "run", "--", "--steps", "40"]
    done = launch(command, tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(losses(done)) == 2
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert (result["run"]["world_size"], result["run"]["ranks"]) == (2, [0, 1])
    assert {t["rank"] for t in result["time"] if t["category"] == "communication" and t["ns"] > 0} == {0, 1}
    assert [e["collective"] for e in result["exchanges"]] == ["all_reduce"]


@pytest.mark.long
def test_its_ranks_share_out_the_pictures_and_its_model_learns_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run it as the second of two ranks whose Horovod exchanges nothing."""
    monkeypatch.setitem(sys.modules, "horovod", ModuleType("horovod"))
    monkeypatch.setitem(sys.modules, "horovod.torch", hvd := ModuleType("horovod.torch"))
    calls: list[str] = []
    for name, value in (("init", None), ("rank", 1), ("local_rank", 1), ("size", 2)):
        setattr(hvd, name, lambda value=value: value)
    for name in ("broadcast_parameters", "broadcast_optimizer_state"):
        setattr(hvd, name, lambda *_, name=name, **__: calls.append(name))
    hvd.DistributedOptimizer = lambda optimizer, **_: optimizer  # type: ignore[attr-defined]
    shares: list[list[int]] = []

    class Sampler(DistributedSampler[Any]):
        def __iter__(self) -> Iterator[int]:
            shares.append([*super().__iter__()])
            return iter(shares[-1])

    monkeypatch.setattr(workload, "DistributedSampler", Sampler)
    found: list[float] = []
    monkeypatch.setattr(workload.Log, "step", lambda _log, _step, loss: found.append(loss.item()))
    options = ["--device=cpu", "--steps=20", "--width=8", "--blocks=1", "--size=16", "--read-ms=0", "--workers=0"]
    monkeypatch.setattr(sys, "argv", ["horovod_resnet.py", *options, "--lr=0.025", "--fault=python_metrics"])
    workload.main()
    assert capsys.readouterr().out == ""  # the first rank prints
    assert calls == ["broadcast_parameters", "broadcast_optimizer_state"]
    assert len(found) == 20
    assert sum(found[-3:]) < 0.8 * sum(found[:3])
    (mine,) = shares
    pictures = workload.Patterns(640, 16, seed=0)
    other: list[int] = list(DistributedSampler(pictures, 2, 0, seed=0))
    assert sorted([*mine, *other]) == list(range(640))
