"""What a driver's errors cost: one reading, one query, one GPU, or all of them; each says so once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dlprof.record.samplers.driver import DriverSampler, Fate, Gpu, Reading
from dlprof.record.samplers.sampling import Host, RankHere


class DriverError(Exception):
    """One that says what it means."""

    def __init__(self, fate: Fate) -> None:
        super().__init__(fate.name)
        self.fate = fate


class Fake(DriverSampler):
    """A vendor whose GPUs are named by their number, and fail at the n-th reading as they are bid."""

    name, library, identity = "fake", "libfake", "its number"

    def __init__(self, **fails: tuple[int, Fate]) -> None:
        super().__init__()
        self.fails, self.asked, self.unloaded = fails, 0, 0

    def _name_of(self, device: Mapping[str, Any]) -> str | None:
        return device.get("number", "") if device.get("vendor") == "fake" else None

    def _load(self) -> Any:
        self.errors = (DriverError,)
        return self

    def _unload(self) -> None:
        self.unloaded += 1
        raise DriverError(Fate.OVER)

    def _open(self, name: str, _device: Mapping[str, Any]) -> Gpu:
        return Gpu(self, lambda: {"power_w": 1}, lambda: self.heat(name))

    def heat(self, name: str) -> Reading:
        self.asked += 1
        nth, fate = self.fails.get(name, (0, Fate.ONCE))
        if nth == self.asked:
            raise DriverError(fate)
        return {"temperature_c": 40}

    def fate(self, error: Exception) -> Fate:
        assert isinstance(error, DriverError)
        return error.fate


def sampled(sampler: Fake, folder: Path, *devices: dict[str, Any], ticks: int = 3) -> list[list[set[str]]]:
    """Return which metrics each rank has a line of, after so many ticks."""
    host = Host(folder)
    host.settle()
    host.ranks = tuple(RankHere(n, f"{n:05d}", 1, 1, device) for n, device in enumerate(devices))
    for rank in host.ranks:
        (folder / "ranks" / rank.name).mkdir(parents=True)
    sampler.start(host)
    for _ in range(ticks):
        sampler.tick()
    sampler.stop()
    paths = [folder / "ranks" / rank.name / "gpu.jsonl" for rank in host.ranks]
    texts = [path.read_text() if path.exists() else "" for path in paths]
    return [[json.loads(line).keys() - {"at_ns", "perf_ns"} for line in text.splitlines()] for text in texts]


A, B = {"vendor": "fake", "number": "a"}, {"vendor": "fake", "number": "b"}
BOTH = {"power_w", "temperature_c"}


@pytest.mark.parametrize(
    ("fate", "lines", "warns"),
    [
        (Fate.ONCE, [BOTH, {"power_w"}, BOTH], ""),
        (Fate.REFUSED, [BOTH, {"power_w"}, {"power_w"}], ""),
        (Fate.LOST, [BOTH], "GPU a is not sampled any more: LOST"),
        (Fate.OVER, [BOTH], "no GPU is sampled any more: libfake: OVER"),
    ],
)
def test_an_error_costs_what_it_means(
    fate: Fate, lines: list[set[str]], warns: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    sampler = Fake(a=(2, fate))
    assert sampled(sampler, tmp_path, A) == [lines]
    assert capfd.readouterr().err == (f"dlprof: {warns}\n" if warns else "")
    assert sampler.unloaded == 1


def test_ranks_that_share_a_gpu_share_its_reading_and_a_lost_one_leaves_the_others(tmp_path: Path) -> None:
    sampler = Fake(a=(3, Fate.LOST))
    assert sampled(sampler, tmp_path, A, B, A) == [[BOTH], [BOTH] * 3, [BOTH]]


def test_nothing_is_asked_without_a_gpu_of_the_vendor(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    sampler = Fake()
    assert sampled(sampler, tmp_path, {"vendor": "other"}, {}) == [[], []]
    assert (sampler.driver, sampler.unloaded) == (None, 0)
    assert sampled(Fake(), tmp_path / "unnamed", {"vendor": "fake"}) == [[]]
    assert capfd.readouterr().err.count("the GPU of rank 0 is not sampled: this torch does not tell its number") == 1
