"""What a script captures while it is recorded is what it captures plainly, and is no step of its training."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from dlprof.record.captured import capture_test, unseen_range
from tests.fixtures.jobs import environment, facts, launch, rows, tiny, wrapped

torch: Any = pytest.importorskip("torch", reason="recording needs torch")

pytestmark = pytest.mark.flaky(reruns=0)  # a difference between two runs is what these look for

# Captures a model in each of some steps, and prints what came of it: graphs, constants, warnings, bytes.
CAPTURING = """
    import copy, hashlib, importlib.util, inspect, io, json, logging, warnings
    from functools import partial
    from torch.func import functional_call, grad, hessian, jacrev, jvp, linearize, vmap
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.norm = nn.Sequential(nn.Linear(8, 16), nn.ReLU()), nn.BatchNorm1d(16)
            self.head = nn.Linear(16, 1)
        def forward(self, x):
            return (self.head(self.norm(self.body(x))),)

    x = torch.randn(4, 8)
    frozen = Net().eval().requires_grad_(False)
    weights = {name: p.detach() for name, p in frozen.named_parameters()}
    whole = weights | dict(frozen.named_buffers())

    def called(weights, x):
        return functional_call(frozen, weights, (x,))[0]

    def loss(weights, x):
        return called(weights, x).pow(2).sum()

    def saved(save, *what):
        file = io.BytesIO()
        save(*what, file)
        return hashlib.sha256(file.getvalue()).hexdigest()

    def traced(**options):
        made = torch.jit.trace(copy.deepcopy(frozen), x, **options)
        return str(made.inlined_graph), saved(torch.jit.save, made)

    def traced_loss():
        def loss(x):
            return nn.functional.mse_loss(frozen(x)[0], x[:, :1])
        return str(torch.jit.trace(loss, x, check_trace=False).graph)

    def exported(strict):
        program = torch.export.export(frozen, (x,), strict=strict)
        return str(program), [(n.name, n.meta.get("stack_trace")) for n in program.graph.nodes]

    def onnx(dynamo):
        file = io.BytesIO()
        program = torch.onnx.export(frozen, (x,), None if dynamo else file, dynamo=dynamo, verbose=False)
        return hashlib.sha256(program.model_proto.SerializeToString() if dynamo else file.getvalue()).hexdigest()

    def whole_step(x):
        kept = [nn.Parameter(w.clone()) for w in weights.values()]
        called(dict(zip(weights, kept)), x).sum().backward()
        torch.optim.SGD(kept, lr=0.1).step()
        return kept[0].detach()

    class Leafless(torch.fx.Tracer):
        def is_leaf_module(self, module, name):
            return False

    def of_aot():
        from torch._functorch.aot_autograd import aot_export_module
        graph, signature = aot_export_module(frozen, (x,), trace_joint=False)
        return graph.code, str(signature)

    def fake():
        from torch._subclasses.fake_tensor import FakeTensorMode
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            train((mode.from_tensor(x), mode.from_tensor(x[:, :1])))
        return str([p.grad for p in model.parameters()])

    def compiled(aot):
        from torch._dynamo.backends.common import aot_autograd
        torch._dynamo.reset()
        graphs = []
        def keep(graph, inputs):
            graphs.append(graph.code)
            return graph
        backend = aot_autograd(fw_compiler=keep) if aot else keep
        torch.compile(Net().requires_grad_(aot), backend=backend, fullgraph=True)(x)[0].sum()
        return graphs

    def seen(kind, method):
        calls = []
        def see(self, function, types, args=(), kwargs=None):
            calls.append(str(getattr(function, "__name__", function)))
            return function(*args, **(kwargs or {}))
        with type("Seeing", (kind,), {method: see})():
            torch.autograd.backward(nn.functional.mse_loss(model(x), x[:, :1]))
        return calls

    def kept():
        copied = copy.deepcopy(model)
        assert vars(copied).keys() == vars(model).keys()
        hooks = [len(h) for m in model.modules() for name, h in vars(m).items() if name.endswith("_hooks")]
        return saved(lambda m, file: torch.save(m, file), copied), list(model.state_dict()), hooks, [
            str(inspect.signature(f)) for f in (model.forward, model.__call__)], nn.Module.__call__.__name__

    def scripted():
        made = torch.jit.script(copy.deepcopy(model))
        return made.code, saved(torch.jit.save, made)

    MODES = {
        "captures": {
            "jit.trace": partial(traced, check_trace=False), "jit.trace of a loss": traced_loss,
            "export": partial(exported, False), "export strict": partial(exported, True),
            "fx": lambda: torch.fx.symbolic_trace(frozen).code,
            "fx leafless": lambda: str(Leafless().trace(frozen.body)),
            **{f"make_fx {o}": partial(lambda o: make_fx(called, **o)(whole, x).code, o) for o in (
                {}, {"tracing_mode": "fake"}, {"tracing_mode": "symbolic"}, {"pre_dispatch": True})},
            "make_fx of a step": lambda: make_fx(whole_step)(x).code,
            "make_fx of grad": lambda: make_fx(grad(loss))(weights, x).code, "aot": of_aot, "fake": fake,
        },
        "others": {
            "jit.trace and its check": traced, "jit.script": scripted, "compile": partial(compiled, False),
            "compile by aot": partial(compiled, True), "copy and save": kept,
            "dispatch mode": partial(seen, TorchDispatchMode, "__torch_dispatch__"),
            "function mode": partial(seen, TorchFunctionMode, "__torch_function__"),
            "grad": lambda: grad(loss)(weights, x), "vmap": lambda: vmap(called, (None, 0))(weights, x[:, None]),
            "vmap of grad": lambda: vmap(grad(loss), (None, 0))(weights, x[:, None]),
            "jvp": lambda: jvp(partial(called, weights), (x,), (x,)), "jacrev": lambda: jacrev(called)(weights, x),
            "hessian": lambda: hessian(partial(loss, weights))(x), "functional_call": lambda: called(weights, x),
            "linearize": lambda: linearize(partial(loss, weights), x)[1](x),
        },
    }
    if importlib.util.find_spec("onnxscript") is not None:  # what the exporters need
        MODES["others"] |= {"onnx": partial(onnx, False), "onnx dynamo": partial(onnx, True)}

    logging.disable()
    for number, batch in enumerate(DataLoader(data, batch_size=8)):
        train(batch)
        if number not in map(int, sys.argv[2:]):
            continue
        for name, mode in MODES[sys.argv[1]].items():
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                result = repr(mode())
            print(json.dumps([number, name, result, [str(one.message) for one in caught]]))
