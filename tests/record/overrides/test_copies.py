"""Copies from the host to a device wait or do not, and no other copy is changed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fixtures.overriding import done, overriding

torch: Any = pytest.importorskip("torch", reason="recording needs torch")

from dlprof.record.overrides.copies import install  # noqa: E402

NAME = "copy.non_blocking"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return what Tensor.to and Tensor.cuda are called with, below the override."""
    made: list[Any] = []

    def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        made.append((args, kwargs))
        return self

    for name in ("to", "cuda"):
        monkeypatch.setattr(torch.Tensor, name, recorded)
    return made


@pytest.mark.parametrize(
    ("args", "kwargs", "changed", "before"),
    [
        (("meta",), {}, (("meta",), {"non_blocking": True}), False),
        ((torch.device("meta"),), {"non_blocking": False}, ((torch.device("meta"),), {"non_blocking": True}), False),
        (("meta", torch.float16, False), {}, (("meta", torch.float16, True), {}), False),
        (("meta", None, True, True), {}, (("meta", None, True, True), {}), True),
        ((), {"device": "meta"}, ((), {"device": "meta", "non_blocking": True}), False),
    ],
)
def test_a_copy_to_a_device_does_not_wait(args: Any, kwargs: Any, changed: Any, before: bool, calls: list[Any]) -> None:
    with overriding(install, "copy.non_blocking=True") as effects:
        torch.ones(2).to(*args, **kwargs)
        assert calls == [changed]
        assert done(effects, NAME) == (1, [before], None)


def test_by_the_device_of_another_tensor_and_by_cuda(calls: list[Any]) -> None:
    there = torch.ones(2, device="meta")
    with overriding(install, "copy.non_blocking=True"):
        torch.ones(2).to(there)
        torch.ones(2).cuda()
        torch.ones(2).cuda(0, False)
    assert calls == [((there,), {"non_blocking": True}), ((), {"non_blocking": True}), ((0, True), {})]


def test_what_did_not_wait_waits(calls: list[Any]) -> None:
    with overriding(install, "copy.non_blocking=off") as effects:
        torch.ones(2).to("meta", non_blocking=True)
        assert calls == [(("meta",), {"non_blocking": False})]
        assert done(effects, NAME) == (1, [True], None)


@pytest.mark.parametrize(
    ("source", "args"), [("cpu", ("cpu",)), ("cpu", (torch.float16,)), ("meta", ("cpu",)), ("cpu", ())]
)
def test_other_copies_stay(source: str, args: Any, calls: list[Any]) -> None:
    """A copy from a device must wait: the host may read it at once."""
    with overriding(install, "copy.non_blocking=True") as effects:
        torch.ones(2, device=source).to(*args)
        assert calls == [(args, {})]
        assert done(effects, NAME) == (0, [], None)


def test_a_real_copy_and_a_wrong_one() -> None:
    with overriding(install, "copy.non_blocking=True") as effects:
        assert torch.ones(2).to("meta").device.type == "meta"
        assert torch.ones(2).to(torch.float16).dtype == torch.float16
        with pytest.raises(RuntimeError):
            torch.ones(2).to("no such device")
        model = torch.nn.Linear(2, 2).to("meta")  # torch's own calls
        assert model.weight.device.type == "meta"
        assert done(effects, NAME)[0] == 1
    assert "to" not in vars(torch.Tensor)
