"""The benchmark of predicted steps by number of workers: its jobs train, and its table says what is right."""

import pytest

from benchmarks.workers.__main__ import Recording, compared

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


RECORDINGS = [
    Recording("a", 0, 10.0, {1: 8.0, 2: 12.0}),
    Recording("a", 0, 12.0, {1: 10.0}),
    Recording("a", 1, 14.0, {0: 11.0}),
    Recording("a", 2, 22.0, {}),
    Recording("b", 1, 5.0, {0: 4.0}),
]


def test_each_prediction_is_held_against_the_mean_of_what_was_recorded() -> None:
    rows = compared(RECORDINGS)
    assert [(r.kind, r.now, r.to, r.before_ns, r.predicted_ns, r.measured_ns) for r in rows] == [
        ("a", 0, 1, 11.0, 9.0, 14.0),
        ("a", 0, 2, 11.0, 12.0, 22.0),
        ("a", 1, 0, 14.0, 11.0, 11.0),
    ]
    assert [r.sign_is_right(0.02) for r in rows] == [False, True, True]
    # A prediction of hardly anything is none of a gain.
    assert rows[0].sign_is_right(0.2)
