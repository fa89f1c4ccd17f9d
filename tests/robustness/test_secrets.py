"""A job's secrets are nowhere in its run folder, nor in its report, nor in what is exported."""

from __future__ import annotations

import json
import random
import stat
from pathlib import Path

import pytest

from benchmarks.torture.secrets import SHAPES, held, leaks, plant, promised, random_shape

pytest.importorskip("torch", reason="recording needs torch")


@pytest.mark.long
@pytest.mark.parametrize("options", [(), pytest.param(("--keep-arguments",), marks=pytest.mark.slow)])
def test_secrets_of_command_environment_and_source_reach_nothing(tmp_path: Path, options: tuple[str, ...]) -> None:
    dice = random.Random(7)
    shapes = [shape for shape in (*SHAPES, *(random_shape(dice) for _ in range(60))) if shape.named or not options]
    planted = plant(tmp_path, shapes, dice, "--lines", "__main__:step", *options)
    assert stat.S_IMODE(planted.run.stat().st_mode) == 0o700
    files = held(planted.run)
    # What is no secret is there: the search looks where it should.
    for word in ("0.125", "adamw", "--precision=bf16", "[redacted]"):
        assert leaks({"run.json": files["run.json"]}, [word])
    calls = json.loads((planted.run / "ranks/00000/facts.json").read_text())["calls"]
    assert any("model(batch[0], **login(token=" in call["source"] for call in calls)
    assert b"loss.backward(**login(" in files["ranks/00000/lines.jsonl"]
    assert {"report.html", "result.json"} <= set(leaks(files, ["adamw"])["adamw"])
    if "ranks/00000/stacks.txt.gz" in files:
        assert b"thread (" in files["ranks/00000/stacks.txt.gz"]
    # In what the job is started with, the whole body of a shell is one argument.
    found = leaks(files, promised(planted, keep=bool(options)))
    assert {planted.secrets[secret]: names for secret, names in found.items()} == {}
