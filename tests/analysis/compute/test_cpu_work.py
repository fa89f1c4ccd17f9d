"""What of a CPU's step are products and what is split over threads, on a step whose operators are known."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from dlprof.analysis.compute import cpu_work as work
from dlprof.analysis.compute.cpu_work import cpu_float32, cpu_parts
from dlprof.errors import NotMeasured
from tests.fixtures import runs, traces
from tests.fixtures.processors import PRODUCTS, SERIAL, SMALL, SPLIT, computing
from tests.fixtures.runs import MS

ALL = PRODUCTS + SPLIT + SERIAL + SMALL + 10_000  # and what the layer takes around its product


def test_products_are_told_from_what_is_split_and_what_is_not(tmp_path: Path) -> None:
    measured = runs.measured(computing(tmp_path), work.cpu_work)
    row = measured.frame(work.cpu_work).to_dict("records")[0]
    assert (row["products_ns"], row["products"], row["inner"]) == (PRODUCTS, 1, 1)
    assert (row["split_ns"], row["split"]) == (SPLIT, 1)
    assert row["operators_ns"] == ALL


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::addmm", "product"),
        ("aten::bmm", "product"),
        ("aten::mkldnn_convolution", "product"),
        ("aten::convolution_backward", "product"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "product"),
        ("aten::embedding_dense_backward", "serial"),
        ("aten::normal_", "serial"),
        ("aten::native_layer_norm", "other"),
        ("aten::summary_of_mm", "other"),
    ],
)
def test_operators_are_known_by_their_names(name: str, kind: str) -> None:
    assert work._kind(name) == kind


def test_the_mean_steps_computation_is_divided_as_the_traced_ones(tmp_path: Path) -> None:
    """Operators take all of a traced step's computation: the layer, and what the others do."""
    frame = runs.measured(computing(tmp_path), cpu_parts).frame(cpu_parts)
    assert frame["products_ns"].to_list() == pytest.approx([PRODUCTS], rel=0.01)
    assert work.split_share(frame, 900.0 * MS) == {0: pytest.approx((PRODUCTS + SPLIT) / (900 * MS), rel=0.01)}
    assert work.split_share(None, 900.0 * MS) == {}


def test_a_device_is_not_judged_by_its_host(tmp_path: Path) -> None:
    path = runs.foreign(tmp_path, traces.training(world_size=1))
    with pytest.raises(NotMeasured, match="a device computes"):
        runs.measured(path, work.cpu_work).frame(work.cpu_work)


def parts(**row: float) -> pd.DataFrame:
    known = {"products_ns": 0.0, "products": 0.0, "split_ns": 0.0, "split": 0.0}
    return pd.DataFrame([{"rank": 0, **known, **row}])


def test_twice_the_threads_take_off_no_more_than_half() -> None:
    gain = work.by_threads(parts(products_ns=100 * MS, products=10), 0, 2.0)
    assert gain.most_ns == 50 * MS
    assert gain.expected_ns == pytest.approx(100 * MS * (1 - 2**-0.9) - 10 * 5_000)
    # Many small ones: to start the threads takes longer than they save.
    small = work.by_threads(parts(split_ns=MS, split=1_000), 0, 2.0)
    assert (small.expected_ns, small.most_ns) == (0.0, 0.5 * MS)
    # What memory feeds gains no more from 64 threads than from 4.
    assert (
        work.by_threads(parts(split_ns=MS, split=0), 0, 64.0).expected_ns
        == work.by_threads(parts(split_ns=MS, split=0), 0, 4.0).expected_ns
    )


def test_the_best_unit_counts() -> None:
    assert work.unit_of(["avx2", "avx512_bf16", "amx_bf16"]) == "amx_bf16"
    assert work.unit_of(["avx2", "avx512f"]) == ""
    assert work.times_of("amx_bf16") > work.times_of("avx512_bf16") > 1


def test_what_only_calls_the_operator_that_convolves_is_converted_once() -> None:
    calls = ("aten::conv2d", "aten::convolution", "aten::_convolution", "aten::convolution_backward")
    assert all(work.is_product(name) and work._CALLS_PRODUCT.match(name) for name in calls)
    inner = (
        "aten::mkldnn_convolution",
        "aten::mkldnn_convolution_backward",
        "aten::addmm",
        "aten::_slow_conv2d_forward",
    )
    assert all(work.is_product(name) and not work._CALLS_PRODUCT.match(name) for name in inner)


@pytest.mark.parametrize(
    ("facts", "float32"),
    [
        ({}, True),
        ({"autocast": {"enabled": False}, "models": [{"dtypes": {"float32": 9}}]}, True),
        ({"autocast": {"enabled": True, "dtype": "bfloat16"}}, False),
        ({"models": [{"dtypes": {"bfloat16": 9}}]}, False),
        ({"matmul": {"cpu_matmul_fp32_precision": "bf16"}}, False),
    ],
)
def test_the_facts_say_what_is_multiplied_in_float32(facts: dict[str, object], float32: bool) -> None:
    assert work.in_float32(facts) is float32


def test_only_ranks_whose_units_are_known_are_judged(tmp_path: Path) -> None:
    def asked(path: Path) -> pd.DataFrame:
        return runs.measured(path, cpu_float32).frame(cpu_float32)

    row = asked(computing(tmp_path / "units", units=["avx512_bf16"])).to_dict("records")[0]
    assert row["unit"] == "avx512_bf16"
    # One product, whose operands and result are converted.
    faster = row["float32_ns"] * (1 - 1 / work.times_of("avx512_bf16"))
    assert row["fp32_saved_ns"] == pytest.approx(faster - work._CONVERT_NS)
    assert asked(computing(tmp_path / "none", units=["avx2"]))["fp32_saved_ns"].to_list() == [0.0]
    with pytest.raises(NotMeasured, match="not recorded"):
        asked(computing(tmp_path / "old"))
