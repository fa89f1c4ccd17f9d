"""Samples and tokens of a job: what counted them, how many ranks have batches of their own, and how it scales."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.engine import Maybe
from dlprof.analysis.step.throughput import (
    MOST_TRANSFERS,
    described,
    energy,
    of_throughput,
    scaling,
    throughput,
    time_taken,
)
from dlprof.errors import DoesNotApply, NotMeasured
from dlprof.result.figures import Cost, Throughput
from dlprof.result.scale import Scaling
from simulator import folder as simulated
from simulator.faults.fault import base, recording, step_of
from simulator.hardware import transfer_ns
from tests.fixtures import jobs, readings, runs
from tests.fixtures.runs import MS

LOADER = {"role": "train", "num_workers": 0, "batch_size": 8, "dataset_length": 4000, "iterable": False}
GPT = {"class": "GPT", "parameters": 10, "reads_sequences": True}
NAN = math.nan


def told(folder: Path, steps: Mapping[str, Any], *facts: Mapping[str, Any]) -> Any:
    """Return the throughput of ranks with these facts, whose steps take 100 ms and hold what is said."""
    rows = [runs.light(n, 100 * MS, n * 100 * MS, **steps) for n in range(20)]
    path = runs.recorded(folder, *((None, rows, {**runs.CPU, **f}) for f in facts))
    return runs.measured(path, throughput).frame(throughput)


def figures(*values: float | None) -> Any:
    return pytest.approx([NAN if value is None else value for value in values], nan_ok=True)


@pytest.mark.parametrize(
    ("steps", "facts", "source", "samples", "tokens"),
    [
        ({"samples": 8, "inputs": 9}, {"loaders": [LOADER]}, "loader", 80, NAN),
        ({"samples": -1, "inputs": 4, "tokens": 512}, {"models": [GPT]}, "model", 40, 5120),
        ({"samples": 3, "tokens": 30}, {"step": {"mark": "user", "told": True}}, "script", 30, 300),
        # Its first dimension may be the sequence's; and of two models, whose input is it?
        ({"inputs": 4, "tokens": 512}, {"models": [{**GPT, "batch_first": False}]}, "model", NAN, 5120),
        ({"inputs": 4, "tokens": 512}, {"models": [GPT], "optimizers": [{"class": "Adam"}] * 2}, "loader", NAN, 5120),
        # In a pipeline every call of every stage counts.
        ({"inputs": 4}, {"pipeline": {"ranks": [0], "stages": [0, 1]}}, "model", 20, NAN),
        # Integers are tokens of a model that reads sequences alone.
        ({"samples": 8, "tokens": 208}, {"models": [{**GPT, "reads_sequences": False}]}, "loader", 80, NAN),
    ],
    ids=["loader", "model", "script", "sequence first", "two models", "stages", "tables"],
)
def test_what_counts_samples_and_tokens(
    tmp_path: Path, steps: Any, facts: Any, source: str, samples: float, tokens: float
) -> None:
    t = told(tmp_path, steps, facts)
    assert t.source == source
    assert [NAN if v is None else v for v in (t.samples_per_s, t.tokens_per_s)] == figures(samples, tokens)
    assert [NAN if v is None else v for v in (t.samples_per_step, t.tokens_per_step)] == figures(
        samples / 10, tokens / 10
    )
    length = 4000 if facts == {"loaders": [LOADER]} else None
    assert (t.epoch_samples, t.epoch_s) == (length, length and pytest.approx(50))


@pytest.mark.parametrize("steps", [{"samples": -1, "inputs": -1}, {}], ids=["nothing", "an older recording"])
def test_nothing_counted_is_not_known(tmp_path: Path, steps: dict[str, Any]) -> None:
    with pytest.raises(NotMeasured, match=r"dlprof\.step"):
        told(tmp_path, steps, {})


def test_batches_of_varying_size_count_by_their_mean_but_all_must_be_counted(tmp_path: Path) -> None:
    for name, samples in (("mean", [4 + n % 2 * 8 for n in range(44)]), ("one", [8] * 15 + [-1] + [8] * 28)):
        rows = [runs.light(n, 100 * MS, n * 100 * MS, samples=s) for n, s in enumerate(samples)]
        run = runs.measured(runs.recorded(tmp_path / name, (None, rows, runs.CPU)), throughput)
        if name == "mean":
            assert run.frame(throughput).samples_per_s == pytest.approx(80, rel=0.05)
            continue
        with pytest.raises(NotMeasured):
            run.frame(throughput)


DDP = {"models": [{"class": "Net", "parameters": 5, "ddp": {"bucket_cap_mb": 25}}]}
CUT = {"models": [{"class": "GPT", "tensor_parallel": 2}]}


def shared(replica: int, of: int = 2) -> dict[str, Any]:
    return {"loaders": [{**LOADER, "replicas": of, "replica": replica}]}


def piped(*ranks: int, stage: int = 0) -> dict[str, Any]:
    return {"pipeline": {"ranks": [*ranks], "stages": [stage]}}


@pytest.mark.parametrize(
    ("facts", "per_s", "of", "epoch_s"),
    [
        ((shared(0), shared(1)), 160, "job", 25),
        ((shared(0), shared(0)), 160, "job", 25),  # two ranks of one share: of two, as the sampler says
        ((shared(0, 1), shared(0, 1)), 80, "job", 50),  # both have all of it: layers cut up
        ((shared(0), shared(1, 3)), 80, "rank", 25),
        ((DDP, DDP), 160, "job", None),
        (({"alone": True}, {"alone": True}), 160, "job", None),
        (({}, {}), 80, "rank", None),
        ((CUT, CUT), 80, "job", None),
        ((CUT, CUT, CUT), 80, "rank", None),
        ((piped(0, 1), piped(0, 1, stage=1)), 80, "job", None),
        ((piped(0), piped(1)), 160, "job", None),  # two pipelines of a rank each
        ((piped(0, 1), piped(0, 1), piped(2)), 80, "rank", None),
    ],
)
def test_which_ranks_have_batches_of_their_own(
    tmp_path: Path, facts: Iterable[Any], per_s: float, of: str, epoch_s: float | None
) -> None:
    t = told(tmp_path, {"samples": 8}, *facts)
    assert (t.samples_per_s, t.of) == (pytest.approx(per_s), of)
    assert bool(t.why) == (of == "rank")
    assert t.epoch_s == (epoch_s and pytest.approx(epoch_s))


def test_ranks_that_count_nothing_count_as_the_others(tmp_path: Path) -> None:
    """Of a pipeline only the ends have loaders."""
    rows = [[runs.light(n, 100 * MS, n * 100 * MS, samples=s) for n in range(20)] for s in (16, -1)]
    path = runs.recorded(tmp_path, *((None, r, {**runs.CPU, **piped(0, 1)}) for r in rows))
    assert runs.measured(path, throughput).frame(throughput).samples_per_s == pytest.approx(160)


def test_a_rank_that_feeds_several_gpus_has_an_unknown_number(tmp_path: Path) -> None:
    several = {**runs.GPU, "models": [{"class": "Net", "data_parallel": True}]}
    assert told(tmp_path, {"samples": 8}, several).gpus is None


def test_the_energy_of_an_epoch_is_that_of_all_gpus(tmp_path: Path) -> None:
    rows = [runs.light(n, 900 * MS, samples=8) for n in range(40)]
    path = runs.recorded(tmp_path / "run", *((None, rows, {**runs.GPU, **shared(r)}) for r in (0, 1)))
    for rank, watts in enumerate((300, 500)):
        readings.write(path / f"ranks/{rank:05d}/gpu.jsonl", ({"power_w": watts} for _ in range(40)))
    t: Any = runs.measured(path, throughput).frame(throughput)
    assert (t.gpus, t.power_w) == (2, pytest.approx(800))
    epoch = t.epoch
    assert epoch.seconds == pytest.approx(4000 / 16 * 0.9, rel=0.01)
    assert epoch.joules == pytest.approx(800 * epoch.seconds)
    assert epoch.gpu_hours == pytest.approx(2 * epoch.seconds / 3600)


LOOPS = {
    "loader": (
        """
        for batch in DataLoader(data, batch_size=6, drop_last=True):
            pass
        for epoch in range(12):
            for batch in DataLoader(data, batch_size=6, drop_last=True):
                train(batch)
        """,
        ("loader", 6, None),
    ),
    "tokens": (
        """
        class Attention(nn.Module):
            def __init__(self):
                super().__init__()
                self.embedding, self.head = nn.Embedding(50, 8), nn.Linear(8, 50)
            def forward(self, tokens):
                return self.head(self.embedding(tokens))

        model = Attention()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(120):
            tokens = torch.randint(0, 50, (4, 16))
            loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        """,
        ("model", 4, 64),
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", LOOPS)
def test_a_real_job_counts_what_it_trains_on(tmp_path: Path, name: str) -> None:
    pytest.importorskip("torch", reason="recording needs torch")
    body, counts = LOOPS[name]
    script = jobs.tiny(tmp_path, body)
    done = jobs.launch(jobs.wrapped(tmp_path / "run", [sys.executable, script], "--no-sample"), tmp_path)
    assert done.returncode == 0, done.stderr
    t: Any = runs.measured(tmp_path / "run", throughput).frame(throughput)
    assert (t.source, t.samples_per_step, t.tokens_per_step) == counts
    assert t.samples_per_s > t.samples_per_step  # a step takes far less than a second


# ---- as facts ------------------------------------------------------------------------------------------------------

EPOCH: Any = {"epoch_samples": 72_000, "epoch_s": 360.0}


@pytest.mark.parametrize(
    ("made", "listed"),
    [
        (
            Throughput(200.0, 40_000.0, 20.0, "loader", 4000.0, gpus=4, power_w=1200.0, **EPOCH),
            {
                "samples a second": "200",
                "samples a step": "20",
                "tokens a second": "40,000",
                "tokens a step": "4,000",
                "counted by": "the loaders' batches",
                "samples a second and GPU": "50",
                "tokens a second and GPU": "10,000",
                "energy of a sample": "6 J",
                "energy of a token": "0.03 J",
                "an epoch (72,000 samples)": "6 min, 0.40 GPU-hours, 0.12 kWh",
                "a million samples": "83.3 min, 5.56 GPU-hours, 1.67 kWh",
                "a billion tokens": "6.94 h, 27.8 GPU-hours, 8.33 kWh",
            },
        ),
        (  # of a rank nothing is said of the job
            Throughput(80.0, None, 8.0, "model", of="rank", why="who knows", **EPOCH),
            {
                "samples a second of a rank": "80",
                "samples a step of a rank": "8",
                "of the job": "not known: who knows",
                "counted by": "the first dimension of the model's input",
            },
        ),
    ],
    ids=["a job on GPUs", "a rank"],
)
def test_throughput_among_the_facts(made: Throughput, listed: dict[str, str]) -> None:
    assert {f.name: f.value for f in of_throughput(Maybe(lambda: made))} == listed


def test_why_it_is_not_known() -> None:
    def unknown() -> Any:
        raise NotMeasured("nobody counted")

    (fact,) = of_throughput(Maybe(unknown))
    assert (fact.section, fact.name, fact.value) == ("Throughput", "not known", "nobody counted")


def test_times_energies_and_costs_of_any_size() -> None:
    seconds = (0.05, 119, 120, 5_399, 5_400, 2 * 86_400 - 1, 3 * 86_400)
    assert [time_taken(s) for s in seconds] == ["50.0 ms", "119.0 s", "2 min", "90.0 min", "1.50 h", "48.0 h", "3 days"]
    assert (energy(900.0), energy(7.2e6)) == ("900 J", "2 kWh")
    assert (described(Cost(30.0)), described(None)) == ("30.0 s", "")


# ---- how a job scales, against the simulated machine that it ran on ------------------------------------------------


def scaled(path: Path, ranks: int, **how: Any) -> Scaling:
    job = replace(base(1, ranks), **how)
    simulated.write(path, job, recording(job, "x"))
    found: Scaling = runs.measured(path, scaling).frame(scaling)
    return found


def test_collectives_by_size_without_waiting_and_ranks_that_differ_for_good(tmp_path: Path) -> None:
    found = scaled(tmp_path / "run", 4, hosts=2, speeds=((0, 1.0), (1, 1.02), (2, 1.04), (3, 1.1)))
    job = base(1, 4)
    assert 1 <= len(found.transfers) <= MOST_TRANSFERS
    for row in found.transfers:
        assert (row.collective, row.ranks, row.hosts) == ("all_reduce", 4, 2)
        assert row.bytes is not None
        assert row.transfer_ns == pytest.approx(transfer_ns("all_reduce", round(row.bytes), 4, job.link), rel=0.06)
    # All gradients once a step, in 32 bits.
    moved = sum(row.count * (row.bytes or 0) for row in found.transfers)
    assert moved == pytest.approx(4 * job.model.parameters, rel=0.05)
    for values in (found.late_ns, found.uneven_ns):
        assert list(values) == sorted(values)
        assert abs(sum(values)) <= 1e-3 * sum(map(abs, values))
    # The mean is 1.04; of four ranks, deviations count √(4 ÷ 3) as much.
    slower = step_of(job) * (1.1 - 1.04)
    assert len(found.uneven_ns) == 4
    assert found.uneven_ns[-1] == pytest.approx(slower * (4 / 3) ** 0.5, rel=0.15)
    assert found.wait_ns == pytest.approx(slower, rel=0.2)
    assert found.transfer_ns is not None


def test_one_rank_has_no_scaling(tmp_path: Path) -> None:
    with pytest.raises(DoesNotApply):
        scaled(tmp_path / "run", 1)