"""

# Of `--window 2,1,2`: the step that is counted, that of which memory is counted, and a traced one.
COUNTED, HELD, TRACED = 1, 2, 3

STEPS = (COUNTED, HELD, TRACED)

Captured = dict[tuple[int, str], tuple[str, list[str]]]  # result and warnings, by step and mode


class Both(NamedTuple):
    """What a script captured plainly and recorded; and the recording."""

    plain: Captured
    recorded: Captured
    folder: Path
    stderr: str


def captured(folder: Path, group: str, run: str = "", *options: str) -> tuple[Captured, str]:
    """Run a script that captures a model in these steps, recorded or plainly; return what it captured, and stderr."""
    command: list[str] = [sys.executable, str(tiny(folder, CAPTURING)), group, *map(str, STEPS)]
    if run:
        options = ("--window", "2,1,2", "--stacks", "off", "--no-sample", *options)
        command = wrapped(folder / run, command, *options)
    env = environment(PYTHONHASHSEED="0")  # what jit.save writes goes by it
    done = launch(command, folder, env=env, timeout=500)
    assert done.returncode == 0, done.stderr
    lines = map(json.loads, done.stdout.splitlines())
    return {(step, name): (result, said) for step, name, result, said in lines}, done.stderr


@pytest.fixture(scope="module", params=["captures", pytest.param("others", marks=pytest.mark.slow)])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Both:
    folder = tmp_path_factory.mktemp(request.param)
    plain, _ = captured(folder, request.param)
    recorded, stderr = captured(folder, request.param, "run")
    return Both(plain, recorded, folder, stderr)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_what_a_script_captures_is_the_same_with_its_warnings(both: Both) -> None:
    assert len(both.plain) >= 3 * 14
    assert both.recorded.keys() == both.plain.keys()
    assert [at for at, result in both.plain.items() if both.recorded[at] != result] == []


@pytest.mark.long
@pytest.mark.timeout(600)
def test_captures_are_no_work_of_the_step_and_the_recording_goes_on(both: Both) -> None:
    if (TRACED, "aot") not in both.plain:
        pytest.skip("of the captures alone it is known how much they compute")
    rank = both.folder / "run/ranks/00000"
    known = facts(rank)
    counts = [(row["forwards"], row["backwards"], row["optimizer_steps"]) for row in rows(rank)]
    assert counts == [(1, 1, 1)] * 8 + [(0, 0, 0)]
    assert (known["window"]["state"], known["window"]["first_step"]) == ("exported", TRACED)
    assert known["window"]["modules"]["ranges"] == 2 * 4  # the model and its three modules, in each step
    assert (known["flops"]["state"], known["flops"]["step"]) == ("counted", COUNTED)
    # Of 8 samples 2 products of 8 by 16 (the input has no gradient) and 3 of 16 by 1. Each of two calls of jit.trace
    # computes as it looks: of 4 samples one of each.
    assert known["flops"]["total"] == 2 * 8 * (2 * 8 * 16 + 3 * 16 * 1) + 2 * 2 * 4 * (8 * 16 + 16 * 1)
    assert rows(rank, "held")[-1]["activations"]["state"] == "counted"
    assert known["warnings"] == []
    assert both.stderr.count("\n") == 1  # where the recording goes to


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_overridden_model_is_captured_as_the_script_has_it(both: Both) -> None:
    """But for jit.trace, whose graph is that of "jit.trace of a loss", as its file names a frame of the override."""
    if (TRACED, "aot") not in both.plain:
        pytest.skip("one group is enough")
    options = ("--allow-numerics", "--set", "torch.autocast=bf16")
    overridden, stderr = captured(both.folder, "captures", "overridden", *options)
    assert {name for (step, name), result in both.plain.items() if overridden[step, name] != result} == {"jit.trace"}
    assert "torch.autocast" in stderr


TRANSFORMED = """
    import torch._dynamo  # with what vmap is made of
    from torch.func import functional_call, grad_and_value, vmap
    def loss(weights, x, y):
        return nn.functional.mse_loss(functional_call(model, weights, (x,)), y)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    for n in range(64):
        x, y = data[n % 8 * 8 : n % 8 * 8 + 8]
        gradients, losses = vmap(grad_and_value(loss), (None, 0, 0))(weights, x[:, None], y[:, None])
        weights = {name: w - 0.1 * gradients[name].mean(0) for name, w in weights.items()}
    print(losses.tolist())
