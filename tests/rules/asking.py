"""Asks one rule about a run, as the diagnosis does."""

from pathlib import Path

from dlprof.diagnosis import Rule, diagnose
from dlprof.result import Outcome
from dlprof.run import open_run


def ask(rule: Rule, path: Path) -> Outcome:
    """Give what became of the rule; a rule that broke fails the test."""
    outcome = diagnose(open_run(path), [rule], jobs=1).outcomes[0]
    assert outcome.state != "error", outcome.why
    return outcome
