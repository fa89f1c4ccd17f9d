"""What is kept of the script's loaders, models and optimizers, and for how long."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest

from dlprof.record.loaders import LoaderSeen, Pass
from dlprof.record.observed import Observed
from tests.fixtures.devices import Model, Parameter

torch = pytest.importorskip("torch", reason="recording needs torch")


def loader(batch_size: int = 4) -> Any:
    return torch.utils.data.DataLoader(range(8), batch_size=batch_size)


def test_a_model_is_kept_once_and_only_as_long_as_the_script_keeps_it() -> None:
    observed = Observed()
    model = Model(Parameter(4, "cpu"))
    for _ in range(2):
        observed.see_model(model)
        observed.see_model(Model())  # a loss: it has no parameters
    (kept,) = observed.models
    assert kept() is model
    assert observed.news
    del model
    gc.collect()
    assert kept() is None


def test_modules_and_optimizers_that_are_made_as_it_goes_are_kept_within_bounds() -> None:
    observed = Observed()
    made = [Model(Parameter(1, "cpu")) for _ in range(150)]
    for one in made:
        observed.see_model(one)
    assert len(observed.models) == 100
    assert [observed.see_optimizer(one) for one in made] == [True] * 100 + [False] * 50
    assert len(observed.optimizers) == 100


def test_an_optimizer_is_new_once() -> None:
    observed, optimizer = Observed(), Model()
    assert observed.see_optimizer(optimizer)
    observed.news = False
    assert not observed.see_optimizer(optimizer)
    assert not observed.news
    assert observed.optimizer_id == id(optimizer)


def test_a_loader_that_is_made_anew_each_epoch_is_one_and_two_at_a_time_are_two() -> None:
    observed = Observed()
    for _ in range(3):
        iterator = SimpleNamespace()
        observed.see_loader(loader(), iterator, 5, 7)  # gone at once
    (seen,) = observed.loaders
    over = iterator._dlprof_pass
    assert (over.loader, over.began_ns, over.took_ns) == (seen, 5, 7)
    first, second = loader(), loader()
    for one in (first, second, first):
        observed.see_loader(one, SimpleNamespace(), 0, 0)
    observed.see_loader(loader(batch_size=2), SimpleNamespace(), 0, 0)
    assert [seen.settings["batch_size"] for seen in observed.loaders] == [4, 4, 2]
    assert [seen.loader() for seen in observed.loaders[:2]] == [first, second]


def test_autocast_is_looked_for_until_it_is_seen() -> None:
    observed = Observed()
    observed.see_autocast()
    assert observed.autocast == {"enabled": False, "dtype": None}
    assert observed.autocast_looks == 15
    with torch.autocast("cpu", dtype=torch.bfloat16):
        observed.see_autocast()
    assert observed.autocast == {"enabled": True, "dtype": "bfloat16"}
    assert observed.autocast_looks == 0


def test_batches_to_validate_with_are_not_looked_at() -> None:
    observed, batch = Observed(), {name: torch.ones(2, 4, dtype=torch.long) for name in ("input_ids", "attention_mask")}
    for step, role in enumerate(("validation", "unknown", "train")):
        seen = LoaderSeen(gc.collect, {}, role)  # type: ignore[arg-type]
        observed.see_batch(batch, step, Pass(seen, 0, 0))
    observed.see_batch(batch, 3)
    assert [row["step"] for row in observed.padding.seen] == [2, 3]
