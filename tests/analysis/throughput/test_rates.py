"""Samples and tokens of a job: by what counted them, and how many ranks have batches of their own."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.throughput.rates import throughput, work_done
from dlprof.errors import NotMeasured
from tests.fixtures import jobs, readings, runs
from tests.fixtures.runs import MS

LOADER = {"role": "train", "num_workers": 0, "batch_size": 8, "dataset_length": 4000, "iterable": False}
GPT = {"class": "GPT", "parameters": 10, "reads_sequences": True}


def job(folder: Path, steps: Mapping[str, Any], *facts: Mapping[str, Any]) -> Path:
    """Return a run of ranks with these facts, whose steps take 100 ms and hold what is said."""
    rows = [runs.light(n, 100 * MS, n * 100 * MS, **steps) for n in range(20)]
    return runs.recorded(folder, *((None, rows, {**runs.CPU, **f}) for f in facts))


def told(folder: Path, steps: Mapping[str, Any], *facts: Mapping[str, Any]) -> Any:
    return runs.measured(job(folder, steps, *facts), throughput).frame(throughput)


def test_the_loaders_batches_count_first(tmp_path: Path) -> None:
    t = told(tmp_path, {"samples": 8, "inputs": 9}, {"loaders": [LOADER]})
    assert (t.source, t.samples_per_step, t.samples_per_s, t.tokens_per_s) == ("loader", 8, pytest.approx(80), None)
    assert (t.epoch_samples, t.epoch_s) == (4000, pytest.approx(50))


def test_else_what_the_model_gets(tmp_path: Path) -> None:
    t = told(tmp_path, {"samples": -1, "inputs": 4, "tokens": 512}, {"models": [GPT]})
    assert (t.source, t.samples_per_s, t.tokens_per_s) == ("model", pytest.approx(40), pytest.approx(5120))
    assert (t.epoch_samples, t.epoch_s) == (None, None)


def test_the_script_has_the_last_word(tmp_path: Path) -> None:
    t = told(tmp_path, {"samples": 3, "tokens": 30}, {"step": {"mark": "user", "told": True}})
    assert (t.source, t.samples_per_s, t.tokens_per_s) == ("script", pytest.approx(30), pytest.approx(300))


@pytest.mark.parametrize(
    ("facts", "per_s"),
    [
        ({"models": [{**GPT, "batch_first": False}]}, None),  # its first dimension may be the sequence's
        ({"optimizers": [{"class": "Adam"}, {"class": "Adam"}]}, None),  # two models: of which?
        ({}, 40),
    ],
)
def test_the_models_input_counts_where_it_is_plain(
    tmp_path: Path, facts: Mapping[str, Any], per_s: float | None
) -> None:
    t = told(tmp_path, {"inputs": 4, "tokens": 512}, {"models": [GPT], **facts})
    assert (t.samples_per_s, t.tokens_per_s) == (per_s and pytest.approx(per_s), pytest.approx(5120))


def test_integers_are_tokens_of_a_model_that_reads_sequences_alone(tmp_path: Path) -> None:
    t = told(tmp_path, {"samples": 8, "tokens": 208}, {"models": [{"class": "Tables", "reads_sequences": False}]})
    assert t.tokens_per_s is None


def test_nothing_counted_is_not_known(tmp_path: Path) -> None:
    path = job(tmp_path, {"samples": -1, "inputs": -1}, {})
    with pytest.raises(NotMeasured, match=r"dlprof\.step"):
        runs.measured(path, throughput).frame(throughput)
    with pytest.raises(NotMeasured, match=r"dlprof\.step"):  # as an older dlprof wrote it
        told(tmp_path / "old", {}, {})


def test_a_single_step_without_a_batch_makes_it_unknown(tmp_path: Path) -> None:
    rows = [runs.light(n, 100 * MS, n * 100 * MS, samples=8 if n != 15 else -1) for n in range(20)]
    path = runs.recorded(tmp_path, (None, rows, runs.CPU))
    with pytest.raises(NotMeasured):
        runs.measured(path, work_done).frame(work_done)


def test_batches_of_varying_size_count_by_their_mean(tmp_path: Path) -> None:
    rows = [runs.light(n, 100 * MS, n * 100 * MS, samples=4 + n % 2 * 8) for n in range(44)]
    t = runs.measured(runs.recorded(tmp_path, (None, rows, runs.CPU)), throughput).frame(throughput)
    assert t.samples_per_s == pytest.approx(80, rel=0.05)


DDP = {"models": [{"class": "Net", "parameters": 5, "ddp": {"bucket_cap_mb": 25}}]}


def shared(replica: int, of: int = 2) -> dict[str, Any]:
    return {"loaders": [{**LOADER, "replicas": of, "replica": replica}]}


@pytest.mark.parametrize(
    ("facts", "per_s", "of"),
    [
        ((shared(0), shared(1)), 160, "job"),
        ((shared(0), shared(0)), 160, "job"),  # two ranks of one share: of two, as the sampler says
        ((shared(0, 1), shared(0, 1)), 80, "job"),  # both have all of it: layers cut up
        ((shared(0), shared(1, 3)), 80, "rank"),
        ((DDP, DDP), 160, "job"),
        (({"alone": True}, {"alone": True}), 160, "job"),
        (({}, {}), 80, "rank"),
        (({"models": [{"class": "GPT", "tensor_parallel": 2}]},) * 2, 80, "job"),
        (({"pipeline": {"ranks": [0, 1], "stages": [0]}}, {"pipeline": {"ranks": [0, 1], "stages": [1]}}), 80, "job"),
        (({"pipeline": {"ranks": [r]}} for r in (0, 1)), 160, "job"),  # two pipelines of a rank each
    ],
)
def test_which_ranks_have_batches_of_their_own(tmp_path: Path, facts: Any, per_s: float, of: str) -> None:
    t = told(tmp_path, {"samples": 8}, *facts)
    assert (t.samples_per_s, t.of) == (pytest.approx(per_s), of)
    assert bool(t.why) == (of == "rank")


def test_a_share_of_the_data_makes_an_epoch_shorter(tmp_path: Path) -> None:
    t = told(tmp_path, {"samples": 8}, shared(0), shared(1))
    assert (t.epoch_samples, t.epoch_s) == (4000, pytest.approx(25))


def test_ranks_that_count_nothing_count_as_the_others(tmp_path: Path) -> None:
    """Of a pipeline only the ends have loaders."""
    rows = [[runs.light(n, 100 * MS, n * 100 * MS, samples=s) for n in range(20)] for s in (16, -1)]
    pipe = {"pipeline": {"ranks": [0, 1], "stages": [0]}}
    path = runs.recorded(tmp_path, *((None, r, {**runs.CPU, **pipe}) for r in rows))
    assert runs.measured(path, throughput).frame(throughput).samples_per_s == pytest.approx(160)


def test_gpus_are_counted_where_each_rank_has_one(tmp_path: Path) -> None:
    t = told(tmp_path / "a", {"samples": 8}, {**runs.GPU, **shared(0)}, {**runs.GPU, **shared(1)})
    assert t.gpus == 2
    several = {**runs.GPU, "models": [{"class": "Net", "data_parallel": True}]}
    assert told(tmp_path / "b", {"samples": 8}, several).gpus is None


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
    "script": (
        """
        import dlprof
        for step in range(120):
            train((torch.randn(3, 8), torch.randn(3, 1)))
            dlprof.step(samples=30, tokens=300)
        """,
        ("script", 30, 300),
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", LOOPS)
def test_a_real_job_counts_what_it_trains_on(tmp_path: Path, name: str) -> None:
    pytest.importorskip("torch", reason="recording needs torch")
    body, (source, samples, tokens) = LOOPS[name]
    script = jobs.tiny(tmp_path, body)
    done = jobs.launch(jobs.wrapped(tmp_path / "run", [sys.executable, script], "--no-sample"), tmp_path)
    assert done.returncode == 0, done.stderr
    t = runs.measured(tmp_path / "run", throughput).frame(throughput)
    assert (t.source, t.samples_per_step, t.tokens_per_step) == (source, samples, tokens)
    assert t.samples_per_s is not None
    assert t.samples_per_s > samples  # a step takes far less than a second


def test_the_energy_of_an_epoch_is_that_of_all_gpus(tmp_path: Path) -> None:
    rows = [runs.light(n, 900 * MS, samples=8) for n in range(40)]
    facts = [{**runs.GPU, **shared(r)} for r in (0, 1)]
    path = runs.recorded(tmp_path / "run", *((None, rows, f) for f in facts))
    for rank, watts in enumerate((300, 500)):
        readings.write(path / f"ranks/{rank:05d}/gpu.jsonl", ({"power_w": watts} for _ in range(40)))
    t: Any = runs.measured(path, throughput).frame(throughput)
    assert (t.gpus, t.power_w) == (2, pytest.approx(800))
    epoch = t.epoch
    assert epoch.seconds == pytest.approx(4000 / 16 * 0.9, rel=0.01)
    assert epoch.joules == pytest.approx(800 * epoch.seconds)
    assert epoch.gpu_hours == pytest.approx(2 * epoch.seconds / 3600)
