"""What holds for the whole process is set at once, and stays as asked for when the script sets it."""

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


def test_threads_win_over_the_scripts_own_and_loader_workers_keep_one() -> None:
    torch.set_num_threads(1)
    with overriding(switches.install, "torch.num_threads=2") as effects:
        assert torch.get_num_threads() == 2
        torch.set_num_threads(3)
        assert torch.get_num_threads() == 2
        assert done(effects, "torch.num_threads") == (2, [1, 3], None)
        with pytest.raises(RuntimeError):
            torch.set_num_threads(0)
        data = torch.utils.data.DataLoader(_Threads(), num_workers=1)
        assert [int(n) for n in data] == [1, 1]
    assert torch.get_num_threads() == 1


class _Threads(torch.utils.data.Dataset[Any]):  # type: ignore[misc]
    def __len__(self) -> int:
        return 2

    def __getitem__(self, n: int) -> int:
        return int(torch.get_num_threads())


def test_precision_wins_however_the_script_sets_it() -> None:
    assert torch.get_float32_matmul_precision() == "highest"
    with overriding(switches.install, "torch.float32_matmul_precision=high") as effects:
        for sets in (
            lambda: torch.set_float32_matmul_precision("medium"),
            lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", False),
        ):
            sets()
            assert torch.get_float32_matmul_precision() == "high"
        assert done(effects, "torch.float32_matmul_precision") == (3, ["highest", "medium", False], None)
    assert torch.get_float32_matmul_precision() == "highest"


def test_cudnns_benchmark_wins() -> None:
    with overriding(switches.install, "torch.cudnn_benchmark=True") as effects:
        assert torch.backends.cudnn.benchmark is True
        torch.backends.cudnn.benchmark = False
        assert torch.backends.cudnn.benchmark is True
        assert done(effects, "torch.cudnn_benchmark") == (2, [False], None)
    assert torch.backends.cudnn.benchmark is False
    torch.backends.cudnn.benchmark = True
    assert torch.backends.cudnn.benchmark is True
    torch.backends.cudnn.benchmark = False


@pytest.mark.parametrize("value", [True, False])
def test_garbage_collection_wins(value: bool) -> None:
    (gc.disable if value else gc.enable)()
    with overriding(switches.install, f"gc.enabled={value}") as effects:
        assert gc.isenabled() is value
        (gc.disable if value else gc.enable)()
        assert gc.isenabled() is value
        assert done(effects, "gc.enabled") == (2, [not value], None)
    assert gc.isenabled() is not value


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


def test_the_script_does_not_freeze() -> None:
    with overriding(switches.install, "gc.freeze=False") as effects:
        gc.freeze()
        assert gc.get_freeze_count() == 0
        assert done(effects, "gc.freeze") == (1, [True], None)


def test_variables_are_seen_with_what_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
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
