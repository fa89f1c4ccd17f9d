"""Results, sweeps, studies and trials survive the way to their files and back, and other data are refused in words."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import msgspec
import pytest
from msgspec.structs import replace

from dlprof.errors import DlprofError
from dlprof.result import Change, Exchange, Fact, Outcome, Panel, Result, RunInfo, Setting, scale, stored, sweep, tried
from dlprof.result.figures import (
    Cost,
    DeviceMemory,
    DeviceWork,
    Footprint,
    GpuLog,
    InModule,
    Member,
    MemoryChange,
    MemoryPart,
    ModuleMemory,
    Profile,
    Throughput,
    WorkKind,
)
from dlprof.result.stored import FORMAT, from_json, schema, to_json
from tests.fixtures import results
from tests.fixtures.places import ROOT

COMMITTED = sorted((ROOT / "reports").glob("*/*/result.json"))
EMPTY = Result(run=RunInfo(path="run"), window=None)
PARTS = ["run", "window", "device", "time", "outcomes", "panels", "facts", "dlprof"]
OTHER_FORMATS: list[Any] = [FORMAT + 1, "1", None, []]
NO_OBJECTS: list[Any] = [None, [], 5, "text"]
ROWS = Panel("lines", "Steps", ((0, 1.5, None), (1, 2.0, 3.0)), ("step", "rank 0", "rank 1"), unit="ns")
FOUND = Outcome(
    *("input_wait", "found", "Waits"),
    ranks=(1, 2),
    changes=(Change("do this", (Setting("num_workers", 0, 6),)),),
    evidence=ROWS,
    modules=(InModule("head", "Linear", 0.5),),
)
KEPT = DeviceMemory(3, "cpu", (MemoryPart("process", 5.0, "process"),), "gradients")
# A result with each struct that none of results.ALL has.
WHOLE = replace(
    results.ddp(),
    outcomes=(FOUND,),
    panels=(ROWS,),
    modules=results.encoder(),
    members=(Member(0, "node-1", "stage 0"), Member(1, "node-1", "stage 1", "computation", 3.0, 2.0)),
    footprint=Footprint((KEPT,), 3, (ModuleMemory("a.*", "A", 2, 4.0),), (MemoryChange("batch", "2", 9.0),), None),
    profiles=(Profile("p.json", "py-spy", "samples", 400.0, "decode", "/me/data.py", 41, 0.5, own=True),),
    gpu_logs=(GpuLog("nvidia-smi 3", 100, 99.0, busy_share=0.63, held_by="heat"),),
)


def plain(result: Result) -> Any:
    """Return what a reader of result.json sees."""
    return json.loads(json.dumps(to_json(result), allow_nan=False))


# "hostile" holds figures that are no numbers; diagnosis makes sure that no result does.
@pytest.mark.parametrize("name", [*sorted(set(results.ALL) - {"hostile"}), "whole"])
def test_a_result_comes_back_as_it_was_and_keeps_the_schema(name: str) -> None:
    result = WHOLE if name == "whole" else results.ALL[name]()
    assert from_json(plain(result)) == result
    jsonschema.validate(plain(result), schema())


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=() if n % 12 == 0 else pytest.mark.slow) for n, path in enumerate(COMMITTED)],
    ids=lambda path: path.parent.name,
)
def test_a_committed_result_is_read_and_keeps_the_schema(path: Any) -> None:
    result = from_json(json.loads(path.read_bytes()))
    assert from_json(plain(result)) == result
    jsonschema.validate(plain(result), schema())


def test_the_schema_is_the_one_that_is_shipped_and_refuses_what_is_no_result() -> None:
    shipped = resources.files("dlprof").joinpath("result.schema.json").read_text(encoding="utf-8")
    assert shipped == json.dumps(schema(), indent=1) + "\n", "write it anew: json.dumps(dlprof.result.stored.schema()"
    for odd in ({"format": 1}, {"outcomes": [{"id": 5}]}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(plain(EMPTY) | odd, schema())
    data = plain(EMPTY)
    assert (data["format"], "do not add up" in data["saving"]) == (FORMAT, True) == (2, True)


@pytest.mark.parametrize("lost", ["together", "modules", "footprint", "members"])
def test_a_result_from_before_a_part_was_there_is_read(lost: str) -> None:
    older = {k: v for k, v in plain(EMPTY).items() if k != lost}
    assert from_json(older) == EMPTY


def test_a_file_of_format_1_and_names_of_an_older_dlprof_are_read() -> None:
    data = json.loads(COMMITTED[0].read_bytes()) | {"format": 1}
    for outcome in data["outcomes"]:
        outcome["advice"] = [change["text"] for change in outcome.pop("changes", [])] or outcome.get("advice", [])
    data["outcomes"][0]["advice"] = ["`fused=True` (is None)"]
    data["facts"].append({"section": "Model", "name": "ddp", "value": "bucket_cap_mb=25.0, static_graph=False"})
    result = from_json(data)
    assert result.outcomes[0].changes == (Change("`fused=True` (is None)"),)
    facts = [(f.name, f.value) for f in result.facts[-2:]]
    assert facts == [("ddp.bucket_cap_mb", "25.0"), ("ddp.static_graph", "False")]
    assert plain(result)["format"] == FORMAT
    exchange = Exchange("all_reduce", 2, "not told", 1.0, 1e6)
    fact = Fact("Across ranks", "clocks brought together, ahead by", "node-1 3.00 µs")
    read = from_json(to_json(Result(RunInfo("run"), None, exchanges=(exchange,), facts=(fact,))))
    assert (read.exchanges[0].size, read.facts[0].name) == (
        "unknown size",
        "hosts' clocks run ahead by (corrected for)",
    )
    assert from_json(to_json(read)) == read


@pytest.mark.parametrize(
    ("data", "words"),
    [
        *((data, r"result\.json") for data in (None, [], "text", 5, [["format", 1]])),
        *((plain(EMPTY) | {"format": newer}, "reads formats 1 to 2") for newer in OTHER_FORMATS),
        *((plain(EMPTY) | {key: odd}, r"result\.json is not") for key in PARTS for odd in (5, [5], {"odd": 1})),
        *(({k: v for k, v in plain(EMPTY).items() if k != key}, key) for key in PARTS),
    ],
    ids=str,
)
def test_what_is_no_result_is_refused(data: Any, words: str) -> None:
    with pytest.raises(DlprofError, match=words):
        from_json(data)


@pytest.mark.parametrize("figure", [1e300, -1e300, 10**40, float("nan"), float("inf")])
def test_a_figure_that_nothing_can_have_is_refused(figure: float) -> None:
    data = to_json(Result(run=RunInfo("run"), window=None, outcomes=(Outcome("input_wait", "found", "Waits"),)))
    data["outcomes"][0]["saving_ns"] = figure
    with pytest.raises(DlprofError, match="figure"):
        from_json(data)


# What structs compute.


def test_each_kind_of_work_has_its_own_floor_or_a_least_one_that_it_shares() -> None:
    own, shared = WorkKind("convolution", 1, 10.0, 4.0), WorkKind("normalization", 1, 30.0, 1.0, shared_ns=29.0)
    work = DeviceWork((own, shared, WorkKind("reductions", 1, 3.0, 0.0, shared_ns=3.0)), 13.0, shared_floor_ns=8.0)
    assert (work.ns, [work.above_ns(row) for row in work.rows]) == (43.0, [6.0, 21.0, 0.0])
    parts = (MemoryPart("parameter", 3.0, "counted"), MemoryPart("unexplained", -1.0, "difference"))
    assert DeviceMemory(0, "cuda:0", parts).bytes == 2


def test_what_samples_tokens_and_an_epoch_cost() -> None:
    t = Throughput(200.0, 40_000.0, 20.0, "loader", gpus=4, power_w=1200.0, epoch_samples=72_000, epoch_s=360.0)
    assert t.of_samples(720_000) == Cost(3600.0, 4.0, 1200.0 * 3600)
    assert t.of_tokens(4e6) == Cost(100.0, 400 / 3600, 120_000.0)
    assert t.epoch == Cost(360.0, 0.4, 432_000.0)
    t = Throughput(None, 10.0, None, "script")
    assert (t.of_samples(5), t.epoch, t.of_tokens(20)) == (None, None, Cost(2.0))


# Studies, sweeps, trials and answers.

POINT = sweep.Point({"n": "2"}, (sweep.Reading(1e8, 32.0), sweep.Reading(1.1e8, 32.0)), predicted_ns=1e8)
SWEEP = sweep.Sweep(
    ("python", "train.py"), (sweep.Axis("n", ("2", "4")),), (POINT, sweep.Point({"n": "4"}, why="it died")), 2, 30
)
ONE = tried.Attempt(
    {"loader.num_workers": 4, "loader.persistent_workers": True},
    "gain",
    findings=("input_wait",),
    predicted=1.44,
    measured=tried.Gain(1.41, 1.38, 1.44, 3),
    before_ns=2e8,
    after_ns=1.4e8,
)
ODD = tried.Attempt({"gc.freeze": True}, "unclear", "the time was up")
TRIED = tried.Tried("complete", (ONE, ODD), best=ONE, runs=7, steps=30)
AS_DATA = json.loads(json.dumps(tried.to_json(TRIED), allow_nan=False))


def test_sweeps_trials_studies_and_answers_come_back_as_they_were() -> None:
    assert sweep.from_json(sweep.to_json(SWEEP)) == SWEEP
    assert (AS_DATA["format"], tried.from_json(AS_DATA)) == (1, TRIED)
    assert tried.from_json({"format": 1, "state": "interrupted"}) == tried.Tried("interrupted")
    assert list(tried.from_json(AS_DATA).attempts[0].settings.values()) == [4, True]
    assert ONE.words == "loader.num_workers=4, loader.persistent_workers=True"
    assert TRIED.unclear == (ODD,)
    larger = scale.Size(2, ("b", "c"), 1.1e6, parts={"computation": 1e6})
    study = scale.Study("job", "weak", (scale.Size(1, ("a",), 1e6), larger))
    data = scale.to_json(study)
    assert (data.pop("format"), msgspec.convert(data, scale.Study)) == (1, study)
    known = scale.Scaling((scale.Transfers("all_reduce", 2, 1, 1.0, 5e4, None),), 1e5, None, (-1.0, 1.0))
    assert msgspec.convert(msgspec.to_builtins(known), scale.Scaling) == known
    answers = stored.plain(scale.Answers(1e8, (scale.Answer(("workers 4",), 5e7),), None, None))
    assert answers["alone"][0] == {"changes": ("workers 4",), "step_ns": 5e7, "why": "", "error_ns": 0.0, "unknown": ()}


@pytest.mark.parametrize("data", [None, [], {"format": 2}, {"format": 1}, {**sweep.to_json(SWEEP), "points": 3}])
def test_what_is_no_sweep_is_refused(data: object) -> None:
    with pytest.raises(DlprofError, match=r"sweep\.json"):
        sweep.from_json(data)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        *((data, r"try\.json") for data in NO_OBJECTS),
        *((AS_DATA | {"format": newer}, "format") for newer in (2, "1", None)),
        *((AS_DATA | odd, r"try\.json") for odd in ({"state": "odd"}, {"attempts": 5}, {"best": {"verdict": "gain"}})),
    ],
    ids=str,
)
def test_what_is_no_trial_is_refused(data: Any, words: str) -> None:
    with pytest.raises(DlprofError, match=words):
        tried.from_json(data)


def test_rates_and_spread_of_a_sweep_and_of_a_study() -> None:
    rates = [POINT.rate(samples=samples) for samples in (True, False)]
    assert rates == pytest.approx([(320 + 32 / 0.11) / 2, (10 + 1 / 0.11) / 2])
    assert POINT.spread == pytest.approx(0.0673, rel=1e-2)
    bare = sweep.Point({"n": "4"}, (sweep.Reading(1e8),))
    assert (bare.spread, sweep.Point({}).rate(samples=True), sweep.Point({}).step_ns) == (None, None, None)
    sweeps = (SWEEP, sweep.Sweep((), (), (POINT, bare), 1, 30), sweep.Sweep((), (), (), 1, 30))
    assert [one.by_samples for one in sweeps] == [True, False, False]
    work = [scale.Size(4, ("a",), 2e9, samples=samples).work_per_s for samples in (128.0, None)]
    assert work == pytest.approx([64.0, 2.0])
