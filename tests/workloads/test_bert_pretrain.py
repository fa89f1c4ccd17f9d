"""The masked language model: it learns with every optimizer, and a fault costs time, not accuracy."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from dlprof.analysis.rules import RULES

SCRIPT = Path(__file__).parents[2] / "workloads" / "bert_pretrain.py"
TINY = ["--device=cpu", "--width=32", "--length=20", "--batch-size=16", "--layers=1", "--vocabulary=301"]
TINY += ["--log-every=10", "--warmup=2", "--lr=0.01"]


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bert_pretrain", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


workload = load()


def train(*options: str, ranks: int = 1) -> list[float]:
    """Run the script as a user would, on CPU ranks, and give the losses that it printed."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    done = subprocess.run(
        [sys.executable, *launcher, str(SCRIPT), *TINY, *options],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [float(x) for x in re.findall(r"loss (\S+)", done.stdout)]


def test_it_learns_and_a_loop_over_the_parameters_changes_nothing_but_the_time() -> None:
    healthy = train("--steps=100")
    assert len(healthy) == 10
    assert healthy[-1] < 0.9 * healthy[0]
    assert train("--steps=100", "--fault=loop_optimizer") == pytest.approx(healthy, rel=1e-2)


@pytest.mark.slow
def test_exchanging_gradients_of_every_batch_gives_what_exchanging_them_once_gives() -> None:
    healthy = train("--steps=40", ranks=2)
    assert train("--steps=40", "--fault=sync_every_batch", ranks=2) == pytest.approx(healthy, rel=1e-2)


@pytest.mark.slow
def test_lamb_learns() -> None:
    found = train("--steps=100", "--optimizer=lamb", "--lr=0.02")
    assert found[-1] < found[0] - 0.1


def test_lamb_scales_each_layers_step_to_its_weights() -> None:
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(3, 2))
    optimizer = workload.Lamb([weight], lr=0.1, weight_decay=0.5)
    w, gradients = weight.detach().clone(), [torch.randn(3, 2), torch.randn(3, 2)]
    mean, square = torch.zeros_like(w), torch.zeros_like(w)
    for n, gradient in enumerate(gradients, 1):
        weight.grad = gradient.clone()
        optimizer.step()
        # The paper's equations.
        mean, square = 0.9 * mean + 0.1 * gradient, 0.999 * square + 0.001 * gradient**2
        step = (mean / (1 - 0.9**n)) / ((square / (1 - 0.999**n)).sqrt() + 1e-6) + 0.5 * w
        w = w - 0.1 * w.norm() / step.norm() * step
    torch.testing.assert_close(weight.detach(), w)


def test_hidden_words_are_where_it_says_and_as_many_in_each_sentence() -> None:
    torch.manual_seed(0)
    text = workload.make_text(64, 40, 301, seed=1)
    assert ((text - 1) // 15 == (text[:, :1] - 1) // 15).all()  # one topic of 15 words a sentence
    tokens, places, words = workload.Masking(301, 40)(list(text))
    assert places.shape == (64, 6)
    torch.testing.assert_close(text.gather(1, places), words)
    torch.testing.assert_close(tokens.scatter(1, places, words), text)
    assert 0.7 < (tokens.gather(1, places) == workload.MASK).float().mean() < 0.9
    assert (tokens == workload.MASK).sum() == (tokens.gather(1, places) == workload.MASK).sum()


def test_a_mask_picks_the_same_words_as_their_places() -> None:
    torch.manual_seed(0)
    model = workload.Encoder(301, 20, 32, 4, 1).eval()
    tokens, places, _ = workload.Masking(301, 20)(list(workload.make_text(4, 20, 301, seed=1)))
    mask = torch.zeros_like(tokens, dtype=torch.bool).scatter_(1, places, True)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens, mask), model(tokens, places))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--fault=boolean_mask",), "needs a GPU"),
        (("--fault=sync_every_batch",), "needs two ranks"),
        (("--precision=tf32",), "needs a GPU"),
        (("--heads=5",), "cannot be shared out among 5 heads"),
        (("--vocabulary=200",), "too few for the words of 20 topics"),
        (("--accumulate=0",), "one batch at least"),
    ],
)
def test_what_cannot_be_is_a_usage_error(
    options: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit) as stopped:
        workload.parse([*TINY, *options])
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


def test_every_fault_names_a_rule_and_is_listed() -> None:
    assert set(workload.FAULTS.values()) <= {rule.id for rule in RULES}
    assert set(re.findall(r'args\.fault [!=]= "(\w+)"', SCRIPT.read_text())) == set(workload.FAULTS)
    readme = (SCRIPT.parent / "README.md").read_text()
    assert all(f"`{fault}`" in readme for fault in workload.FAULTS)
