"""The language model workload: it learns in every precision there is; a fault costs time, not accuracy."""

from __future__ import annotations

import pytest
import torch
from parts.language import Block

from tests.workloads.scripts import load, losses, refusal, train

TINY = ("--device=cpu", "--width=32", "--length=16", "--batch-size=8", "--layers=2", "--log-every=10", "--lr=0.003")

workload = load("amp_transformer")


@pytest.mark.long
def test_it_learns_and_a_loop_over_the_parameters_changes_nothing_but_the_time() -> None:
    healthy = losses(train("amp_transformer", *TINY, "--steps=60", ranks=1))
    assert len(healthy) == 6
    assert healthy[-1] < 0.75 * healthy[0]
    # Every piece of text is another one, so the length of the run decides which come first.
    looped = losses(train("amp_transformer", *TINY, "--steps=60", "--fault=loop_optimizer", ranks=1))
    assert looped == pytest.approx(healthy, rel=1e-2)


@pytest.mark.slow
def test_it_trains_in_bfloat16_compiled_and_on_two_ranks() -> None:
    found = losses(train("amp_transformer", *TINY, "--steps=20", "--precision=bf16", "--compile=eager"))
    assert len(found) == 2
    assert found[1] < found[0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--fault=full_precision",), "needs a GPU"),
        (("--fault=odd_shapes",), "needs a GPU"),
        (("--fault=data_parallel",), "needs two GPUs"),
        (("--fault=find_unused",), "needs a GPU"),
        (("--precision=tf32",), "needs a GPU"),
        (("--heads=5",), "cannot be shared out among 5 heads"),
        (("--vocabulary=100",), "less than the bytes"),
    ],
)
def test_what_cannot_be_is_a_usage_error(
    options: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert said in refusal(workload, (*TINY, *options), capsys)


def test_scores_in_memory_are_the_same_attention() -> None:
    torch.manual_seed(0)
    fused, by_hand = Block(32, 4), Block(32, 4, workload.scores_in_memory)
    by_hand.load_state_dict(fused.state_dict())
    x = torch.randn(2, 24, 32)
    torch.testing.assert_close(by_hand(x), fused(x))


def test_odd_shapes_are_off_a_multiple_of_eight_and_others_are_not() -> None:
    healthy, odd = (workload.parse(["--device=cuda", *more]) for more in ([], ["--fault=odd_shapes"]))
    assert [n % 8 for n in (healthy.width, healthy.length, healthy.vocabulary)] == [0, 0, 0]
    assert 0 not in [n % 8 for n in (odd.width, odd.width // odd.heads, odd.length, odd.vocabulary)]
    assert odd.width % odd.heads == 0


def test_the_text_is_made_anew_for_each_seed_and_words_come_again() -> None:
    text = workload.make_text(5_000, seed=1)
    assert len(text) == 5_000
    assert text == workload.make_text(5_000, seed=1) != workload.make_text(5_000, seed=2)
    words = text.decode().lower().replace(".", "").split()
    assert len(set(words)) < len(words) / 2
    pieces = workload.Windows(text, 99)
    assert len(pieces) == 50
    torch.testing.assert_close(pieces[1][0], pieces[0][-1])
