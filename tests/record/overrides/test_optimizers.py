"""Torch's optimizers are made fused or not, and step as ever where they cannot be."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fixtures.overriding import done, overriding

torch: Any = pytest.importorskip("torch", reason="recording needs torch")

from dlprof.record.overrides.optimizers import install  # noqa: E402

FUSED, FOREACH = "optimizer.fused", "optimizer.foreach"


def model(**more: Any) -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 3, **more), torch.nn.Linear(3, 1, **more))


def trained(make: Any, of: Any = None, steps: int = 3) -> tuple[Any, Any]:
    """Return an optimizer that has taken some steps, and the parameters then."""
    of = of or model()
    optimizer = make(of.parameters())
    x = torch.ones(2, 4, dtype=next(of.parameters()).dtype)
    for _ in range(steps):
        optimizer.zero_grad()
        of(x).sum().backward()
        optimizer.step()
    return optimizer, torch.cat([p.detach().flatten() for p in of.parameters()])


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD", "Adagrad"])
@pytest.mark.parametrize("before", [None, False])
def test_an_optimizer_is_fused_and_computes_the_same(name: str, before: bool | None) -> None:
    kind = getattr(torch.optim, name)
    _, expected = trained(lambda p: kind(p, lr=0.1))
    with overriding(install, "optimizer.fused=True") as effects:
        optimizer, got = trained(lambda p: kind(p, lr=0.1, fused=before))
        assert optimizer.param_groups[0]["fused"] is True
        assert done(effects, FUSED) == (1, [before], None)
    torch.testing.assert_close(got, expected)
    assert not kind(model().parameters(), lr=0.1).param_groups[0]["fused"]


def test_fused_and_foreach_exclude_each_other() -> None:
    with overriding(install, "optimizer.fused=True"):
        group = torch.optim.Adam(model().parameters(), foreach=True).param_groups[0]
        assert (group["fused"], group["foreach"]) == (True, None)
    with overriding(install, "optimizer.foreach=True") as effects:
        group = torch.optim.Adam(model().parameters(), fused=True).param_groups[0]
        assert (group["fused"], group["foreach"]) == (None, True)
        assert done(effects, FOREACH) == (1, [None], None)


def test_groups_of_parameters_are_all_changed_and_stay_the_scripts_own() -> None:
    of = model()
    with overriding(install, "optimizer.fused=True"):
        groups = [{"params": of[0].parameters(), "lr": 0.5}, {"params": of[1].parameters()}]
        optimizer = torch.optim.SGD(iter(groups), lr=0.1)
        assert [(g["fused"], g["lr"]) for g in optimizer.param_groups] == [(True, 0.5), (True, 0.1)]
        assert optimizer.param_groups[0] is groups[0]


class Own(torch.optim.SGD):  # type: ignore[misc]
    """An optimizer of the script's own, by inheritance."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)


def test_a_class_that_inherits_from_torchs_is_changed_too() -> None:
    with overriding(install, "optimizer.fused=True") as effects:
        assert trained(Own)[0].param_groups[0]["fused"] is True
        assert done(effects, FUSED) == (1, [None], None)


def test_one_that_refuses_is_made_as_the_script_says() -> None:
    """A differentiable optimizer cannot be fused; torch raises after it has written into the groups."""
    of = model()
    groups = [{"params": of.parameters()}]
    with overriding(install, "optimizer.fused=True") as effects:
        optimizer = torch.optim.Adam(groups, differentiable=True)
        assert optimizer.param_groups[0]["fused"] is None
        assert len(optimizer.param_groups[0]["params"]) == 4
        applied, _, error = done(effects, FUSED)
        assert applied == 0
        assert "differentiable" in str(error)


def test_parameters_of_a_kind_that_no_fused_kernel_takes_are_stepped_as_ever() -> None:
    dtype = torch.complex64
    _, expected = trained(lambda p: torch.optim.Adam(p, lr=0.1), _Complex(dtype))
    with overriding(install, "optimizer.fused=True") as effects:
        optimizer, got = trained(lambda p: torch.optim.Adam(p, lr=0.1), _Complex(dtype))
        assert optimizer.param_groups[0]["fused"] is None
        assert not hasattr(optimizer, "_step_supports_amp_scaling")
        applied, _, error = done(effects, FUSED)
        assert applied == 0
        assert "floating point" in str(error)
    torch.testing.assert_close(got, expected)


class _Complex(torch.nn.Module):  # type: ignore[misc]
    def __init__(self, dtype: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = torch.nn.Parameter(torch.randn(4, dtype=dtype))

    def forward(self, x: Any) -> Any:
        return (x * self.weight).abs()


def test_sparse_gradients_are_stepped_as_ever() -> None:
    embedding = torch.nn.Embedding(8, 2, sparse=True)
    with overriding(install, "optimizer.fused=True") as effects:
        optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)
        before = embedding.weight.detach().clone()
        embedding(torch.tensor([3])).sum().backward()
        optimizer.step()
        assert "sparse" in str(done(effects, FUSED)[2])
    changed = (embedding.weight != before).any(dim=1)
    assert changed.tolist() == [n == 3 for n in range(8)]


def test_an_optimizer_that_takes_no_such_setting_is_named() -> None:
    with overriding(install, "optimizer.fused=True") as effects:
        optimizer = torch.optim.LBFGS(model().parameters())
        optimizer.step(lambda: torch.tensor(0.0))
        assert done(effects, FUSED) == (0, [], "LBFGS does not take it")
    with overriding(install, "optimizer.fused=True") as effects:
        torch.optim.RMSprop(model().parameters())
        assert done(effects, FUSED) == (0, [], None)  # until it steps
