"""Convolutions in NCHW: what their kernels show, what NHWC would take, and where it would not pay."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from textwrap import indent
from typing import Any

import numpy as np
import pytest

from dlprof.analysis.compute.layouts import nchw, passes_in_nhwc
from dlprof.analysis.compute.rules import memory_format
from dlprof.analysis.diagnosis import diagnose
from dlprof.analysis.estimate import Rule
from dlprof.analysis.rules import RULES
from dlprof.analysis.source.patches import calls_of
from dlprof.read.run import open_run
from tests.fixtures import runs, traces
from tests.fixtures.asking import ask
from tests.fixtures.jobs import facts, record
from tests.fixtures.places import TRACES
from tests.fixtures.readings import SECOND
from tests.fixtures.ruled import Case, check, clear, found, inapplicable, jobs, table, unmeasured
from tests.fixtures.runs import MS

A100 = "NVIDIA A100-SXM4-80GB"  # 2,039 GB/s
H200 = TRACES / "h200"

IMAGES = ([64, 64, 56, 56], [64, 64, 56, 56], [64, 64, 3, 3])  # a convolution's output, input and weight
NORM = "void at::native::batch_norm_{}_kernel<c10::BFloat16, float, float, int>"
TO_NHWC = "void cudnn::engines_precompiled::nchwToNhwcKernel<__nv_bfloat16, __nv_bfloat16, float, false, true>"
TO_NCHW = "void cudnn::engines_precompiled::nhwcToNchwKernel<__nv_bfloat16, __nv_bfloat16, float, true, false>"
ON_TENSOR_CORES = "sm80_xmma_dgrad_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x64"


@pytest.mark.parametrize(
    ("name", "passes"),
    [
        (TO_NHWC, 0),
        (TO_NCHW, 0),
        (NORM.format("collect_statistics"), 1),
        (NORM.format("transform_input"), 2),
        (NORM.format("backward_reduce"), 2),
        (NORM.format("backward_elemt"), 3),
        (NORM.format("backward"), 5),
        (NORM.format("transform_input_channels_last"), math.nan),
        (NORM.format("backward_elemt_channels_last"), math.nan),
        ("void cudnn::bn_fw_tr_1C11_kernel_NCHW<float, float, int, 512, true, 1, true>", math.nan),
        (ON_TENSOR_CORES, math.nan),
        ("void at::native::(anonymous namespace)::max_pool_backward_nchw<c10::BFloat16, float, int>", math.nan),
    ],
)
def test_what_stands_for_a_kernel_in_nhwc(name: str, passes: float) -> None:
    np.testing.assert_equal(passes_in_nhwc(name), passes)


def test_the_costs_are_those_of_a_mean_step(tmp_path: Path) -> None:
    """Two steps, of which the second has a conversion more; what was launched before the first counts in none."""
    images = ([8, 16, 32, 32], [8, 16, 32, 32], [16, 16, 3, 3])
    events = [traces.launched(TO_NHWC, -10_000, 0, 10_000, 99)]
    for n in range(2):
        at, c = n * 2 * MS, 5 * n
        convolves = ("aten::convolution_backward", at, ON_TENSOR_CORES, at + 20_000, MS // 2, c + 1)
        converts = [
            traces.launched(TO_NHWC, at + 40_000 + k, at + MS + 300_000, 10_000, c + 3 + k) for k in range(n + 1)
        ]
        events += [[traces.step(n, at, 2 * MS)], traces.product(*convolves, *images, dtype="half"), *converts]
        events += [traces.launched(NORM.format("collect_statistics"), at + 30_000, at + MS, 200_000, c + 2)]
    (row,) = runs.rank_of(tmp_path, traces.trace(*events)).once(nchw).to_dict("records")
    assert (row["norm_ns"], row["convert_ns"], row["dimensions"], row["against"]) == (200_000, 15_000, 4, "")
    # One pass over 131,072 elements, on an H100 of 3.35 TB/s.
    assert row["left_ns"] == pytest.approx(131_072 * 4 / (0.8 * 3350) + 18_000 / 8)


# Operator, kernel and ns of each kernel of a step, in order.
Work = Sequence[tuple[str, str, int]]
CONVOLUTION: Work = [  # the longest first: the host is ahead of what follows
    ("aten::convolution_backward", ON_TENSOR_CORES, 2 * MS),
    ("aten::convolution_backward", TO_NHWC, MS // 2),
    ("aten::convolution_backward", TO_NCHW, MS // 2),
]
NORMS: Work = [
    ("aten::native_batch_norm", NORM.format("collect_statistics"), MS),
    ("aten::native_batch_norm", NORM.format("transform_input"), MS // 2),
    ("aten::native_batch_norm_backward", NORM.format("backward"), 2 * MS),
]
BOTH: Work = (*CONVOLUTION, *NORMS)
LAUNCH = 30_000  # from one to the next: so much the replay may wait for one


def trained(
    folder: Path, work: Work = BOTH, shapes: Sequence[list[int]] = IMAGES, device: str = A100, **facts: Any
) -> Path:
    """Write four steps in which a host launches some kernels and waits for them."""
    events: list[Any] = []
    at = correlation = 0
    for n in range(4):
        begin = start = at + LAUNCH
        for operator, kernel, dur in work:
            told = shapes if operator == "aten::convolution_backward" else ()
            events += traces.product(operator, at, kernel, start, dur, correlation, *told, dtype="c10::BFloat16")
            at, start, correlation = at + LAUNCH, start + dur, correlation + 1
        events += [traces.call("cudaStreamSynchronize", at, start - at, 10_000 + n)]
        events += [traces.step(n, begin - LAUNCH, start - begin + LAUNCH)]
        at = start
    made = traces.trace(*events, world_size=1, device=device)
    of_gpu = {"device": {"type": "cuda", "name": device}, **facts}
    return runs.recorded(folder / "run", (made, [], of_gpu)) if facts else runs.foreign(folder, made)


CPU_WORK = {
    "aten::mkldnn_convolution": 200 * MS,
    "aten::native_batch_norm": 100 * MS,
    "aten::native_batch_norm_backward": 50 * MS,
    "aten::max_pool2d_with_indices": 30 * MS,
    "aten::max_pool2d_with_indices_backward": 10 * MS,
    "aten::convolution_backward": 300 * MS,
}


def computed(folder: Path, kernel: int) -> Path:
    """Record a CPU's 40 steps of 900 ms, of which 4 are traced: CPU_WORK once each, with a weight of 1,024² kernels."""
    events: list[Any] = []
    for n in range(10, 14):
        events.append(traces.step(n, at := n * SECOND, 900 * MS))
        for name, dur in CPU_WORK.items():
            backward = name == "aten::convolution_backward"
            dims = [*IMAGES[:2], [1024, 1024, kernel, kernel]]
            args = {"Input Dims": dims, "Input type": ["float"] * 3} if backward else {}
            events.append(traces.op(name, at, dur, **args))
            at += dur + 1_000
    log = [runs.light(n, 900 * MS, profiled=int(10 <= n < 14)) for n in range(40)]
    made = traces.trace(*events, world_size=1, backend="gloo", device="")
    return runs.recorded(folder / "run", (made, log, runs.CPU))


