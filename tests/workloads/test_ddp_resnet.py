"""The DDP ResNet workload: the model is the paper's, the data are real files, and a fault costs time, not accuracy."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

SCRIPT = Path(__file__).parents[2] / "workloads" / "ddp_resnet.py"
TINY = [
    "--device=cpu",
    "--images=320",
    "--batch-size=16",
    "--epochs=2",
    "--log-every=1",
    "--read-ms=0",
    "--optimizer=adamw",
    "--lr=0.003",
]


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ddp_resnet", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


workload = load()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


def train(data: Path, *options: str, ranks: int = 1, script: Path = SCRIPT) -> subprocess.CompletedProcess[str]:
    """Run the script as a user would, on CPU ranks; give what it printed and its exit code."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    return subprocess.run(
        [sys.executable, *launcher, str(script), *TINY, "--data", str(data), *options],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def losses(done: subprocess.CompletedProcess[str]) -> list[float]:
    assert done.returncode == 0, done.stdout + done.stderr
    return [float(x) for x in re.findall(r"loss (\S+)", done.stdout)]


@pytest.mark.parametrize(
    ("name", "parameters"),
    [  # as published with the models' weights in torchvision
        ("alexnet", 61_100_840),
        ("resnet18", 11_689_512),
        ("resnet34", 21_797_672),
        ("resnet50", 25_557_032),
        ("resnet101", 44_549_160),
        ("resnet152", 60_192_808),
        ("vgg19", 143_667_240),
    ],
)
def test_models_have_the_published_number_of_parameters(name: str, parameters: int) -> None:
    with torch.device("meta"):
        model = workload.build_model(name, classes=1000, small=False)
        assert model(torch.empty(2, 3, 224, 224)).shape == (2, 1000)
    assert sum(p.numel() for p in model.parameters()) == parameters


def test_resnet20_has_the_papers_size() -> None:
    with torch.device("meta"):
        model = workload.build_model("resnet20", classes=10, small=True)
        assert model(torch.empty(2, 3, 32, 32)).shape == (2, 10)
    # The paper's table 6 says 0.27 M, with shortcuts that have no weights. Ours are 1×1 projections: 2,752 more.
    assert sum(p.numel() for p in model.parameters()) == 269_722 + (16 * 32 + 2 * 32) + (32 * 64 + 2 * 64)


@pytest.mark.parametrize("name", ["alexnet", "vgg19"])
def test_models_take_small_pictures_too(name: str) -> None:
    with torch.device("meta"):
        assert workload.build_model(name, classes=10, small=True)(torch.empty(2, 3, 32, 32)).shape == (2, 10)


def test_lars_scales_each_layers_step_to_its_weights() -> None:
    model = torch.nn.Linear(3, 2)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = workload.Lars(model, lr=2.0, momentum=0.9, weight_decay=0.1)
    gradients = [torch.randn_like(p) for p in before]
    for _ in range(2):
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    # The paper's equations, a layer at a time; its velocity holds the rate, which is the same in both steps.
    w, b = before
    velocity = torch.zeros_like(w)
    for _ in range(2):
        local = 0.001 * w.norm() / (gradients[0].norm() + 0.1 * w.norm())
        velocity = 0.9 * velocity + 2.0 * local * (gradients[0] + 0.1 * w)
        w = w - velocity
    torch.testing.assert_close(model.weight.detach(), w)
    torch.testing.assert_close(model.bias.detach(), b - 2.0 * (1 + 1.9) * gradients[1])


def test_the_drawn_pictures_come_back_as_they_were(tmp_path: Path) -> None:
    folder = workload.make_pictures(tmp_path, "imagenet", 6)
    pictures = workload.Pictures(folder / "train", "imagenet", False, 0.0, workload.unchanged)
    for index, file in enumerate(pictures.files):
        pixels = workload.draw_picture("imagenet", index, np.random.default_rng([False, index]))
        assert pixels.shape[0] >= 350
        assert pixels.std() > 10
        np.testing.assert_array_equal(np.array(Image.open(file)), pixels)


def test_the_pictures_are_those_that_older_results_were_recorded_with() -> None:
    drawn = b"".join(workload.draw_picture("cifar", n, np.random.default_rng([0, n])).tobytes() for n in range(10))
    assert hashlib.sha256(drawn).hexdigest() == "ee55bcfac7fc0d48815aa11c526281b9a71cf372670543e88a3dbf82655cb541"


