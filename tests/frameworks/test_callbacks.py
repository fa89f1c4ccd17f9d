"""dlprof's callbacks in real trainings: what is recorded, where the verdict is logged, and that no weight differs."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

import dlprof
from tests.fixtures.jobs import environment, launch, rows

pytest.importorskip("torch", reason="recording needs torch")

TRAINER = """
import hashlib, sys, torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

set_seed(3)
data = [{"input_ids": torch.full((8,), n % 50), "labels": torch.full((8,), n % 50)} for n in range(96)]
model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=8, n_embd=16, n_layer=1, n_head=2))
trackers = [word for word in sys.argv if word in ("wandb", "mlflow", "tensorboard")]
arguments = TrainingArguments(
    "out", per_device_train_batch_size=4, num_train_epochs=1, use_cpu=True, report_to=trackers, disable_tqdm=True,
    save_strategy="no",
)
callbacks = []
if "recorded" in sys.argv:
    from dlprof.callbacks import TrainerCallback
    steps = 12 if "steps" in sys.argv else None
    callbacks = [TrainerCallback("run", steps=steps, sample="off", trace=False)]
    if "broken" in sys.argv:
        callbacks[0]._new = None
Trainer(model, arguments, train_dataset=data, callbacks=callbacks).train()
"""

LIGHTNING = """
import hashlib, sys, lightning, torch
from lightning.pytorch import loggers
from torch.utils.data import DataLoader, TensorDataset

lightning.seed_everything(3)

class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(8, 1)
    def training_step(self, batch, number):
        if "raises" in sys.argv and number == 20:
            raise RuntimeError("of the job")
        return self.net(batch[0]).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

makers = {
    "wandb": lambda: loggers.WandbLogger(offline=True), "mlflow": lambda: loggers.MLFlowLogger("of the test"),
    "tensorboard": lambda: loggers.TensorBoardLogger("out"), "csv": lambda: loggers.CSVLogger("out"),
}
callbacks = []
if "recorded" in sys.argv:
    import pickle
    from dlprof.callbacks import LightningCallback
    steps = 12 if "steps" in sys.argv else None
    # As a launcher that spawns its ranks sends them.
    callbacks = pickle.loads(pickle.dumps([LightningCallback("run", steps=steps, sample="off", trace=False)]))
    if "broken" in sys.argv:
        callbacks[0]._new = None
devices = 2 if "ranks" in sys.argv else 1
model = Net()
lightning.Trainer(
    accelerator="cpu", devices=devices, strategy="ddp" if devices > 1 else "auto", max_epochs=1, callbacks=callbacks,
    logger=[make() for name, make in makers.items() if name in sys.argv] or False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False,
).fit(model, DataLoader(TensorDataset(torch.randn(96, 8)), batch_size=4))
"""

WEIGHTS = """
print("weights", hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest())
"""

FRAMEWORKS = {"transformers": TRAINER, "lightning": LIGHTNING}
NEEDS = {"transformers": ("transformers", "accelerate"), "lightning": ("lightning",)}


@dataclass(frozen=True)
class Trained:
    """A training that has ended: its folder, its weights, and what dlprof said."""

    folder: Path
    weights: set[str]
    said: list[str]
    code: int


@pytest.fixture(scope="module", params=FRAMEWORKS)
def framework(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    for needed in NEEDS[name]:
        pytest.importorskip(needed, reason=f"{needed} is not installed")
    return name


def train(framework: str, folder: Path, *words: str) -> Trained:
    """Run a training in a folder of its own."""
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(FRAMEWORKS[framework] + WEIGHTS)
    env = environment(
        PYTHONPATH=str(Path(dlprof.__file__).parent.parent),
        HF_HUB_OFFLINE="1",
        WANDB_MODE="offline",
        MLFLOW_TRACKING_URI=(folder / "mlruns").as_uri(),
        MLFLOW_ALLOW_FILE_STORE="true",
    )
    done = launch([sys.executable, "train.py", *words], folder, env=env, timeout=240)
    weights = set(re.findall("weights (.*)", done.stdout))
    said = [line.removeprefix("dlprof: ") for line in done.stderr.splitlines() if line.startswith("dlprof: ")]
    assert (done.returncode == 0) == bool(weights), done.stderr
    return Trained(folder, weights, said, done.returncode)


@pytest.fixture(scope="module")
def plain(framework: str, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train(framework, tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def logged(framework: str, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Return a recorded training that logs to all trackers that are installed."""
    there = [name for name in ("wandb", "mlflow", "tensorboard") if find_spec(name)]
    return train(framework, tmp_path_factory.mktemp("logged"), "recorded", "csv", *there)


def optimizer_steps(folder: Path) -> int:
    return sum(row["optimizer_steps"] for row in rows(folder / "run/ranks/00000"))