ELEMENTS = 64 * 64 * 56 * 56


def left(passes: float) -> float:
    """Return what so many passes over an activation take in NHWC on an A100, ns."""
    return passes * (ELEMENTS * 4 / (0.8 * 2039e9) * 1e9 + 18_000 / 8)


def near(job: Any, ns: float, *says: str, **more: Any) -> Case:
    return found(job, ns, *says, sharp=2 * LAUNCH / ns, **more)


ALL = 4.5 * MS - left(8)
SMALLER, VOLUMES = [64, 64, 28, 28], ([4, 64, 16, 56, 56], [4, 64, 16, 56, 56], [64, 64, 3, 3, 3])
GROUPED, DEPTHWISE = (*IMAGES[:2], [64, 8, 3, 3]), (*IMAGES[:2], [64, 1, 3, 3])
WIDER = [64, 32, 112, 112]
TRANSPOSED, GROUPED_TRANSPOSED = (WIDER, IMAGES[0], [64, 32, 2, 2]), (WIDER, IMAGES[0], [64, 4, 2, 2])
ON_FLOAT32 = [(op, name.replace(ON_TENSOR_CORES, "ampere_scudnn_128x64_relu"), ns) for op, name, ns in CONVOLUTION]
IN_NHWC = [(op, name.replace("_kernel", "_channels_last_kernel"), ns) for op, name, ns in NORMS]
ALONE = CONVOLUTION[:1]
GROUP_NORM, OWN_NORM = ("aten::native_group_norm", "norm", MS), ("aten::cudnn_batch_norm", "bn_fw_tr_kernel_NCHW", MS)

