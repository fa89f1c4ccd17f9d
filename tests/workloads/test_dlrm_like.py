"""The click predictor: it learns, and one step is the same whoever holds which table."""

from __future__ import annotations

import pytest
import torch

from tests.workloads.scripts import listed, load, losses, planted, train

TINY = ["--device=cpu", "--rows=500", "--width=8", "--hidden=32", "--batch-size=64", "--log-every=10", "--bag=4"]

workload = load("dlrm_like")


def test_it_learns() -> None:
    found = losses(train("dlrm_like", *TINY, "--steps=60"))
    assert len(found) == 6
    assert found[-1] < 0.9 * found[0]


@pytest.mark.slow
def test_ids_hashed_in_python_are_the_same_ids() -> None:
    plain = losses(train("dlrm_like", *TINY, "--steps=20", ranks=1))
    assert losses(train("dlrm_like", *TINY, "--steps=20", "--fault=python_ids", ranks=1)) == plain
    assert len(losses(train("dlrm_like", *TINY, "--steps=20", "--fault=uneven_tables"))) == 2


@pytest.mark.parametrize("uneven", [False, True])
def test_every_table_is_on_one_rank(uneven: bool) -> None:
    owners = workload.share_out(8, 3, uneven)
    assert sorted(table for tables in owners for table in tables) == list(range(8))
    assert [len(tables) for tables in owners] == ([6, 1, 1] if uneven else [3, 3, 2])


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
    with pytest.raises(SystemExit) as stopped:
        workload.parse(["--device=cpu", *options])
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


def test_every_fault_is_planted_and_listed() -> None:
    assert planted("dlrm_like") == set(workload.FAULTS)
    assert all(f"`{fault}`" in listed() for fault in workload.FAULTS)
