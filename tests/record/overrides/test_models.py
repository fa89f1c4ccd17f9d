"""The outermost model is called under autocast, compiled, or laid out otherwise; nothing else is."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

from tests.fixtures.overriding import done, overriding

torch: Any = pytest.importorskip("torch", reason="recording needs torch")

from dlprof.record.overrides.models import install  # noqa: E402

AUTOCAST, COMPILE, FORMAT = "torch.autocast", "torch.compile", "model.memory_format"


class Net(torch.nn.Module):  # type: ignore[misc]
    """Tells what its parts see."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 2)
        self.dtypes: list[Any] = []

    def forward(self, x: Any) -> Any:
        y = self.inner(x)
        self.dtypes.append(y.dtype)
        return {"out": y, "more": [y, "text"]}


def test_the_model_runs_under_autocast_and_gives_float32() -> None:
    net = Net()
    with overriding(install, "torch.autocast=bf16") as effects:
        result = net(torch.ones(3, 4))
        assert net.dtypes == [torch.bfloat16]
        assert result["out"].dtype == result["more"][0].dtype == torch.float32
        assert result["more"][1] == "text"
        result["out"].sum().backward()
        assert net.inner.weight.grad.dtype == torch.float32
        assert not torch.is_autocast_enabled("cpu")
        assert done(effects, AUTOCAST) == (1, ["off"], None)
    net(torch.ones(3, 4))
    assert net.dtypes[-1] == torch.float32


def test_autocast_of_the_scripts_own_is_overridden() -> None:
    net = Net()
    with overriding(install, "torch.autocast=off") as effects, torch.autocast("cpu", dtype=torch.bfloat16):
        net(torch.ones(3, 4))
        assert net.dtypes == [torch.float32]
        assert done(effects, AUTOCAST) == (1, ["bf16"], None)


def test_a_loss_function_is_no_model_and_one_without_convolutions_is_not_laid_out() -> None:
    settings = ("torch.autocast=bf16", "torch.compile=default", "model.memory_format=channels_last")
    with overriding(install, *settings[:2]) as effects:
        loss = torch.nn.MSELoss()(torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.bfloat16))
        assert loss.dtype == torch.bfloat16
        assert [done(effects, name) for name in (AUTOCAST, COMPILE)] == [(0, [], None)] * 2
    with overriding(install, settings[2]) as effects:
        Net()(torch.ones(3, 4))
        assert done(effects, FORMAT) == (0, [], None)


def test_what_is_computed_again_in_a_backward_pass_is_as_it_was() -> None:
    from torch.utils.checkpoint import checkpoint

    class Again(Net):
        def forward(self, x: Any) -> Any:
            return checkpoint(self.inner, x, use_reentrant=False)

    net = Again()
    with overriding(install, "torch.autocast=bf16") as effects:
        net(torch.ones(3, 4, requires_grad=True)).sum().backward()
        assert done(effects, AUTOCAST) == (1, ["off"], None)
    assert net.inner.weight.grad is not None


def test_a_model_that_raises_leaves_the_next_call_outermost() -> None:
    net = Net()
    with overriding(install, "torch.autocast=bf16") as effects:
        with pytest.raises(RuntimeError):
            net(torch.ones(3, 5))
        net(torch.ones(3, 4))
        assert net.dtypes == [torch.bfloat16]
        assert done(effects, AUTOCAST)[0] == 2


LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def images() -> Any:
    """Return convolutions of pictures, and of volumes made of them."""
    torch.manual_seed(0)
    volumes = torch.nn.Sequential(torch.nn.Unflatten(1, (2, 2)), torch.nn.Conv3d(2, 2, 2), torch.nn.Flatten())
    return torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), volumes, torch.nn.Linear(50, 1))