# What the script calls, and how the change of its model and of its inputs reads.
TO = ".to(memory_format=torch.channels_last)"
AT = {"file": "train.py", "torch": True}


def called(kind: str, line: int, source: str, text: str = "", **more: Any) -> dict[str, Any]:
    """Return a call as the facts have it: `text` of a line."""
    at = source.index(text)
    return {
        **AT,
        "kind": kind,
        "line": line,
        "source": source,
        "column": at,
        "end_column": at + len(text or source),
    } | more


RUNS = called("forward", 18, "loss = f(self.net(batch[0]), y)", "self.net(batch[0])", takes=[4])
MADE = called("model", 8, "self.net.to(device)", whole=True)
GIVEN = called("optimizer", 9, "optimizer = SGD(net.parameters(), lr=0.1)", "SGD(net.parameters(), lr=0.1)")
OTHER = called("optimizer", 7, "SGD(critic.parameters())")
NONE = f"`{TO}` of the model, before the optimizer is made, and of each batch of images"
BEFORE = NONE.replace("made,", "made at train.py:{},")
FOR_IT = f"{NONE} (the model is called at train.py:18)"
IMAGES_ALONE = (
    f"`{TO}` of the model, before the optimizer is made, and append it to `batch[0]` in `self.net(batch[0])` at"
)


def lines(advice: str, *calls: dict[str, Any]) -> Case:
    facts: Any = {"models": [{"channels_last": False}], "calls": calls}
    return found(gpu(**facts), None, advice)


