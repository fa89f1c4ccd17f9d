"""A real job recorded on several numbers of ranks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dlprof.errors import DlprofError
from dlprof.read.run import open_run
from dlprof.trial.sweep.sizes import Options, filled_for, record_sizes

SLEEPS = """
if sys.argv[1] == "3":
    raise SystemExit("three is too many")
for epoch in range(10_000):
    for batch in DataLoader(data, batch_size=2):
        train(batch)
        time.sleep(0.01)
"""

WORDS = ("torchrun", "--nproc-per-node", "{ranks}", "train.py", "--batch={batch}")


def test_words_of_a_size() -> None:
    assert filled_for(WORDS, 4, 64, strong=False) == ("torchrun", "--nproc-per-node", "4", "train.py", "--batch=64")
    assert filled_for(WORDS, 4, 64, strong=True)[-1] == "--batch=16"
    assert filled_for(WORDS[:-1], 4, None, strong=False)[-1] == "train.py"
    with pytest.raises(DlprofError, match="name it with --batch"):
        filled_for(WORDS, 4, None, strong=False)
    with pytest.raises(DlprofError, match="not a multiple"):
        filled_for(WORDS, 3, 64, strong=True)


@pytest.mark.long
def test_sizes_are_recorded_in_turn_and_one_that_dies_is_told(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="recording needs torch")
    from dlprof.trial.job import Job
    from tests.fixtures.jobs import environment, running, tiny

    script = tiny(tmp_path, SLEEPS)
    jobs = {n: Job((sys.executable, str(script), str(n)), tmp_path, environment(), {}) for n in (1, 3)}
    said: list[str] = []
    folder = tmp_path / "scale"
    done = record_sizes(jobs, folder, Options(5, 60, 2), lambda: False, said.append)
    assert [p.name for p in done.paths[1]] == ["ranks-0001-1", "ranks-0001-2"]
    assert [len(open_run(p).ranks) for p in done.paths[1]] == [1, 1]
    ((name, why),) = done.failed
    assert (name, "three is too many" in why) == ("3 ranks", True)
    assert running(script) == []
    # What is there is not recorded again.
    again = record_sizes({1: jobs[1]}, folder, Options(5, 60, 2), lambda: True)
    assert again.paths == done.paths
    assert again.lacking == ""
    stopped = record_sizes({1: jobs[1]}, folder, Options(5, 60, 3), lambda: True)
    assert "interrupted" in stopped.lacking
