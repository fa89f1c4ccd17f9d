"""The click predictor: it learns, and one step is the same whoever holds which table."""

from __future__ import annotations

import pytest
import torch
from parts.job import process_group

from tests.workloads.scripts import load, losses, refusal, train

TINY = ["--device=cpu", "--rows=500", "--width=8", "--hidden=32", "--batch-size=64", "--log-every=10", "--bag=4"]

workload = load("dlrm_like")


@pytest.mark.long
def test_it_learns() -> None:
    found = losses(train("dlrm_like", *TINY, "--steps=60"))
    assert len(found) == 6
    assert found[-1] < 0.9 * found[0]


@pytest.mark.slow
def test_ids_hashed_in_python_are_the_same_ids() -> None:
    plain = losses(train("dlrm_like", *TINY, "--steps=20", ranks=1))
    assert losses(train("dlrm_like", *TINY, "--steps=20", "--fault=python_ids", ranks=1)) == plain
    assert len(losses(train("dlrm_like", *TINY, "--steps=20", "--fault=uneven_tables"))) == 2


def test_every_table_is_on_one_rank() -> None:
    for share_out, counts in ((workload.share_out, [3, 3, 2]), (workload.share_out_unevenly, [6, 1, 1])):
        owners = share_out(8, 3)
        assert sorted(table for tables in owners for table in tables) == list(range(8))
        assert [len(tables) for tables in owners] == counts


def test_ids_hashed_one_by_one_are_in_the_rows_of_those_hashed_at_once() -> None:
    ids = torch.randint(500, (4, 64, 4))
    torch.testing.assert_close(workload.hash_one_by_one(ids, 300), workload.hash_ids(ids, 300))


def test_features_exchanged_table_by_table_are_those_exchanged_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "0")
    args = workload.parse([*TINY])
    with process_group(args):
        found = [torch.randn(64, 8) for _ in range(4)]
        torch.testing.assert_close(workload.table_by_table(found, [4], args), workload.all_at_once(found, [4], args))


def test_clicks_are_the_same_for_every_epoch_and_others_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    batches = []
    for rank in (0, 1):
        monkeypatch.setenv("RANK", str(rank))
        clicks = workload.Clicks(workload.parse([*TINY, "--tables=4"]))
        numbers, ids, clicked = clicks[3]
        torch.testing.assert_close(ids, clicks[3][1])
        assert (numbers.shape, ids.shape, clicked.shape) == ((64, 13), (4, 64, 4), (64,))
        assert 0 <= int(ids.min()) <= int(ids.max()) < 500
        batches.append(ids)
    assert not torch.equal(*batches)


@pytest.mark.parametrize(
    ("options", "ranks", "said"),
    [
        (("--fault=host_tables",), 2, "needs a GPU"),
        (("--fault=table_by_table",), 2, "needs a GPU"),
        (("--fault=uneven_tables",), 1, "needs two ranks"),
        (("--tables=2",), 4, "cannot be shared out among 4 ranks"),
    ],
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
