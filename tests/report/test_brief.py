"""The first screen for programs: in bounds, of its schema, and with what to type."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

import jsonschema  # type: ignore[import-untyped]
import pytest
from msgspec.structs import replace

from dlprof.report.brief import MOST_JSON, MOST_MARKDOWN, brief, markdown, schema, to_json
from dlprof.result import Place, Result
from dlprof.trial.planning import named
from tests.fixtures import results
from tests.fixtures.jobs import DLPROF, launch
from tests.fixtures.places import TRACES

MADE = ("ddp", "healthy", "training", "many", "empty", "hostile", "tables")


@pytest.mark.parametrize("name", MADE)
def test_it_is_in_bounds_and_of_its_schema(name: str) -> None:
    result: Result = getattr(results, name)()
    text, data = markdown(result, "runs/a", named), to_json(brief(result, "runs/a", named))
    assert len(text.encode()) <= MOST_MARKDOWN
    assert len(data) <= MOST_JSON
    said = json.loads(data)
    jsonschema.validate(said, schema())
    assert said["format"] == 1
    assert len(said.get("findings", ())) + said.get("more", 0) == len(result.found) + len(result.if_training_may_change)
    assert text.startswith("**")


def test_the_schema_is_the_one_that_is_shipped_and_refuses_what_is_none() -> None:
    shipped = resources.files("dlprof").joinpath("brief.schema.json").read_text(encoding="utf-8")
    assert shipped == json.dumps(schema(), indent=1) + "\n", "write it anew: json.dumps(dlprof.report.brief.schema()"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"format": 1, "findings": [{"rule": 5}]}, schema())


def test_a_finding_has_its_line_its_edit_and_the_command_that_proves_it() -> None:
    result = results.ddp()
    first = result.found[0]
    change = replace(
        first.changes[0],
        at=Place("train.py", 61, "main"),
        diff="--- a\n+++ b\n-DataLoader(x)\n+DataLoader(x, num_workers=2)\n",
    )
    result = replace(
        result, outcomes=tuple(replace(o, changes=(change,)) if o.id == first.id else o for o in result.outcomes)
    )
    text = markdown(result, "runs/a b", named)
    assert "at `train.py:61`" in text
    assert "   -DataLoader(x)\n   +DataLoader(x, num_workers=2)\n" in text
    words = " ".join(f"{name}={value}" for name, value in (named(change) or {}).items())
    assert words
    assert f"`dlprof try runs/a b --set '{words}'`" in text
    (cure, *_) = brief(result, "runs/a", named).findings
    assert (cure.rule, cure.at and cure.at.line, cure.diff[0]) == (first.id, 61, "-DataLoader(x)")
    # Traces of others have no command that could be run again.
    assert "dlprof try" not in markdown(replace(result, run=replace(result.run, command=())), "traces", named)


def test_what_does_not_fit_is_counted() -> None:
    result = results.ddp()
    long = tuple(replace(result.found[0], id=f"rule_{n}", title="x" * 190) for n in range(40))
    result = replace(result, outcomes=long)
    said = brief(result, "a", named)
    assert (said.more > 0, len(said.findings) + said.more) == (True, 40)
    assert " more: `dlprof report a`." in markdown(result, "a", named)


@pytest.mark.skipif(not TRACES.is_dir(), reason="needs the reference traces")
@pytest.mark.parametrize("form", ["md", "brief"])
def test_the_command_prints_it_and_nothing_else(form: str, tmp_path: Path) -> None:
    path = TRACES / "resnet50_v100_workers0"
    done = launch([*DLPROF, "report", path, "--format", form, "-o", tmp_path / "out"], tmp_path)
    assert (done.returncode, done.stderr.count("report:")) == (0, 0)
    if form == "md":
        assert done.stdout.startswith("**32 % of each step waits for data.**")
    else:
        assert json.loads(done.stdout)["findings"][0]["rule"] == "input_wait"
