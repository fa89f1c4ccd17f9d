"""The masked language model: it learns with every optimizer, and a fault costs time, not accuracy."""

from __future__ import annotations

import pytest
import torch

from tests.workloads.scripts import load, losses, refusal, train

TINY: tuple[str, ...] = (
    "--device=cpu",
    "--width=32",
    "--length=20",
    "--batch-size=16",
    "--layers=1",
    "--vocabulary=301",
)
TINY += ("--log-every=10", "--warmup=2", "--lr=0.01")

workload = load("bert_pretrain")


def found(*options: str, ranks: int = 1) -> list[float]:
    """Return the losses of a run on CPU ranks."""
    return losses(train("bert_pretrain", *TINY, *options, ranks=ranks))


@pytest.mark.long
def test_it_learns_and_a_loop_over_the_parameters_changes_nothing_but_the_time() -> None:
    healthy = found("--steps=100")
    assert len(healthy) == 10
    assert healthy[-1] < 0.9 * healthy[0]
    assert found("--steps=100", "--fault=loop_optimizer") == pytest.approx(healthy, rel=1e-2)


@pytest.mark.slow
def test_exchanging_gradients_of_every_batch_gives_what_exchanging_them_once_gives() -> None:
    healthy = found("--steps=40", ranks=2)
    assert found("--steps=40", "--fault=sync_every_batch", ranks=2) == pytest.approx(healthy, rel=1e-2)


@pytest.mark.slow
def test_lamb_learns() -> None:
    with_lamb = found("--steps=100", "--optimizer=lamb", "--lr=0.02")
    assert with_lamb[-1] < with_lamb[0] - 0.1


def test_hidden_words_are_where_it_says_and_as_many_in_each_sentence() -> None:
    torch.manual_seed(0)
    text = workload.make_text(64, 40, 301, seed=1)
    assert ((text - 1) // 15 == (text[:, :1] - 1) // 15).all()  # one topic of 15 words a sentence
    tokens, places, words = workload.Masking(301, 40)(list(text))
    assert places.shape == (64, 6)
    torch.testing.assert_close(text.gather(1, places), words)
    torch.testing.assert_close(tokens.scatter(1, places, words), text)
    assert 0.7 < (tokens.gather(1, places) == workload.MASK).float().mean() < 0.9
    assert (tokens == workload.MASK).sum() == (tokens.gather(1, places) == workload.MASK).sum()


def test_padding_is_masked_and_changes_no_loss() -> None:
    torch.manual_seed(0)
    model = workload.Encoder(301, 80, 32, 4, 1).eval()
    text = list(workload.make_text(4, 20, 301, seed=1))
    tokens, places, _ = workload.Masking(301, 20)(text)
    torch.manual_seed(0)
    padded, _, _, padding = workload.Masking(301, 20, 80)(text)
    assert (padded.shape, padding.sum(1).tolist()) == ((4, 80), [60] * 4)
    padded[:, :20] = tokens
    with torch.no_grad():
        torch.testing.assert_close(model(padded, places, padding), model(tokens, places))


def test_a_mask_picks_the_same_words_as_their_places() -> None:
    torch.manual_seed(0)
    model = workload.Encoder(301, 20, 32, 4, 1).eval()
    tokens, places, _ = workload.Masking(301, 20)(list(workload.make_text(4, 20, 301, seed=1)))
    mask = workload.as_mask(tokens, places)
    assert (mask.shape, mask.dtype) == (tokens.shape, torch.bool)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens, mask), model(tokens, places))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--fault=boolean_mask",), "needs a GPU"),
        (("--fault=sync_every_batch",), "needs two ranks"),
        (("--precision=tf32",), "needs a GPU"),
        (("--heads=5",), "cannot be shared out among 5 heads"),
        (("--vocabulary=200",), "too few for the words of 20 topics"),
        (("--accumulate=0",), "one batch at least"),
    ],
)
def test_what_cannot_be_is_a_usage_error(
    options: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert said in refusal(workload, (*TINY, *options), capsys)
