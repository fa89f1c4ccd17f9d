"""What holds for the whole process stays as asked for when the script sets it; copies to a device wait or do not."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import Any

import pytest

from dlprof.overrides import Value
from dlprof.record import hooks
from dlprof.record.overrides import switches
from dlprof.record.overrides.constructors import Effects
from tests.fixtures.overriding import done, overriding

torch: Any = pytest.importorskip("torch", reason="recording needs torch")


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    threads, collecting = torch.get_num_threads(), gc.isenabled()
    yield
    torch.set_num_threads(threads)
    (gc.enable if collecting else gc.disable)()


def set_threads(value: int) -> None:
    torch.set_num_threads(value)


def set_tf32(value: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = value


def set_benchmark(value: bool) -> None:
    torch.backends.cudnn.benchmark = value


def set_gc(value: bool) -> None:
    (gc.enable if value else gc.disable)()


PRECISION = (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision)
BENCHMARK = (lambda: torch.backends.cudnn.benchmark, set_benchmark)
# A setting and its value, what reads and sets it, its value before, what the script sets and how, and what is noted
# to have been there.
SWITCHES: dict[str, tuple[Any, ...]] = {
    "torch.num_threads": (2, torch.get_num_threads, set_threads, 1, [(set_threads, 3)], [1, 3]),
    "torch.float32_matmul_precision": (
        *("high", *PRECISION, "highest"),
        *([(PRECISION[1], "medium"), (set_tf32, False)], ["highest", "medium", False]),
    ),
    "torch.cudnn_benchmark": (True, *BENCHMARK, False, [(set_benchmark, False)], [False]),
    "gc.enabled": (False, gc.isenabled, set_gc, True, [(set_gc, True)], [True]),
    "gc.enabled ": (True, gc.isenabled, set_gc, False, [(set_gc, False)], [False]),
}


@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_stays_as_asked_for_until_the_end(name: str) -> None:
    value, read, switch, before, sets, noted = SWITCHES[name]
    switch(before)
    with overriding(switches.install, f"{name.strip()}={value}") as effects:
        assert read() == value
        for by, other in sets:
            by(other)
            assert read() == value
        assert done(effects, name.strip()) == (1 + len(sets), noted, None)
    assert read() == before
    switch(value)  # as without us
    assert read() == value
    switch(before)


class Threads(torch.utils.data.Dataset[Any]):  # type: ignore[misc]
    """The threads of the worker that makes a sample."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, _: int) -> int:
        return int(torch.get_num_threads())


def test_loader_workers_keep_one_thread_and_what_torch_refuses_is_refused() -> None:
    with overriding(switches.install, "torch.num_threads=2"):
        with pytest.raises(RuntimeError):
            torch.set_num_threads(0)
        assert [int(n) for n in torch.utils.data.DataLoader(Threads(), num_workers=1)] == [1, 1]


def test_objects_are_frozen_when_training_begins() -> None:
    effects = Effects({"gc.freeze": True})
    try:
        switches.install({"gc.freeze": True}, effects)
        assert done(effects, "gc.freeze") == (0, [], None)
        switches.begin({"gc.freeze": True}, effects)
        assert gc.get_freeze_count() > 0
        assert done(effects, "gc.freeze") == (1, [False], None)
    finally:
        hooks.uninstall()
    assert gc.get_freeze_count() == 0
    with overriding(switches.install, "gc.freeze=False") as effects:
        gc.freeze()  # the script's own
        assert gc.get_freeze_count() == 0
        assert done(effects, "gc.freeze") == (1, [True], None)


def test_variables_are_noted_with_what_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Value] = {"env.DL_ONE": "1", "env.DL_TWO": "2", "loader.num_workers": 1}
    monkeypatch.setenv("DL_ONE", "1")
    monkeypatch.setenv("DL_TWO", "other")
    effects = Effects(asked)
    for _ in range(2):
        switches.see_environment(asked, {"DL_ONE": "0", "DL_TWO": None}, effects)
    assert done(effects, "env.DL_ONE") == (1, ["0"], None)
    assert done(effects, "env.DL_TWO") == (0, [], "it has another value in the rank")
    assert os.environ["DL_TWO"] == "other"


def test_a_torch_without_a_switch_costs_that_one_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_set_float32_matmul_precision")
    with overriding(switches.install, "torch.float32_matmul_precision=high", "torch.num_threads=2") as effects:
        assert "AttributeError" in str(done(effects, "torch.float32_matmul_precision")[2])
        assert done(effects, "torch.num_threads")[0] == 1


COPY = "copy.non_blocking"
THERE = torch.ones(2, device="meta")
HOST, OFF = torch.ones(2), {"non_blocking": False}
ON = {"non_blocking": True}
# A method, its arguments, those that torch gets with non_blocking=True, and what was there; None: it is no such copy.
COPIES: list[tuple[str, tuple[Any, ...], dict[str, Any], tuple[Any, ...], dict[str, Any], bool | None]] = [
    ("to", ("meta",), {}, ("meta",), ON, False),
    ("to", (torch.device("meta"),), OFF, (torch.device("meta"),), ON, False),
    ("to", ("meta", torch.float16, False), {}, ("meta", torch.float16, True), {}, False),
    ("to", ("meta", None, True, True), {}, ("meta", None, True, True), {}, True),
    ("to", (), {"device": "meta"}, (), {"device": "meta", **ON}, False),
    ("to", (THERE,), {}, (THERE,), ON, False),
    ("cuda", (), {}, (), ON, False),
    ("cuda", (0, False), {}, (0, True), {}, False),
    ("to", ("cpu",), {}, ("cpu",), {}, None),
    ("to", (torch.float16,), {}, (torch.float16,), {}, None),
    ("to", (), {}, (), {}, None),
]


def copied(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return what Tensor.to and Tensor.cuda are called with, below the override."""
    made: list[Any] = []
    for name in ("to", "cuda"):
        monkeypatch.setattr(torch.Tensor, name, lambda _, *args, **kwargs: made.append((args, kwargs)))
    return made


@pytest.mark.parametrize(("method", "args", "kwargs", "with_args", "with_kwargs", "before"), COPIES)
def test_only_copies_to_a_device_do_not_wait(
    method: str, args: Any, kwargs: Any, with_args: Any, with_kwargs: Any, before: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = copied(monkeypatch)
    with overriding(switches.install_copies, f"{COPY}=True") as effects:
        getattr(HOST, method)(*args, **kwargs)
        assert calls == [(with_args, with_kwargs)]
        assert done(effects, COPY) == ((0, [], None) if before is None else (1, [before], None))


def test_what_did_not_wait_waits_and_a_copy_from_a_device_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host may read what was copied at once."""
    calls = copied(monkeypatch)
    with overriding(switches.install_copies, f"{COPY}=off") as effects:
        HOST.to("meta", non_blocking=True)
        THERE.to("cpu", non_blocking=True)
        assert calls == [(("meta",), OFF), (("cpu",), ON)]
        assert done(effects, COPY) == (1, [True], None)


def test_a_real_copy_and_a_wrong_one() -> None:
    with overriding(switches.install_copies, f"{COPY}=True") as effects:
        assert HOST.to("meta").device.type == "meta"
        assert HOST.to(torch.float16).dtype == torch.float16
        with pytest.raises(RuntimeError):
            HOST.to("no such device")
        model = torch.nn.Linear(2, 2).to("meta")  # torch's own calls
        assert model.weight.device.type == "meta"
        assert done(effects, COPY)[0] == 1
    assert "to" not in vars(torch.Tensor)
