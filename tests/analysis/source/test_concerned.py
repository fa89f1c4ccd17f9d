"""What findings are about, in a step of a device whose every gap, product and copy is made by hand."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from dlprof.analysis.chains.norms import norms
from dlprof.analysis.rules import RULES
from dlprof.analysis.source.where import CONCERNED, concerned_rows, found_in_modules
from tests.fixtures import layers, operators, runs, traces

US = 1_000
ODD = {"Input Dims": [[64, 1001], [1001, 50257]], "Input type": ["c10::BFloat16", "c10::BFloat16"]}
SGEMM, HALF, SHORT = "ampere_sgemm_128x64_tn", "ampere_bf16_s16816gemm_bf16_128x64", "vectorized_elementwise_kernel"


def job() -> list[traces.Event | list[traces.Event]]:
    """Return two alike steps of 1 ms on a device, whose modules differ in what is wrong with them.

    a multiplies in float32 for 200 µs. b multiplies odd sizes in 16 bits for 100 µs. c waits with a kernel of 5 µs for
    its launch, 286 µs long. d copies from pageable memory for 50 µs, and its gradients are exchanged for 80 µs. e waits
    for the device for 150 µs.
    """
    events: list[traces.Event | list[traces.Event]] = []
    for n in range(2):
        at, ids = n * 1000 * US, 10 * n
        events += [
            traces.step(n, at, 1000 * US),
            layers.called("", "Net", at, 990 * US),
            layers.called("a", "Linear", at, 100 * US),
            traces.op("aten::mm", at + 5 * US, 60 * US),
            traces.launched(SGEMM, at + 10 * US, at + 20 * US, 200 * US, ids + 1),
            layers.called("b", "Linear", at + 100 * US, 100 * US),
            traces.op("aten::mm", at + 105 * US, 60 * US, **ODD),
            traces.launched(HALF, at + 110 * US, at + 220 * US, 100 * US, ids + 2),
            layers.called("c", "Act", at + 500 * US, 150 * US),
            traces.op("aten::gelu", at + 600 * US, 20 * US),
            traces.launched(SHORT, at + 601 * US, at + 610 * US, 5 * US, ids + 3),
            layers.called("d", "Linear", at + 660 * US, 100 * US),
            traces.op("aten::copy_", at + 660 * US, 20 * US),
            traces.call("cudaMemcpyAsync", at + 661 * US, 5 * US, ids + 4),
            traces.copy(at + 670 * US, 50 * US, 1_000_000, correlation=ids + 4),
            traces.call("cudaLaunchKernel", at + 700 * US, 5 * US, ids + 5),
            traces.collective(at + 720 * US, 80 * US, 1_000_000, correlation=ids + 5),
            layers.called("e", "Loss", at + 800 * US, 180 * US),
            traces.op("aten::item", at + 810 * US, 160 * US),
            traces.call("cudaStreamSynchronize", at + 815 * US, 150 * US, ids + 6),
        ]
    return events


def test_each_kind_of_finding_has_its_spans_and_their_modules(tmp_path: Path) -> None:
    made = traces.trace(*job(), world_size=2)
    rank = runs.rank_of(tmp_path, made)
    names = rank.table("spans")["name"].astype(str).to_numpy()
    each = {
        about: pd.Series(ns / 2 / US).groupby(names[rows]).sum().to_dict()
        for about, (rows, ns) in rank.once(concerned_rows).items()
    }
    assert each["float32"] == {SGEMM: 200.0}
    assert each["misaligned"] == {HALF: 100.0}
    assert each["late"][SHORT] == 286.0
    assert each["copies pageable"] == {"Memcpy HtoD (Pageable -> Device)": 50.0}
    assert list(each["exchanges"].values()) == [80.0]
    assert each["waits"] == {"cudaStreamSynchronize": 150.0}
    assert each["queued"] == each["copies"] == each["attention"] == {}

    found = runs.measured(traces.write(tmp_path / "of_modules.json", made), found_in_modules).frame(found_in_modules)
    inside = found[found["path"] != ""].groupby("about")["path"].agg(set).to_dict()
    assert inside["float32"] == {"a"}
    assert inside["misaligned"] == {"b"}
    assert inside["copies pageable"] == inside["exchanges"] == {"d"}
    assert inside["waits"] == {"e"}
    assert found.loc[(found["about"] == "late") & (found["path"] == "c"), "ns"].tolist() == [2 * 286.0 * US]


def test_products_on_a_cpu(tmp_path: Path) -> None:
    rank = runs.rank_of(tmp_path, layers.on_cpu(*layers.two_layers()))
    names = rank.table("spans")["name"].astype(str).to_numpy()
    rows, ns = rank.once(concerned_rows)["float32"]
    assert dict(zip(names[rows], ns, strict=True)) == {"aten::addmm": 160.0, "aten::mm": 80.0}


def test_only_rules_that_there_are_have_modules() -> None:
    assert set(CONCERNED) <= {rule.id for rule in RULES}


def test_what_is_written_out_has_the_operators_of_its_chains(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    x = torch.randn(512, 256, requires_grad=True)
    w = torch.randn(256, 256, requires_grad=True)

    def run() -> None:
        y = x @ w
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6) * w[0]
        (y @ w).sum().backward()

    rank = operators.profiled(torch, tmp_path, run)
    rows, ns = rank.once(concerned_rows)["norms"]
    names = rank.table("spans")["name"].astype(str).to_numpy()
    assert {"aten::pow", "aten::mean", "aten::rsqrt", "aten::mul"} <= set(names[rows])
    assert not any("mm" in name for name in names[rows])
    assert ns.sum() == pytest.approx(rank.once(norms)["ns"].sum())
    assert rank.once(concerned_rows)["losses"][1].sum() == 0
