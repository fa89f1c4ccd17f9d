"""The benchmark of predicted steps by number of workers: its jobs train, and its table says what is right."""

import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader  # noqa: E402 - after the check

from benchmarks.workers.job import KINDS  # noqa: E402


@pytest.mark.parametrize("name", KINDS)
def test_a_job_of_each_kind_trains(name: str) -> None:
    kind = KINDS[name]
    batch = next(iter(DataLoader(kind.data(2), kind.batch)))
    model = kind.model()
    loss = model(batch)
    loss.backward()
    assert torch.isfinite(loss)
    assert all(p.grad is not None for p in model.parameters())
