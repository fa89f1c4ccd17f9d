"""The first screen for programs: in bounds, of its schema, and with what to type."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

import jsonschema  # type: ignore[import-untyped]
import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from dlprof.cli import cli
from dlprof.report.brief import MOST_JSON, MOST_MARKDOWN, brief, markdown, schema, to_json
from dlprof.report.first import imperative
from dlprof.result import Change, Place, Proposal, Result, Setting, change
from dlprof.trial.planning import named
from tests.fixtures import results
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
    result = replace(results.ddp(), changes=())  # as an older dlprof wrote it
    first = result.found[0]
    change = replace(
        first.changes[0],
        at=Place("train.py", 61, "main"),
        diff="--- a\n+++ b\n-DataLoader(x)\n+DataLoader(x, num_workers=2)\n",
    )
    outcomes = tuple(replace(o, changes=(change,)) if o.id == first.id else o for o in result.outcomes)
    result = replace(result, outcomes=outcomes, changes=())
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


def proposals(many: int, text: str = "more workers") -> tuple[Proposal, ...]:
    workers = change(text, num_workers=(0, 2))
    first = Proposal(workers, ("input_wait",), "step", 2e8, 1e8, 2.0, 1.9, 2.1, known="losses")
    larger = change("a larger batch", training=True, batch_size=(8, 16))
    bound = Proposal(larger, ("memory_headroom",), "step", 1e8, 5e7, 2.0, at_most=True)
    return (*(first,) * (many - 1), bound)


def test_changes_come_in_their_order_with_gain_range_and_how_it_is_known() -> None:
    result = replace(results.ddp(), changes=proposals(2))
    first, second = brief(result, "runs/a", named).changes
    assert (first.number, first.speedup, first.low, first.high, first.known) == (1, 2.0, 1.9, 2.1, "losses")
    assert first.set == {"loader.num_workers": "2"}
    assert (second.number, second.training, second.at_most, second.low, second.set) == (2, True, True, None, {})
    text = markdown(result, "runs/a", named)
    assert "1. **input_wait** 2.00 × (1.90 to 2.10), tried, same losses\n   → more workers\n   `dlprof try" in text
    assert "try runs/a --change 1`" in text
    assert "--change 2" not in text  # nothing sets a batch size from outside
    assert "2. **memory_headroom** at most 2.00 ×, predicted" in text
    assert "3. **checkpoint_stall**" in text  # what no change cures is still said
    assert text.count("input_wait") == 1


def test_an_edit_of_code_is_said_in_words_and_has_its_command() -> None:
    code = Change(
        "leave it out (docs)", (Setting("train.py:5", to="collected_by_hand"),), diff="-gc.collect()\n+pass\n"
    )
    (lead, _) = proposals(2)
    result = replace(results.ddp(), changes=(replace(lead, change=code),))
    text = markdown(result, "runs/a", named)
    assert "   -gc.collect()\n   +pass\n   ```\n   `dlprof try runs/a --change 1`" in text
    assert imperative(code) == "Leave it out (docs)"


def test_changes_stay_where_findings_do_not_fit() -> None:
    result = replace(results.ddp(), changes=proposals(12, "x" * 390))
    said = brief(result, "a", named)
    assert (said.findings, len(said.changes), said.more) == ((), 12, 3)
    data = to_json(brief(replace(result, changes=proposals(40, "x" * 390)), "a", named))
    assert len(data) <= MOST_JSON
    assert json.loads(data)["more_changes"] + len(json.loads(data)["changes"]) == 40


@pytest.mark.skipif(not TRACES.is_dir(), reason="needs the reference traces")
@pytest.mark.parametrize("form", ["md", "brief"])
def test_the_command_prints_it_and_nothing_else(form: str, tmp_path: Path) -> None:
    path = TRACES / "resnet50_v100_workers0"
    words = ["report", path, "--format", form, "-o", tmp_path / "out", "--jobs", "1"]
    done = CliRunner().invoke(cli, list(map(str, words)))
    assert (done.exit_code, done.stderr.count("report:")) == (0, 0)
    if form == "md":
        assert done.stdout.startswith("**32 % of each step waits for data.**")
    else:
        assert json.loads(done.stdout)["findings"][0]["rule"] == "input_wait"
