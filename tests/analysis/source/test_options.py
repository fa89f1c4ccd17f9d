"""An option of the script's own is named before the edit: for sure where its value is what the call gets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.source.patches import Call
from dlprof.analysis.source.where import Option, options, with_option
from dlprof.result import Change, Setting, change
from tests.fixtures.runs import CPU, MS, light, measured, recorded

WORKERS = change("`num_workers=4`", num_workers=(0, 4))
PINNED = change("`pin_memory=True`", pin_memory=(False, True))
BOTH = change("both", num_workers=(0, 4), persistent_workers=(False, True))
NONE = change("`num_workers=0`", num_workers=(2, 0), pin_memory=(True, False))
CAST = change("autocast", autocast_enabled=(False, True), autocast_dtype=(None, "bfloat16"))
SCALED = change("autocast", autocast_enabled=(False, True), autocast_dtype=(None, "float16"))
LAYOUT = change("layout", memory_format=("contiguous_format", "channels_last"))
CAPTURED = change("captured", mode=(None, "reduce-overhead"))
FUSED = change("fused", fused=(None, True))

J = Option("--jobs", "jobs")
LOOKS = "the script has an option that looks like it: "


def loader(value: str) -> Call:
    return Call("loader", "a.py", 3, source=f"for x in DataLoader( data, batch_size=args.b, num_workers={value} ):")


@pytest.mark.parametrize(
    ("wanted", "calls", "there", "said"),
    [
        (WORKERS, [loader("args.jobs")], [J], "the script has an option for it: `--jobs 4`; else "),
        (WORKERS, [loader("self.args.jobs")], [Option("-j", "jobs")], "the script has an option for it: `-j 4`; else "),
        (WORKERS, [loader("jobs")], [J], ""),  # a name that may be anything
        (WORKERS, [loader("args.jobs"), loader("2")], [J], ""),
        (WORKERS, [loader("2")], [Option("--n-workers", "n")], LOOKS + "`--n-workers 4`; else "),
        (WORKERS, [], [Option("--num_workers", "x")], LOOKS + "`--num_workers 4`; else "),
        (WORKERS, [], [Option("--workers-per-host", "x")], ""),
        (NONE, [], [Option("--workers", "workers"), Option("--pin", "p", True)], LOOKS + "`--workers 0`; else "),
        (NONE, [], [Option("--pin-mem", "pin_mem", True, True)], ""),  # it is given, and cannot be taken back by itself
        (PINNED, [], [Option("--pin-mem", "pin_mem", True)], LOOKS + "`--pin-mem`; else "),
        (PINNED, [], [Option("--pin-mem", "pin_mem", True, True)], ""),
        (
            BOTH,
            [loader("args.jobs")],
            [J, Option("--persistent-workers", "p", True)],
            "the script has an option for it: `--jobs 4`, and one that looks like it: `--persistent-workers`; else ",
        ),
        (CAST, [], [Option("--amp", "amp", True)], LOOKS + "`--amp`; else "),
        (CAST, [], [Option("--amp-dtype", "a"), Option("--fp16", "fp16", True)], ""),
        (CAST, [], [Option("--fp16", "f", True), Option("--bf16", "b")], LOOKS + "`--bf16 …`; else "),
        (SCALED, [], [Option("--fp16", "f", True), Option("--bf16", "b", True)], LOOKS + "`--fp16`; else "),
        (LAYOUT, [], [Option("--channels-last", "c", True)], LOOKS + "`--channels-last`; else "),
        (FUSED, [], [Option("--use-fused", "f", True)], LOOKS + "`--use-fused`; else "),
        (CAPTURED, [], [Option("--mode", "m"), Option("--torchcompile", "t")], LOOKS + "`--torchcompile …`; else "),
        (change("no setting"), [], [Option("--compile", "c", True)], ""),
    ],
)
def test_an_option_is_named_first(wanted: Change, calls: list[Call], there: list[Option], said: str) -> None:
    assert with_option(wanted, calls, there).text == said + wanted.text


def test_a_change_without_a_setting_names_what_it_does() -> None:
    told = with_option(change("compile"), (), [Option("--compile", "c", True)], Setting("compile", False, True))
    assert told == change(LOOKS + "`--compile`; else compile")


def test_the_options_are_those_of_the_facts(tmp_path: Path) -> None:
    def of(facts: dict[str, Any], name: str) -> list[Option]:
        path = recorded(tmp_path / name, (None, [light(n, MS) for n in range(9)], {**CPU, **facts}))
        return measured(path, options).frame(options)

    row = {"name": "--amp", "dest": "amp", "switch": True, "on": False}
    assert of({"options": [row, {"name": "-x", "dest": "x"}]}, "some") == [
        Option("--amp", "amp", True),
        Option("-x", "x"),
    ]
    assert of({}, "none") == []
