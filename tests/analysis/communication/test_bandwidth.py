"""Bandwidth of collectives: sizes, the link's peak, and what missing ranks leave unknown."""

from pathlib import Path

import numpy as np
import pytest

from dlprof.analysis.communication.bandwidth import bandwidth, bus_factor, exchanged, size_class
from tests.fixtures import runs
from tests.fixtures.exchanges import exchanging
from tests.fixtures.runs import MS


def test_waiting_is_no_transfer(tmp_path: Path) -> None:
    frame = runs.measured(runs.foreign(tmp_path, *exchanging((0, 1, 2, 3))), bandwidth).frame(bandwidth)
    (row,) = frame.to_dict("records")
    assert (row["collective"], row["ranks"], row["count"], row["bytes"]) == ("all_reduce", 4, 1.0, 40_000_000)
    assert (row["transfer_ns"], row["wait_ns"]) == (MS, 3 / 4 * MS / 2)
    assert row["algbw"] == pytest.approx(40e9)
    assert row["busbw"] == pytest.approx(60e9)
    assert row["exposed_ns"] == pytest.approx(MS)
    assert (row["peak"], row["culprit"], row["late"], row["matched"]) == (450e9, 3, 1, 1)


@pytest.mark.parametrize(
    ("collective", "ranks", "factor"),
    [
        ("all_reduce", 2, 1.0),
        ("all_reduce", 8, 1.75),
        ("all_gather", 4, 0.75),
        ("all_to_all", 4, 0.75),
        ("broadcast", 8, 1),
        ("send_recv", 8, 1),
    ],
)
def test_the_factors_are_those_of_nccl_tests(collective: str, ranks: int, factor: float) -> None:
    assert bus_factor(collective, ranks) == factor


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA GB200", 900e9),
        ("NVIDIA B300 SXM6 AC", 900e9),
        ("NVIDIA A800-SXM4-80GB", 200e9),
        ("NVIDIA H800", 200e9),
        ("NVIDIA H800 PCIe", None),
        ("Tesla V100-SXM2-32GB", 150e9),
        ("NVIDIA H100 80GB HBM3", 450e9),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA H100 PCIe", None),
    ],
)
def test_a_link_has_the_peak_of_its_part(tmp_path: Path, device: str, peak: float | None) -> None:
    made = exchanging((0, 1), device=device)
    (found,) = runs.measured(runs.foreign(tmp_path, *made), bandwidth).frame(bandwidth)["peak"]
    assert found == peak if peak else np.isnan(found)


def test_groups_are_told_apart(tmp_path: Path) -> None:
    frame = runs.measured(runs.foreign(tmp_path, *exchanging((0, 1), (2, 3))), bandwidth).frame(bandwidth)
    assert set(frame["members"]) == {"0,1", "2,3"}
    assert set(frame["culprit"]) == {1, 3}


def test_groups_of_as_many_ranks_are_one_kind_of_exchange(tmp_path: Path) -> None:
    path = runs.foreign(tmp_path, *exchanging((0, 1), (2, 3), (4, 5, 6)))
    frame = runs.measured(path, exchanged).frame(exchanged).set_index("ranks")
    assert frame["groups"].to_dict() == {2: 2, 3: 1}
    assert frame["count"].to_dict() == {2: 1.0, 3: 1.0}
    assert frame["wait_ns"].to_dict() == pytest.approx({2: MS / 4, 3: MS / 3})
    assert frame["busbw"].to_dict() == pytest.approx({2: 40e9, 3: 40e9 * 4 / 3})
    assert frame["of_peak"].to_dict() == pytest.approx({2: 40 / 450, 3: 40 / 450 * 4 / 3})
    assert list(frame.index) == [3, 2]


def test_an_unknown_device_has_no_peak(tmp_path: Path) -> None:
    made = exchanging((0, 1), device="Something else")
    assert runs.measured(runs.foreign(tmp_path, *made), bandwidth).frame(bandwidth)["peak"].isna().all()


def test_with_ranks_missing_waiting_is_not_known(tmp_path: Path) -> None:
    (row,) = (
        runs.measured(runs.foreign(tmp_path, *exchanging((0, 1, 2))[:2]), bandwidth).frame(bandwidth).to_dict("records")
    )
    assert np.isnan(row["wait_ns"])
    assert row["culprit"] == -1
    assert row["transfer_ns"] == 1.5 * MS


def test_classes_are_named_by_their_bounds() -> None:
    assert [size_class(n) for n in (-1, 0, 2, 5)] == ["unknown size", "below 4 KiB", "below 1 MiB", "256 MiB or more"]