def test_damaged_pictures_are_refused(tmp_path: Path) -> None:
    folder = workload.make_pictures(tmp_path, "cifar", 4)
    pictures = workload.Pictures(folder / "train", "cifar", True, 0.0, workload.unchanged)
    whole = pictures.files[0].read_bytes()
    for damaged in (b"GIF89a" + whole, whole[:-200], whole[:40], whole[:60] + bytes([whole[60] ^ 1]) + whole[61:]):
        pictures.files[0].write_bytes(damaged)
        with pytest.raises((OSError, SyntaxError)):
            pictures[0]


def test_what_is_missing_without_pillow_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(SystemExit, match=r"needs Pillow: pip install pillow"):
        workload.make_pictures(tmp_path, "cifar", 4)


def test_pictures_are_the_same_wherever_they_are_made(tmp_path: Path) -> None:
    folders = [workload.make_pictures(tmp_path / name, "cifar", 40) for name in ("a", "b")]
    files = [sorted(p.relative_to(folder) for p in folder.rglob("*.png")) for folder in folders]
    assert files[0] == files[1]
    assert len(files[0]) == 40 + 5
    contents = [[(folder / file).read_bytes() for file in files[0]] for folder in folders]
    assert contents[0] == contents[1]
    assert len(set(contents[0])) == 45


@pytest.mark.parametrize(("dataset", "size"), [("cifar", 32), ("imagenet", 224)])
@pytest.mark.parametrize("training", [True, False])
def test_samples_have_one_shape(tmp_path: Path, dataset: str, size: int, training: bool) -> None:
    folder = workload.make_pictures(tmp_path, dataset, 6)
    pictures = workload.Pictures(folder / "train", dataset, training, 0.0, workload.unchanged)
    assert [label for _, label in pictures] == list(range(6))
    assert {(tuple(pixels.shape), pixels.dtype) for pixels, _ in pictures} == {((size, size, 3), torch.uint8)}


def test_augmentation_changes_training_pictures_only(tmp_path: Path) -> None:
    folder = workload.make_pictures(tmp_path, "cifar", 6)
    torch.manual_seed(0)
    for training, versions in ((True, 8), (False, 1)):
        pictures = workload.Pictures(folder / "train", "cifar", training, 0.0, workload.unchanged)
        assert len({pictures[0][0].numpy().tobytes() for _ in range(8)}) == versions


def test_interrupted_drawing_is_done_again(tmp_path: Path) -> None:
    code = f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r}); import ddp_resnet as d; from pathlib import Path;"
    code += f"d.make_pictures(Path({str(tmp_path)!r}), 'cifar', 4000)"
    partial, folder = tmp_path / "cifar-4000.partial", tmp_path / "cifar-4000"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL) as drawing:
        while not any(partial.rglob("*.png")):
            assert drawing.poll() is None
            time.sleep(0.01)
        drawing.kill()
    assert not folder.exists()
    (partial / "train" / "0000").mkdir(exist_ok=True)
    (partial / "train" / "0000" / "999999.png").write_bytes(b"half a pic")

    workload.make_pictures(tmp_path, "cifar", 4000)
    assert not partial.exists()
    files = list(folder.rglob("*.png"))
    assert len(files) == 4500
    assert all(np.array(Image.open(file)).shape == (32, 32, 3) for file in files)


def test_drawn_pictures_are_not_drawn_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workload.make_pictures(tmp_path, "cifar", 8)
    assert "drawing" in capsys.readouterr().out
    workload.make_pictures(tmp_path, "cifar", 8)
    assert capsys.readouterr().out == ""


@pytest.fixture(scope="module")
def healthy(data: Path) -> list[float]:
    """The losses of two ranks that also draw the pictures: one does, the other waits."""
    return losses(train(data, ranks=2))


def test_two_ranks_learn(healthy: list[float]) -> None:
    assert len(healthy) == 20
    assert all(math.isfinite(loss) for loss in healthy)
    assert sum(healthy[-3:]) < 0.6 * sum(healthy[:3])


@pytest.mark.long
@pytest.mark.parametrize("fault", ["blocking_allreduce", "slow_loader_one_rank", "slow_rank"])
def test_fault_of_two_ranks_costs_time_and_not_accuracy(data: Path, healthy: list[float], fault: str) -> None:
    done = train(data, "--fault", fault, "--steps", "6", ranks=2)
    assert f"fault: {fault}" in done.stdout
    assert losses(done) == pytest.approx(healthy[:6], rel=0.02)


