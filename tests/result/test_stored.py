"""A result survives the way to result.json and back, and what is no result is refused in words."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from dlprof.errors import DlprofError
from dlprof.result import Change, Exchange, Fact, Outcome, Panel, Result, RunInfo, Setting
from dlprof.result.stored import FORMAT, from_json, schema, to_json
from tests.fixtures import results

REPORTS = Path(__file__).parents[2] / "reports"
EMPTY = Result(run=RunInfo(path="run"), window=None)


def plain(result: Result) -> Any:
    """Return what a reader of result.json sees."""
    return json.loads(json.dumps(to_json(result), allow_nan=False))


# "hostile" holds figures that are no numbers; diagnosis makes sure that no result does.
@pytest.mark.parametrize("name", sorted(set(results.ALL) - {"hostile"}))
def test_there_and_back(name: str) -> None:
    result = results.ALL[name]()
    assert from_json(plain(result)) == result
    assert to_json(from_json(plain(result))) == to_json(result)


def test_evidence_and_rows_come_back_as_they_were() -> None:
    panel = Panel("lines", "Steps", ((0, 1.5, None), (1, 2.0, 3.0)), ("step", "rank 0", "rank 1"), unit="ns")
    said = Outcome(
        "input_wait",
        "found",
        "Waits",
        ranks=(1, 2),
        changes=(Change("do this", (Setting("num_workers", 0, 6),)),),
        evidence=panel,
    )
    back = from_json(plain(Result(run=RunInfo("run"), window=None, outcomes=(said,), panels=(panel,))))
    assert back.outcomes == (said,)
    assert back.panels == (panel,)
    assert back.found == (said,)


def test_result_json_has_its_format_and_what_a_saving_is() -> None:
    data = plain(EMPTY)
    assert data["format"] == FORMAT == 2
    assert "do not add up" in data["saving"]
    assert {"run", "window", "device", "time", "outcomes"} < set(data)


def test_a_file_from_before_findings_were_bounded_together_is_read() -> None:
    older = {k: v for k, v in plain(EMPTY).items() if k != "together"}
    assert from_json(older) == EMPTY


def test_a_file_of_format_1_is_read() -> None:
    (path, *_) = sorted(REPORTS.glob("*/*/result.json"))
    data = json.loads(path.read_bytes()) | {"format": 1}
    for outcome in data["outcomes"]:
        outcome["advice"] = [change["text"] for change in outcome.pop("changes", [])] or outcome.get("advice", [])
    data["outcomes"][0]["advice"] = ["`fused=True` (is None)"]
    data["facts"].append({"section": "Model", "name": "ddp", "value": "bucket_cap_mb=25.0, static_graph=False"})
    result = from_json(data)
    assert result.outcomes[0].changes == (Change("`fused=True` (is None)"),)
    assert [(f.name, f.value) for f in result.facts[-2:]] == [
        ("ddp.bucket_cap_mb", "25.0"),
        ("ddp.static_graph", "False"),
    ]
    assert plain(result)["format"] == FORMAT


@pytest.mark.parametrize("newer", [FORMAT + 1, "1", None, []])
def test_another_format_is_refused(newer: Any) -> None:
    with pytest.raises(DlprofError, match="this dlprof reads formats 1 to 2"):
        from_json(plain(EMPTY) | {"format": newer})


@pytest.mark.parametrize("data", [None, [], "text", 5, [["format", 1]]])
def test_what_is_no_object_is_refused(data: Any) -> None:
    with pytest.raises(DlprofError, match=r"result\.json"):
        from_json(data)


@pytest.mark.parametrize("key", ["run", "window", "device", "time", "outcomes", "panels", "facts", "dlprof"])
@pytest.mark.parametrize("value", [5, [5], {"odd": 1}, [{"odd": 1}]])
def test_wrong_data_are_refused(key: str, value: Any) -> None:
    data = plain(EMPTY)
    with pytest.raises(DlprofError, match=r"result\.json is not a dlprof result"):
        from_json(data | {key: value})


@pytest.mark.parametrize("key", ["run", "window", "device", "time", "outcomes", "panels", "facts", "dlprof"])
def test_a_missing_part_is_named(key: str) -> None:
    data = {k: v for k, v in plain(EMPTY).items() if k != key}
    with pytest.raises(DlprofError, match=key):
        from_json(data)


@pytest.mark.parametrize("figure", [1e300, -1e300, 10**40, float("nan"), float("inf")])
def test_a_figure_that_nothing_can_have_is_refused(figure: float) -> None:
    data = to_json(Result(run=RunInfo("run"), window=None, outcomes=(Outcome("input_wait", "found", "Waits"),)))
    data["outcomes"][0]["saving_ns"] = figure
    with pytest.raises(DlprofError, match="figure"):
        from_json(data)


def test_the_schema_that_is_shipped_is_the_one_of_the_code() -> None:
    shipped = resources.files("dlprof").joinpath("result.schema.json").read_text(encoding="utf-8")
    made = json.dumps(schema(), indent=1) + "\n"
    assert shipped == made, "write it anew: python -c 'import json; from dlprof.result import schema; …'"


def committed() -> list[Path]:
    return sorted(REPORTS.glob("*/*/result.json"))


@pytest.mark.parametrize("path", committed(), ids=lambda path: path.parent.name)
def test_every_committed_result_is_read_and_keeps_the_schema(path: Path) -> None:
    result = from_json(json.loads(path.read_bytes()))
    jsonschema.validate(plain(result), schema())
    assert from_json(plain(result)) == result


@pytest.mark.parametrize("name", sorted(set(results.ALL) - {"hostile"}))
def test_every_result_keeps_the_schema(name: str) -> None:
    jsonschema.validate(plain(results.ALL[name]()), schema())


def test_the_schema_refuses_what_is_no_result() -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(plain(EMPTY) | {"format": 1}, schema())
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(plain(EMPTY) | {"outcomes": [{"id": 5}]}, schema())


def test_names_that_an_older_dlprof_wrote_are_read_as_todays() -> None:
    exchange = Exchange("all_reduce", 2, "not told", 1.0, 1e6)
    fact = Fact("Across ranks", "clocks brought together, ahead by", "node-1 3.00 µs")
    read = from_json(to_json(Result(RunInfo("run"), None, exchanges=(exchange,), facts=(fact,))))
    assert (read.exchanges[0].size, read.facts[0].name) == (
        "unknown size",
        "hosts' clocks run ahead by (corrected for)",
    )
    assert from_json(to_json(read)) == read