gpu, cpu = jobs(trained), jobs(computed)
CASES = {
    "norms and conversions": near(
        trained, ALL, noise=0.1 * left(8), settings=[[("memory_format", "contiguous_format", "channels_last")]]
    ),
    "conversions alone": near(gpu(CONVOLUTION), MS),
    "the forward pass alone": near(gpu((*CONVOLUTION, *NORMS[:2])), 2.5 * MS - left(3)),
    # A norm before each convolution, which reads four times what that writes.
    "norms of what is read": near(gpu(shapes=(SMALLER, *IMAGES[1:])), ALL),
    # What NHWC needs for these is more than they take now.
    "norms that gain nothing": near(gpu([*CONVOLUTION, *((op, name, 10_000) for op, name, _ in NORMS)]), MS),
    "volumes": near(gpu(shapes=VOLUMES), ALL, "torch.channels_last_3d"),
    "unknown bandwidth": near(gpu(device="NVIDIA Some GPU 9"), MS, "gains is not known"),
    "depthwise": found(gpu(shapes=DEPTHWISE)),
    "transposed": found(gpu(shapes=TRANSPOSED)),
    "grouped": clear(gpu(shapes=GROUPED), 0, "grouped"),
    "grouped and transposed": clear(gpu(shapes=GROUPED_TRANSPOSED), 0, "grouped"),
    "other norms": clear(gpu((*BOTH, GROUP_NORM)), 0, "group or instance norms"),
    "float32": clear(gpu((*ON_FLOAT32, *NORMS)), 0, "without tensor cores"),
    "set": clear(gpu(models=[{"channels_last": True}]), 0, "is in channels_last"),
    "norms in NHWC": clear(gpu((*ALONE, *IN_NHWC)), 0, "takes 0 %"),
    "cuDNN's norm is not known to gain": clear(gpu((*ALONE, OWN_NORM)), 0, "takes 0 %"),
    "a late host": clear(gpu([(op, name, LAUNCH // 3) for op, name, _ in BOTH])),
    "no shapes": unmeasured(gpu(shapes=()), "shapes"),
    "AMD": unmeasured(gpu(device="AMD Instinct MI300X"), "AMD"),
    "products": inapplicable(gpu([("aten::mm", "sm80_xmma_gemm_bf16bf16", MS)])),
    # On a CPU: norms, pooling and what oneDNN reorders, less the copies of a weight's gradient above 1×1.
    "a CPU": found(cpu(1), (100 * (0.67 + 0.8) + 50 * 0.2 + 40 * 0.85) * MS, "try", sharp=0.005),
    "a CPU with kernels of 3×3": found(
        cpu(3), (100 * (0.67 + 0.8) + 50 * 0.2 + 40 * 0.85) * MS - 0.55 * 100 * MS / ELEMENTS * 1024**2 * 9, sharp=0.005
    ),
    # timm: the model that is moved is another name than what is called.
    "lines": lines(
        f"append `{TO}` to `self.net.to(device)` at train.py:8, and to `batch[0]` in `self.net(batch[0])`"
        " at train.py:18",
        *(GIVEN, MADE, RUNS),
    ),
    "lines of a model that is not moved": lines(
        f"append `{TO}` to `net` in `SGD(net.parameters(), …)` at train.py:9, and to `batch[0]` in",
        *(OTHER, GIVEN, RUNS),
    ),
    "a loss with parameters is moved": lines(
        IMAGES_ALONE.replace("made,", "made at train.py:7,"), {**MADE, "whole": False}, OTHER, RUNS
    ),
    "moved in a library": lines(IMAGES_ALONE, {**MADE, "via": "Trainer (fit.py:1)"}, RUNS),
    "torch has no name there": lines(NONE, {**MADE, "torch": False}, {**RUNS, "torch": False}),
    "the model gets no image": lines(FOR_IT, {**RUNS, "takes": [2]}),
    "the model gets an image after another tensor": lines(
        "append it to `x` in `net(t, x)` at train.py:18",
        called("forward", 18, "y = net(t, x)", "net(t, x)", takes=[1, 4]),
    ),
    # pytorch-cifar100: a library calls the model for the line, and its line is not the model's call.
    "a function that calls the model": lines(
        BEFORE.format(9),
        called("forward", 18, "writer.add_graph(net, images)"),
        {**GIVEN, "source": "SGD(net.parameters("},
    ),
    "a builtin that calls the model": lines(
        FOR_IT, called("forward", 18, "y = list(map(net, images))", "list(map(net, images))", takes=[4])
    ),
    "arguments of which some are unpacked": lines(FOR_IT, called("forward", 18, "net(*both)", takes=[4, 4])),
    "an argument that is a sum": lines(FOR_IT, called("forward", 18, "net(a + b)", takes=[4])),
    "two calls of the same length": lines(FOR_IT, called("forward", 18, "f(x), g(y)", "f(x)", takes=[4])),
    "lines that are not known": lines(NONE),
}


@table({memory_format: CASES})
def test_what_channels_last_gains(tmp_path: Path, rule: Rule, case: Case) -> None:
    check(rule, case, tmp_path)


# ---- recorded on one H200, with the truth in README.md there -------------------------------------------------------


@pytest.mark.skipif(not H200.is_dir(), reason="needs ../shared/traces/h200")
def test_a_resnet_in_nchw_is_told_so_first_with_both_lines_and_its_next_step() -> None:
    result = diagnose(open_run(H200 / "g02_resnet_layout"), RULES, jobs=1)
    first = next(o for o in result.outcomes if o.state == "found")
    assert first.id == "memory_format"
    assert first.advice[0] == (
        f"`{TO}` of the model, before the optimizer is made at g02_resnet_layout.py:15, and of each batch of images"
    )
    assert result.window is not None
    then = result.window.step_ns - first.saving_ns
    assert then == pytest.approx(29.54 * MS, rel=0.15)
    assert abs(then - 29.54 * MS) <= 2 * first.noise_ns


@pytest.mark.skipif(not H200.is_dir(), reason="needs ../shared/traces/h200")
@pytest.mark.parametrize("name", ["g07_pageable", "g14_synchronize"])
def test_other_causes_are_not_laid_to_the_format(name: str) -> None:
    assert ask(memory_format.RULE, H200 / name).state == "clear"


# Scripts in which the model and its images stand in ways that an edit could break, and whether it names the model's and
# the images' expressions. Each returns its network.
FORMS = {
    "plain": ("net = Net()\nnet.to('cpu')\nimages = x\nnet(images).sum().backward()\nreturn net", True, True),
    "returned": (
        "def make():\n    return Net().to('cpu')\nnet = make()\nfor batch in [{'x': x}]:\n"
        "    net(batch['x']).sum().backward()\nreturn net",
        True,
        True,
    ),
    # timm: a name of the outer function that an assignment would make a local one, and a model that is None at first.
    "nested": (
        "task = None\nnet = Net()\nnet.to(device='cpu')\ninput = x\ndef forward():\n    result = task(input)\n"
        "    result.sum().backward()\ntask = Net.kept = torch.nn.Sequential(net)\nforward()\nreturn net",
        True,
        True,
    ),
    "lambda": ("net = Net().cpu().to('cpu')\nrun = lambda v: net(v).sum()\nrun(x).backward()\nreturn net", True, True),
    "comprehension": (
        "net = [n.to('cpu') for n in [Net()]][0]\n[net(v) for v in [x]][0].sum().backward()\nreturn net",
        True,
        True,
    ),
    "optimizer": (
        "net = Net()\noptimizer = torch.optim.SGD(net.parameters(), lr=0.1) if True else None\n"
        "with torch.enable_grad(): net(x).sum().backward()\noptimizer.step()\nreturn net",
        True,
        True,
    ),
    "method": (
        "class Task:\n    def __init__(self): self.net = Net().to('cpu')\n    @torch.enable_grad()\n"
        "    def run(self): return self.net(x[:2])\ntask = Task()\ntask.run().sum().backward()\nreturn task.net",
        True,
        True,
    ),
    "class body": (
        "class Job:\n    net = Net().to('cpu'); out = net(x); out.sum().backward()\nreturn Job.net",
        True,
        True,
    ),
    "coroutine": (
        "import asyncio\nasync def main():\n    net = Net().to('cpu')\n    (net(x)).sum().backward()\n    return net\n"
        "return asyncio.run(main())",
        True,
        True,
    ),
    # What calls the model is another function: only words.
    "drawn": (
        "net = Net().to('cpu')\nfrom torch.utils.checkpoint import checkpoint\n"
        "checkpoint(net, x, use_reentrant=False).sum().backward()\nreturn net",
        True,
        False,
    ),
    "in a library": (
        "net, space = Net().to('cpu'), {}\nexec('def run(batches): return net(batches[0])', {'net': net}, space)\n"
        "run, all = space['run'], [x]\nrun(all).sum().backward()\nreturn net",
        True,
        False,
    ),
    "mapped": ("net = Net().to('cpu')\nlist(map(net, [x]))[0].sum().backward()\nreturn net", True, False),
    "several lines": ("net = Net()\nnet.to(\n    'cpu'\n)\nnet(\n    x\n).sum().backward()\nreturn net", False, False),
}
HEAD = """import torch
class Net(torch.nn.Conv2d):
    def __init__(self):
        super().__init__(3, 4, 3)
    def forward(self, v):
        self.got = v.is_contiguous(memory_format=torch.channels_last)
        return super().forward(v)
x = torch.randn(2, 3, 8, 8)
"""
_EDIT = re.compile(r"`([^`]+)`(?: in `([^`]+)`)? at train\.py:(\d+)")


@pytest.mark.long
@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python does not say in which columns a call stands")
def test_what_is_proposed_runs(tmp_path: Path) -> None:
    """Each form is recorded; what the sentence says is done to the script, and that runs in channels_last."""
    forms = [f"def form_{n}():\n{indent(body, '    ')}\n" for n, (body, _, _) in enumerate(FORMS.values())]
    names = [f"form_{n}" for n in range(len(forms))]
    script = tmp_path / "train.py"
    script.write_text(f"{HEAD}{''.join(forms)}" + f"kept = [{'(), '.join(names)}()]\n")
    record(script, folder=tmp_path / "run", options=["--no-trace"])
    calls = calls_of([facts(tmp_path / "run" / "ranks" / "00000")])
    told = {}
    for n, (name, (_, of_model, of_images)) in zip(names, FORMS.items(), strict=True):
        mine = [call for call in calls if f"{call.function}.".startswith(f"{n}.")]
        first, _, then = memory_format._change(mine, "channels_last").text.partition(", and ")
        told[name] = (bool(_EDIT.search(first)), bool(_EDIT.search(then)) and "is called" not in then)
        assert told[name] == (of_model, of_images), (name, first, then)
        lines = script.read_text().splitlines()
        for text, within, line in _EDIT.findall(first) + _EDIT.findall(then):
            around = within if within and "…" not in within else f"{text}.parameters" if within else text
            assert around in lines[int(line) - 1]
            begin, _, end = around.rpartition(text)
            lines[int(line) - 1] = lines[int(line) - 1].replace(around, f"{begin}{text}{TO}{end}")
        space: dict[str, Any] = {}
        exec(compile("\n".join(lines), str(script), "exec"), space)
        net = space[n]()
        assert net.got == of_images or not of_model
        assert net.weight.is_contiguous(memory_format=space["torch"].channels_last) == of_model