@pytest.mark.long
def test_gradients_are_exchanged_once_for_the_batches_that_are_added_up(data: Path, tmp_path: Path) -> None:
    options = ["--accumulate=2", "--hook=fp16", "--find-unused", "--optimizer=lars", "--lr=2", "--steps=6"]
    job = tmp_path / "counts.py"
    job.write_text(
        f"""
import os, runpy, sys
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
compress, calls = default_hooks.fp16_compress_hook, []
def counted(state, bucket):
    calls.append(bucket.is_last())
    return compress(state, bucket)
counted.__annotations__ = compress.__annotations__
default_hooks.fp16_compress_hook = counted
sys.argv = {[str(SCRIPT), *TINY, "--data", str(data), *options]!r}
runpy.run_path(sys.argv[0], run_name="__main__")
with open(f"{tmp_path}/" + os.environ["RANK"], "w") as file:
    file.write(str(sum(calls)))
"""
    )
    done = train(data, *options, ranks=2, script=job)
    assert len(losses(done)) == 6
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["3", "3"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [("--hook=powersgd", "--steps=16"), ("--model=alexnet", "--steps=3"), ("--model=vgg19", "--steps=3")]
)
def test_other_hooks_and_models_train_on_two_ranks(data: Path, options: tuple[str, ...]) -> None:
    found = losses(train(data, *options, ranks=2))
    assert all(math.isfinite(loss) for loss in found)


@pytest.mark.long
def test_one_process_trains_validates_and_checkpoints(data: Path) -> None:
    done = train(data, "--validate-every", "10", "--checkpoint-every", "20", "--epochs", "1")
    assert len(losses(done)) == 20
    assert len(re.findall(r"validation accuracy [01]\.\d+", done.stdout)) == 2
    saved = torch.load(data / "checkpoint.pt", weights_only=True)
    assert saved["step"] == 20
    workload.build_model("resnet20", classes=10, small=True).load_state_dict(saved["model"])


@pytest.mark.long
@pytest.mark.parametrize(
    "fault", ["checkpoint_every_few", "garbage", "keeps_batches", "no_workers", "python_metrics", "slow_decode"]
)
def test_fault_of_one_process_runs(data: Path, fault: str) -> None:
    done = train(data, "--fault", fault, "--steps", "6")
    assert len(losses(done)) == 6
    assert f"{0 if fault == 'no_workers' else 1} workers, fault: {fault}" in done.stdout


@pytest.mark.parametrize(
    ("fault", "needs"),
    [
        *((fault, "needs a GPU") for fault in workload.NEEDS_GPU),
        *((fault, "needs two ranks") for fault in workload.NEEDS_TWO_RANKS),
    ],
)
def test_fault_that_cannot_be_shown_here_is_a_usage_error(
    fault: str, needs: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(SystemExit) as exit_:
        workload.parse(["--device", "cpu", "--fault", fault])
    assert exit_.value.code == 2
    assert needs in capsys.readouterr().err


def test_help_names_every_fault_and_its_rule(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        workload.parse(["--help"])
    text = capsys.readouterr().out
    for fault, rule in workload.FAULTS.items():
        assert re.search(rf"^ *{fault} .*{rule}$", text, re.MULTILINE)


@pytest.mark.parametrize("fault", workload.FAULTS)
def test_every_fault_is_planted_by_other_settings(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("WORLD_SIZE", "2"), ("RANK", "1"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    device = "cuda" if fault in workload.NEEDS_GPU else "cpu"

    def settings(*options: str) -> dict[str, Any]:
        args = workload.parse(["--device", device, *options])
        workload.plant(args)
        return {n: getattr(v, "__code__", v) for n, v in vars(args).items() if n != "fault"}

    assert settings() == settings()
    assert settings("--fault", fault) != settings()


def test_faults_are_planted_in_one_place() -> None:
    functions = [node for node in ast.parse(SCRIPT.read_text()).body if isinstance(node, ast.FunctionDef)]
    named = {f.name for f in functions for n in ast.walk(f) if isinstance(n, ast.Attribute) and n.attr == "fault"}
    # Which of them needs what is checked with the options, and main() prints its name.
    assert named == {"plant", "parse", "main"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("options", [[], ["--precision", "fp16"], ["--fault", "pageable"]])
def test_gpu_trains(data: Path, options: list[str]) -> None:
    done = train(data, "--device", "cuda", *options)
    assert len(losses(done)) == 40