"""


@pytest.mark.long
def test_a_loop_of_function_transforms_is_recorded_as_training(tmp_path: Path) -> None:
    loop = tiny(tmp_path, TRANSFORMED)
    done = launch(wrapped(tmp_path / "run", [sys.executable, loop], "--window", "20,1,3"), tmp_path, timeout=280)
    assert done.returncode == 0, done.stderr
    rank = tmp_path / "run/ranks/00000"
    assert facts(rank)["warnings"] == []
    assert [(row["forwards"], row["backwards"]) for row in rows(rank)][20:30] == [(1, 1)] * 10
    assert facts(rank)["window"]["modules"]["ranges"] == 3 * 4


def test_what_captures_is_told_from_what_runs() -> None:
    is_captured, asked = capture_test(), []

    def ask(x: Any) -> Any:
        asked.append(is_captured())
        return x + 1

    x = torch.ones(2)
    torch.func.vmap(ask)(x)
    torch.func.grad(lambda x: ask(x).sum())(x)
    with _Passing():
        ask(x)
    assert asked == [False] * 3
    torch.jit.trace(ask, x, check_trace=False)
    torch.fx.symbolic_trace(ask)
    torch.fx.experimental.proxy_tensor.make_fx(ask)(x)
    with torch._subclasses.fake_tensor.FakeTensorMode():
        ask(torch.ones(2))
    assert all(asked[3:])
    assert len(asked) >= 7
    assert not is_captured()


class _Passing(torch.utils._python_dispatch.TorchDispatchMode):  # type: ignore[misc]
    """Notes what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_range_is_in_the_trace_and_no_mode_sees_it() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler, _Passing() as mode:
        with unseen_range()("ours"):
            torch.ones(2).add(1)
        with torch.autograd.profiler.record_function("theirs"):
            pass
    assert [name for name in mode.seen if "add" in name] == ["aten.add.Tensor"]
    assert sum("record_function" in name for name in mode.seen) == 2
    assert {"ours", "theirs"} <= {event.name for event in profiler.events()}
