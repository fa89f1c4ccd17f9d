"""Forward passes for nothing: found with the lines that call them, silent without, abstaining where not recorded."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.step.rules.unused_forward import RULE
from tests.fixtures import runs
from tests.fixtures.asking import ask
from tests.fixtures.jobs import record, tiny
from tests.fixtures.runs import MS, light
from tests.fixtures.sampled_stacks import MAIN

CALL = "_wrapped_call_impl (/lib/python3.11/site-packages/torch/nn/modules/module.py:1500)"
STACKS = (
    f"{MAIN};main (/me/train.py:61);{CALL};forward (/me/net.py:5) 55\n"
    f"{MAIN};main (/me/train.py:69);{CALL};forward (/me/net.py:5) 45\n"
)


def recorded(folder: Path, unused: int, stacks: str = "", **facts: Any) -> Path:
    """Record 50 steps of 20 ms, of which so many ms are in forward passes for nothing."""
    steps = [light(n, 20 * MS, forward_ns=8 * MS, unused_forward_ns=unused * MS, forwards=2) for n in range(50)]
    path = runs.recorded(folder / "run", (None, steps, {**runs.CPU, "pid": 10, **facts}))
    if stacks:
        (path / "ranks/00000/stacks.txt.gz").write_bytes(gzip.compress(stacks.encode()))
    return path


def test_a_second_forward_pass_is_found_with_the_lines(tmp_path: Path) -> None:
    found = ask(RULE, recorded(tmp_path, 3, STACKS))
    assert found.state == "found"
    assert found.saving_ns == pytest.approx(3 * MS)
    assert found.evidence is not None
    assert found.evidence.rows == (("main (train.py:61)", 0.55), ("main (train.py:69)", 0.45))
    assert not any(change.settings for change in found.changes)


def test_without_stacks_it_is_found_as_well(tmp_path: Path) -> None:
    found = ask(RULE, recorded(tmp_path, 3))
    assert (found.state, found.evidence) == ("found", None)


def test_forward_passes_that_are_used_are_left_alone(tmp_path: Path) -> None:
    assert ask(RULE, recorded(tmp_path, 0)).state == "clear"


def test_on_a_device_it_abstains(tmp_path: Path) -> None:
    assert ask(RULE, recorded(tmp_path, 3, device={"type": "cuda", "name": "A100"})).state == "not_measured"


def test_an_older_log_abstains(tmp_path: Path) -> None:
    path = runs.recorded(tmp_path / "run", (None, [light(n, MS) for n in range(50)], runs.CPU))
    assert ask(RULE, path).state == "not_measured"


@pytest.mark.long
def test_a_real_script_that_judges_each_batch_again(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    body = """
    model = nn.Sequential(*[nn.Linear(400, 400) for _ in range(8)], nn.Linear(400, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    batch = torch.randn(256, 400), torch.randn(256, 1)
    for n in range(60):
        train(batch)
        with torch.no_grad():
            model(batch[0])
    """
    record(tiny(tmp_path, body), folder=tmp_path / "run", options=["--no-trace", "--flops", "off"])
    found = ask(RULE, tmp_path / "run")
    assert (found.state, found.lost_share is not None) == ("found", True)
    assert 0.1 < found.share < 0.5
