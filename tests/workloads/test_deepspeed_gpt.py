"""The DeepSpeed workload: every stage learns the same, and it says what it lacks where DeepSpeed is not there."""

from __future__ import annotations

import importlib.util

import pytest

from tests.workloads.scripts import load, losses, refusal, train

TINY = ["--device=cpu", "--width=32", "--length=16", "--batch-size=8", "--layers=2", "--log-every=10", "--lr=0.01"]

workload = load("deepspeed_gpt")
there = importlib.util.find_spec("deepspeed") is not None  # its import decides on a device: not in this process


# DeepSpeed compiles an operator on its first run; one that is stopped meanwhile leaves a lock that all others wait for.
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not there, reason="deepspeed is not installed")
@pytest.mark.parametrize("options", [["--stage=1"], ["--stage=2"], ["--stage=3"], ["--stage=2", "--offload"]])
def test_every_stage_learns(options: list[str]) -> None:
    found = losses(train("deepspeed_gpt", *TINY, "--steps=40", *options, limit_s=850))
    assert len(found) == 4
    assert found[-1] < 0.9 * found[0]


@pytest.mark.slow
@pytest.mark.skipif(there, reason="deepspeed is installed")
def test_without_deepspeed_it_says_what_it_needs() -> None:
    done = train("deepspeed_gpt", ranks=1)
    assert done.returncode == 1
    assert done.stderr.startswith("deepspeed_gpt.py needs DeepSpeed: pip install")


@pytest.mark.parametrize(
    ("options", "ranks", "said"),
    [(("--fault=offload",), 2, "needs a GPU"), (("--fault=long_sequences",), 1, "needs two ranks")],
)
def test_what_cannot_be_is_a_usage_error(
    options: tuple[str, ...],
    ranks: int,
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    assert said in refusal(workload, ("--device=cpu", *options), capsys)
