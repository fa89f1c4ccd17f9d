"""Autocast as an edit: around the statements from the model's call to before its backward pass, or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from dlprof.analysis.source.edits import Call, NotEditable, Recorded
from dlprof.analysis.source.insertions import autocast, pair
from dlprof.analysis.source.patches import patch_of
from dlprof.analysis.source.where import _located
from dlprof.result import change
from tests.fixtures.edits import apply
from tests.fixtures.jobs import COMPILES_NOTHING, record
from tests.fixtures.jobs import facts as recorded_facts

CPU = Recorded(device="cpu")


def edited(source: str) -> str:
    """Return a script with the edit; the model is called in the line with `model(`."""
    lines = source.splitlines()
    forward, backward = (
        next(n for n, line in enumerate(lines, 1) if what in line) for what in ("model(", ".backward()")
    )
    text = source.encode()
    for one in reversed(autocast(Call("forward", "t.py", forward, job=CPU), Call("backward", "t.py", backward), text)):
        text = text[: one.begin] + one.new + text[one.end :]
    return text.decode()


WITH = 'with torch.autocast("cpu", torch.bfloat16):'
EDITS = {
    "one statement": (
        "for x, y in data:\n    loss = f(model(x), y)  # the loss\n    loss.backward()\n",
        f"for x, y in data:\n    {WITH}\n        loss = f(model(x), y)  # the loss\n    loss.backward()\n",
    ),
    "several, with lines between them": (
        "def f():\n    out = model(\n        x,\n    )\n\n    # how far off\n    loss = g(out)\n    opt.zero_grad()\n"
        "    loss.backward()\n",
        f"def f():\n    {WITH}\n        out = model(\n            x,\n        )\n\n        # how far off\n"
        "        loss = g(out)\n        opt.zero_grad()\n    loss.backward()\n",
    ),
    "tabs": ("while 1:\n\tl = model(x)\n\tl.backward()\n", f"while 1:\n\t{WITH}\n\t\tl = model(x)\n\tl.backward()\n"),
    "the script's own level": ("l = model(x)\n(l / 4).backward()\n", f"{WITH}\n    l = model(x)\n(l / 4).backward()\n"),
    "a backward pass in a block": (
        "l = model(x)\nif ok:\n    l.backward()\n",
        f"{WITH}\n    l = model(x)\nif ok:\n    l.backward()\n",
    ),
}


@pytest.mark.parametrize(("source", "after"), EDITS.values(), ids=EDITS)
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_all_up_to_the_backward_pass_is_under_autocast(source: str, after: str, newline: str) -> None:
    assert edited(source.replace("\n", newline)) == after.replace("\n", newline)


@pytest.mark.parametrize(
    "source",
    [
        "l = model(x); l.backward()\n",
        "l = model('''\na''')\nl.backward()\n",
        "out = model(x)\nif ok:\n    l = f(out)\nl.backward()\n",
        "def f():\n    return model(x)\ndef g():\n    l.backward()\n",
        "def f(): return model(x)\nf().backward()\n",
        "l.backward()\nl = model(x)\n",
        "if ok: l = model(x)\nl.backward()\n",
    ],
)
def test_what_is_no_row_of_simple_statements_is_left_alone(source: str) -> None:
    with pytest.raises(NotEditable):
        edited(source)


def test_the_model_is_called_and_learns_in_one_place_each() -> None:
    forward, backward = Call("forward", "t.py", 1, "f", torch=True), Call("backward", "t.py", 2, "f")
    assert pair([forward, backward]) == (forward, backward)
    others: tuple[list[Call], ...] = (
        [forward],
        [backward],
        [forward, forward, backward],
        [forward, backward, backward],
    )
    assert [pair(calls) for calls in others] == [None] * 4
    assert pair([forward, Call("backward", "t.py", 2, "g")]) is None
    assert pair([Call("forward", "t.py", 1, "f"), backward]) is None  # no torch there


TRAINS = """import torch
from torch import nn

def main():
    model, loss_of = nn.Linear(64, 8), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(30):
        optimizer.zero_grad()
        out = model(torch.randn(16, 64))
        loss = loss_of(out, torch.zeros(16, dtype=torch.int64))
        loss.backward()
        optimizer.step()
    print(out.dtype)

main()
"""


def test_a_change_that_says_why_it_has_no_edit_gets_none() -> None:
    calls = [Call("forward", "t.py", 1, "f", torch=True, job=CPU), Call("backward", "t.py", 2, "f")]
    made = change("with autocast", autocast_dtype=("float32", "bfloat16"))
    assert _located(made, calls, "train", []).no_diff == "t.py:1: what the file held was not recorded"
    assert _located(replace(made, no_diff="another"), calls, "train", []).no_diff == "another"


@pytest.mark.long
def test_a_recorded_job_computes_under_autocast_once_it_is_edited(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(COMPILES_NOTHING + TRAINS)

    def recorded(name: str) -> Any:
        assert record(script, folder=tmp_path / name, options=["--no-trace"]).returncode == 0
        return recorded_facts(tmp_path / name / "ranks/00000")

    facts = recorded("before")
    made = patch_of([facts], {"torch.autocast": "bf16"})
    assert made.left_out == ()
    apply(tmp_path, made.text)
    after = recorded("after")
    assert (facts["autocast"]["enabled"], after["autocast"]["enabled"]) == (False, True)
    ((_, _, why),) = patch_of([facts], {"torch.autocast": "fp16"}).left_out
    assert why == "the file has changed since it was recorded"