@pytest.mark.slow
def test_a_recorded_training_ends_with_the_same_weights_and_its_verdict(plain: Trained, logged: Trained) -> None:
    assert plain.said == []
    assert logged.weights == plain.weights
    assert len(logged.said) in (3, 4, 5)
    assert logged.said[0].startswith("train.py · 1 × CPU · ")
    assert logged.said[-1] == f"report: {logged.folder}/run/report.html"
    assert optimizer_steps(logged.folder) == 24


def _of_wandb(folder: Path) -> tuple[dict[str, str], str]:
    (file,) = (folder / "wandb").glob("offline-run-*/*.wandb")
    data = file.read_bytes()
    figures = re.findall(rb"dlprof/(\w+)\x82\x01.(-?[\d.e-]+)", data)
    return {name.decode(): value.decode() for name, value in figures}, data.decode(errors="replace")


def _of_mlflow(folder: Path) -> tuple[dict[str, str], str]:
    (run,) = (path.parent.parent for path in folder.glob("mlruns/*/*/metrics/dlprof"))
    figures = {path.name: path.read_text().split()[1] for path in (run / "metrics/dlprof").iterdir()}
    return figures, (run / "artifacts/dlprof/verdict.md").read_text() + (run / "tags/dlprof.report").read_text()


def _of_tensorboard(folder: Path) -> tuple[dict[str, str], str]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (where,) = {path.parent for path in folder.glob("out/**/events.out.tfevents.*")}
    events = EventAccumulator(str(where))
    events.Reload()
    names = [name for name in events.Tags()["scalars"] if name.startswith("dlprof/")]
    figures = {name.removeprefix("dlprof/"): str(events.Scalars(name)[0].value) for name in names}
    assert {events.Scalars(name)[0].step for name in names} == {24}
    return figures, events.Tensors("dlprof/verdict/text_summary")[0].tensor_proto.string_val[0].decode()


READERS = {"wandb": _of_wandb, "mlflow": _of_mlflow, "tensorboard": _of_tensorboard}


@pytest.mark.slow
@pytest.mark.parametrize("tracker", READERS)
def test_the_verdict_and_its_figures_are_where_the_job_logs(tracker: str, logged: Trained) -> None:
    pytest.importorskip(tracker, reason=f"{tracker} is not installed")
    result = json.loads((logged.folder / "run/result.json").read_text())
    figures, text = READERS[tracker](logged.folder)
    waits = [part["share"] for part in result["time"] if part["category"] == "input_wait"]
    expected = {"step_ms": result["window"]["step_ns"] / 1e6, "input_wait_share": sum(waits)}
    if result["changes"]:
        expected["first_change_speedup"] = result["changes"][0]["speedup"]
    assert {name: float(figures[name]) for name in expected} == pytest.approx(expected, rel=1e-5)
    assert "train.py" in text
    assert f"{logged.folder}/run/report.html" in text


@pytest.mark.slow
@pytest.mark.parametrize("words", ["steps", "broken"])
def test_a_limit_ends_the_recording_and_a_failure_only_that(
    words: str, framework: str, plain: Trained, tmp_path: Path
) -> None:
    done = train(framework, tmp_path, "recorded", words)
    assert done.weights == plain.weights
    if words == "steps":
        assert optimizer_steps(tmp_path) == 12
        # No tracker is there.
        assert "logged nowhere" in done.said[-1]
    else:
        assert len(done.said) == 1
        assert done.said[0].startswith("the training goes on without dlprof's callback: TypeError: ")


@pytest.mark.slow
def test_the_ranks_of_lightnings_own_launcher_and_an_exception_of_the_job(tmp_path: Path) -> None:
    pytest.importorskip("lightning", reason="lightning is not installed")
    done = train("lightning", tmp_path / "ranks", "recorded", "ranks", "csv")
    assert sorted(path.name for path in (done.folder / "run/ranks").iterdir()) == ["00000", "00001"]
    assert [line for line in done.said if line.startswith("report: ")] == [f"report: {done.folder}/run/report.html"]
    (table,) = done.folder.glob("out/**/metrics.csv")
    assert "dlprof/step_ms" in table.read_text()
    done = train("lightning", tmp_path / "raises", "recorded", "raises")
    assert done.code == 1
    assert done.said == [f"`dlprof report {done.folder}/run` says where the time went until then"]
    assert json.loads((done.folder / "run/run.json").read_text())["exit"]["code"] == 1


def test_naming_the_module_imports_no_library_and_an_unknown_class_is_none() -> None:
    code = (
        "import sys, dlprof.callbacks as c\n"
        "print({'lightning', 'transformers', 'torch'} & {*sys.modules}, hasattr(c, 'Other'))"
    )
    done = launch([sys.executable, "-c", code], Path.cwd())
    assert done.stdout == "set() False\n", done.stderr
