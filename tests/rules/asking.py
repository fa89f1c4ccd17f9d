"""Asks one rule about a run, as the diagnosis does."""

from pathlib import Path

from dlprof.diagnosis import Rule, diagnose
from dlprof.result import Outcome
from dlprof.run import open_run


def ask(rule: Rule, path: Path) -> Outcome:
    """Return what became of the rule; one that broke, or claims more than the step has of it, fails the test."""
    outcome = diagnose(open_run(path), [rule], jobs=1).outcomes[0]
    assert outcome.state != "error", outcome.why
    assert "Cut to what the step has" not in outcome.sure, outcome.summary
    return outcome
