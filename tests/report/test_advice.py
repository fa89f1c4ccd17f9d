"""Advice held against recordings: what it is about, whether it would help, and what is said of what nobody knows."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from benchmarks.gpu.fixtures import unpack
from dlprof.analysis.diagnosis import diagnose
from dlprof.analysis.rules import RULES
from dlprof.cli import cli
from dlprof.overrides import OVERRIDES
from dlprof.read.run import open_run
from dlprof.report.advice import Advice, Recorded, judge, render
from dlprof.result import Result
from dlprof.result.stored import from_json
from dlprof.result.tried import Attempt, Gain, Tried
from dlprof.trial.planning import named
from tests.fixtures import results
from tests.fixtures.jobs import record, tiny
from tests.fixtures.places import ROOT

LOADER = ROOT / "reports" / "2-cpu-cores" / "ddp_resnet-slow_loader_one_rank" / "result.json"
GPU = next((ROOT / "reports" / "gpu" / "h100-2").glob("*.tar.gz"))

# An H100 on which a convolutional network is not in channels_last, and a job on two cores that waits for one worker.
CASES = [
    ("conv_layout", "use channels_last", "model.memory_format", "channels_last", "yes"),
    ("conv_layout", "switch the model to NHWC!", "model.memory_format", "channels_last", "yes"),
    ("conv_layout", "don't use channels_last", "model.memory_format", "contiguous_format", "already"),
    ("conv_layout", "bf16", "torch.autocast", "bf16", "already"),
    ("conv_layout", "mixed precision with float16", "torch.autocast", "fp16", "no"),
    ("conv_layout", "turn on TF32", "torch.float32_matmul_precision", "high", "no"),
    ("conv_layout", "use fused adam", "optimizer.fused", True, "no"),
    ("conv_layout", "torch.compile", "torch.compile", "default", "unknown"),
    ("conv_layout", "torch.compile with max-autotune", "torch.compile", "max-autotune", "unknown"),
    ("conv_layout", "CUDA graphs", "torch.compile", "reduce-overhead", "no"),
    ("conv_layout", "disable torch.compile", "torch.compile", "off", "already"),
    ("conv_layout", "bigger batch", "batch size", None, "no"),
    ("conv_layout", "gradient checkpointing", "recomputation", None, "no"),
    ("conv_layout", "flash attention", "fused attention", None, "no"),
    ("conv_layout", "fused layer norm", "fused kernels", None, "no"),
    ("conv_layout", "num_workers 8", "loader.num_workers", 8, "no"),
    ("conv_layout", "pin memory", "loader.pin_memory", True, "no"),
    ("conv_layout", "non_blocking=True", "copy.non_blocking", True, "no"),
    ("conv_layout", "avoid .item() in the loop", "waits for the device", None, "no"),
    ("conv_layout", "gc.freeze()", "gc.freeze", True, "no"),
    ("conv_layout", "disable garbage collection", "gc.enabled", False, "no"),
    ("conv_layout", "cudnn.benchmark = True", "torch.cudnn_benchmark", True, "unknown"),
    ("conv_layout", "turn off anomaly mode", "anomaly_mode", None, "no"),
    ("conv_layout", "an embedding instead of one-hot rows", "one_hot_input", None, "no"),
    ("conv_layout", "compress gradients to bf16", "ddp.comm_hook", "bf16", "no"),
    ("conv_layout", "bucket_cap_mb=100", "ddp.bucket_cap_mb", 100.0, "no"),
    ("loader", "num_workers=2", "loader.num_workers", 2, "yes"),
    ("loader", "you need 2 workers", "loader.num_workers", 2, "yes"),
    ("loader", "more workers", "loader.num_workers", None, "yes"),
    ("loader", "num_workers 1", "loader.num_workers", 1, "already"),
    ("loader", "prefetch_factor 4", "loader.prefetch_factor", 4, "perhaps"),
    ("loader", "keep the workers alive", "loader.persistent_workers", True, "already"),
    ("loader", "spawn the workers", "loader.multiprocessing_context", "spawn", "no"),
    ("loader", "open the hdf5 file once per worker", "hdf5_opened", None, "perhaps"),
    ("loader", "read the CSV once, before training", "csv_parsed", None, "perhaps"),
    ("loader", "OMP_NUM_THREADS=4", "env.OMP_NUM_THREADS", "4", "no"),
    ("loader", "validate less often", "validation", None, "no"),
    ("loader", "no_sync while accumulating", "gradient accumulation", None, "no"),
    ("loader", "find_unused_parameters=False", "ddp.find_unused_parameters", False, "already"),
]
UNKNOWN = [
    ("num_wrokers 8", "num_workers"),
    ("warm the learning rate up", None),
    ("buy a larger machine", None),
    ("prefech_factor", "prefetch_factor"),
]


@cache
def result_of(name: str) -> Result:
    if name == "loader":
        return from_json(json.loads(LOADER.read_text()))
    with TemporaryDirectory() as folder:
        unpack(GPU, Path(folder))
        return diagnose(open_run(Path(folder) / f"advice-{name}"), RULES, jobs=1)


def judged(text: str, result: Result) -> Advice:
    return judge(text, Recorded(result, "runs/a", named, lambda _settings: ("", "")))


@pytest.mark.parametrize(("run", "text", "what", "value", "helps"), CASES)
def test_advice_is_about_a_setting_or_a_rule_and_helps_or_not(
    run: str, text: str, what: str, value: object, helps: str
) -> None:
    found = judged(text, result_of(run))
    assert [(one.what, one.value, one.helps) for one in found.items[:1]] == [(what, value, helps)]
    assert found.unknown == () or run == "loader"
    (one, *_) = found.items
    assert one.why
    assert (one.measure == "") is (helps == "already")
    assert one.numerics is any(o.name == what and o.numerics for o in OVERRIDES) or value is None


@pytest.mark.parametrize(("text", "near"), UNKNOWN)
def test_what_is_not_known_is_said_with_what_is_near(text: str, near: str | None) -> None:
    found = judged(text, result_of("loader"))
    assert (found.items, found.unknown) == ((), (text,))
    assert near is None or near in found.near
    assert f"not known: {text}" in render(found)


def test_each_clause_is_judged_for_itself() -> None:
    found = judged("use 2 workers and pin_memory, but don't compile; then frobnicate", result_of("loader"))
    assert [(one.what, one.value) for one in found.items] == [
        ("loader.num_workers", 2),
        ("loader.pin_memory", True),
        ("torch.compile", "off"),
    ]
    assert found.unknown == ("frobnicate",)


def test_the_commands_are_those_that_measure_it() -> None:
    each = judged("bf16, num_workers=2, more threads, bigger batch", result_of("loader")).items
    half, workers, threads, batch = (one.measure for one in each)
    assert half == "dlprof try runs/a --only --set torch.autocast=bf16 --allow-numerics"
    assert workers == "dlprof try runs/a --only --set loader.num_workers=2"
    assert threads.startswith("dlprof sweep torch.num_threads=1,2,4 -- ")
    assert batch.endswith("dlprof compare runs/a AFTER")
    assert (each[0].numerics, each[1].numerics, each[3].training) == (True, False, True)
    traces = replace(result_of("loader"), run=replace(result_of("loader").run, command=()))
    assert judged("bf16", traces).items[0].measure.startswith("record the job first")


@pytest.mark.parametrize(("verdict", "helps"), [("gain", "yes"), ("slower", "no"), ("unclear", "yes")])
def test_a_trial_counts_more_than_a_prediction(verdict: str, helps: str) -> None:
    settings = {"loader.num_workers": 2, "loader.persistent_workers": True}
    ratio = {"gain": 1.4, "slower": 0.7, "unclear": 1.0}[verdict]
    attempt = Attempt(settings, verdict, measured=Gain(ratio, ratio - 0.01, ratio + 0.01))  # type: ignore[arg-type]
    result = replace(result_of("loader"), tried=Tried("complete", (attempt,)))
    (one,) = judged("num_workers=2", result).items
    assert one.helps == helps
    assert ("measured" in one.why) is (verdict != "unclear")
    (other,) = judged("num_workers=3", result).items
    assert "measured" not in other.why


def test_advice_against_a_finding_does_not_help() -> None:
    result = results.ddp()  # its first finding advises num_workers 2 → 6
    found = {text: judged(text, result).items[0].helps for text in ("6 workers", "4 workers", "more workers")}
    assert found == {"6 workers": "yes", "4 workers": "perhaps", "more workers": "yes"}
    assert judged("fewer workers", result).items[0].helps == "unknown"  # no rule of this result judges that
    assert judged("stop prefetching", result).items[0].helps == "no"


@pytest.mark.long
def test_the_command_says_where_it_goes_and_hostile_words_are_harmless(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="recording needs torch")
    script = tiny(tmp_path, "for batch in DataLoader(data, batch_size=4, num_workers=0):\n    train(batch)\n")
    record(script, folder=tmp_path / "run", options=("--no-sample", "--no-trace"))
    run = str(tmp_path / "run")
    done = CliRunner().invoke(cli, ["check-advice", run, "use", "2", "workers\x1b[m", "--format", "json", "--quiet"])
    assert done.exit_code == 0, done.output
    (one,) = json.loads(done.stdout)["items"]
    line = next(n for n, text in enumerate(script.read_text().splitlines(), 1) if "num_workers=0" in text)
    assert one["at"] == f"{script.name}:{line}"
    assert "+for batch in DataLoader(data, batch_size=4, num_workers=2):" in one["diff"]
    done = CliRunner().invoke(cli, ["check-advice", run, "frob\x1b[31m", "--quiet"])
    assert (done.exit_code, "\x1b" in done.stdout) == (0, False)
    assert CliRunner().invoke(cli, ["check-advice", str(tmp_path / "none"), "bf16"]).exit_code == 1