@pytest.mark.parametrize("value", ["channels_last", "contiguous_format"])
def test_convolutions_and_images_are_laid_out_and_learn_the_same(value: str) -> None:
    net, layouts = images(), []
    weights, parameters = (net[0].weight, net[2][1].weight), list(map(id, net.parameters()))
    if value == "contiguous_format":
        for weight in weights:
            weight.data = weight.data.contiguous(memory_format=LAST[weight.dim()])

    def losses(net: Any) -> list[float]:
        optimizer, found = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), []
        for _ in range(3):
            loss = net(torch.ones(2, 3, 8, 8)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    expected = losses(copy.deepcopy(net))
    net[0].register_forward_pre_hook(lambda _m, x: layouts.append(_is_last(x[0])))
    with overriding(install, f"model.memory_format={value}") as effects:
        assert losses(net) == pytest.approx(expected, rel=1e-4)
        assert expected[-1] != pytest.approx(expected[0], rel=1e-2)
        (before,) = {"channels_last", "contiguous_format"} - {value}
        assert done(effects, FORMAT) == (1, [before], None)
    last = value == "channels_last"
    assert layouts == [last] * 3
    assert [_is_last(weight) for weight in weights] == [last, last]
    assert list(map(id, net.parameters())) == parameters  # the same objects


def _is_last(tensor: Any) -> bool:
    return bool(tensor.is_contiguous(memory_format=LAST[tensor.dim()]) and not tensor.is_contiguous())


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Have torch.compile return what it is given, and list with which options it was called."""
    calls: list[Any] = []

    def compile(model: Any = None, **options: Any) -> Any:  # noqa: A001 - torch's name
        calls.append((model, options))
        return model

    monkeypatch.setattr(torch, "compile", compile)
    return calls


def test_the_outermost_model_is_compiled_at_its_first_call_and_no_part_of_it(compiled: list[Any]) -> None:
    net = Net()
    with overriding(install, "torch.compile=max-autotune") as effects:
        for _ in range(3):
            net(torch.ones(3, 4))
        assert [(model.__self__, options) for model, options in compiled] == [(net, {"mode": "max-autotune"})]
        assert done(effects, COMPILE) == (1, ["off"], None)
        pickle.dumps(net.inner)
        copy.deepcopy(net.inner)
    assert net.inner._compiled_call_impl is None


def test_what_the_script_compiles_is_compiled_as_asked_for_and_once(compiled: list[Any]) -> None:
    net = Net()
    with overriding(install, "torch.compile=default") as effects:
        torch.compile(net, mode="reduce-overhead", dynamic=True)(torch.ones(3, 4))
        assert compiled == [(net, {"mode": "default", "dynamic": True})]
        assert done(effects, COMPILE) == (1, ["reduce-overhead"], None)
        other = Net()
        other.compile()
        other(torch.ones(3, 4))
        assert [options for _, options in compiled[1:]] == [{"mode": "default"}]
        assert done(effects, COMPILE)[0] == 2


def test_with_a_backend_of_its_own_it_stays_and_so_do_functions(compiled: list[Any]) -> None:
    with overriding(install, "torch.compile=default") as effects:
        torch.compile(Net(), backend="eager")(torch.ones(3, 4))
        torch.compile(abs, mode="max-autotune")
        assert [options for _, options in compiled] == [{"backend": "eager"}, {"mode": "max-autotune"}]
        why = "the script compiles a model with options or a backend of its own"
        assert done(effects, COMPILE) == (0, [], why)


def test_off_compiles_nothing_of_the_scripts(compiled: list[Any]) -> None:
    def function(x: Any) -> Any:
        return x

    with overriding(install, "torch.compile=off") as effects:
        net = Net()
        assert torch.compile(net) is net
        assert torch.compile(function) is function
        assert torch.compile(mode="max-autotune")(function) is function
        net.compile()
        net(torch.ones(3, 4))
        assert compiled == []
        assert done(effects, COMPILE) == (4, ["default", "max-autotune"], None)


def test_a_model_that_cannot_be_compiled_is_called_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    class UnsupportedError(Exception):
        """Stands for one of the compiler's."""

    UnsupportedError.__module__ = "torch._dynamo.exc"

    def compile(model: Any = None, **_: Any) -> Any:  # noqa: A001 - torch's name
        def call(*_: Any, **__: Any) -> Any:
            raise UnsupportedError("no compiler")

        return call

    monkeypatch.setattr(torch, "compile", compile)
    net = Net()
    with overriding(install, "torch.compile=default") as effects:
        for _ in range(2):
            assert net(torch.ones(3, 4))["out"].shape == (3, 2)
        assert done(effects, COMPILE) == (0, [], "UnsupportedError: no compiler")
        assert net._compiled_call_impl is None


@pytest.mark.slow
def test_a_real_model_is_compiled_and_computes_the_same() -> None:
    net = images()
    expected = net(torch.ones(2, 3, 8, 8))
    with overriding(install, "torch.compile=default") as effects:
        for _ in range(2):
            got = net(torch.ones(2, 3, 8, 8))
            got.sum().backward()
        torch.testing.assert_close(got, expected)
        assert done(effects, COMPILE) == (1, ["off"], None)
        assert net._compiled_call_impl is not None
    torch._dynamo.reset()
