"""The training script that a simulated job runs, line by line: what the recorder names of it, and what py-spy sees.

py-spy samples the training thread, loader workers and the pinning thread in a burst of some seconds from the end of
the first step on, as dlprof's sampler begins with one; what the recorder does itself is left out, as a reader leaves it
out.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from simulator.job import Job, Place
from simulator.loading import Loader
from simulator.machine import Simulated

FOLDER, FILE = "/home/user/", "train.py"
LIBRARIES = "/opt/venv/lib/python3.12/site-packages"

# The recorder looks so often at a call of a kind (LOOKS in dlprof/record/calls.py), and once at what makes an
# object or is seen in the one step whose operators it counts.
_LOOKS = 64
_EACH_STEP = ("autocast", "backward")

_TORCH = f"{LIBRARIES}/torch"
# What stands below the script's line while the training thread is in it: as py-spy saw of torch 2.11.
_BELOW: dict[str, tuple[str, ...]] = {
    "iteration": (
        f"_BaseDataLoaderIter.__next__ ({_TORCH}/utils/data/dataloader.py:741)",
        f"_MultiProcessingDataLoaderIter._next_data ({_TORCH}/utils/data/dataloader.py:1524)",
    ),
    "forward": (
        f"Module._wrapped_call_impl ({_TORCH}/nn/modules/module.py:1779)",
        f"Module._call_impl ({_TORCH}/nn/modules/module.py:1790)",
        f"Transformer.forward ({FOLDER}model.py:48)",
    ),
    "backward": (
        f"Tensor.backward ({_TORCH}/_tensor.py:631)",
        f"backward ({_TORCH}/autograd/__init__.py:381)",
        f"_engine_run_backward ({_TORCH}/autograd/graph.py:869)",
    ),
    "step": (
        f"Optimizer.profile_hook_step.<locals>.wrapper ({_TORCH}/optim/optimizer.py:533)",
        f"_use_grad_for_differentiable.<locals>._use_grad ({_TORCH}/optim/optimizer.py:81)",
        f"Adam.step ({_TORCH}/optim/adam.py:248)",
    ),
    "zero_grad": (f"Optimizer.zero_grad ({_TORCH}/optim/optimizer.py:1066)",),
    "replay": (f"CUDAGraph.replay ({_TORCH}/cuda/graphs.py:140)",),
    "checkpoint": (f"save ({_TORCH}/serialization.py:964)",),
    "lap": (f"synchronize ({_TORCH}/cuda/__init__.py:1085)",),
}


@dataclass(frozen=True)
class Line:
    """A line of the script. `calls`: the kinds of call that the recorder sees in it, each with its text."""

    text: str
    name: str = ""  # by which program.Line knows it
    calls: tuple[tuple[str, str], ...] = ()
    within: str = "<module>"
    into: str = ""  # the name of the line, in a function of the script, that it spends its time in


def lines(job: Job) -> tuple[Line, ...]:
    """Return a job's script."""
    return (*_above(job), *_setup(job), *_loop(job))


def number(job: Job, name: str) -> int:
    """Return a line's number, of the innermost one of the script's: a call that a function of it makes is there."""
    made = lines(job)
    at = next(n for n, line in enumerate(made, 1) if line.name == name)
    return number(job, made[at - 1].into) if made[at - 1].into else at


def calls(job: Job, steps: int) -> list[dict[str, Any]]:
    """Return the calls of the script that the recorder names in a job of so many steps."""
    seen = []
    for n, line in enumerate(lines(job), 1):
        for kind, text in line.calls:
            column = line.text.find(text)
            times = job.model.tensors if line.within == "grad_norm" or line.name == "step" else 1
            if kind == "optimizer_step":
                times = 1
            often = min(steps if kind in _EACH_STEP else times, _LOOKS)
            row: dict[str, Any] = {"kind": kind, "file": FILE, "line": n, "function": line.within, "count": often}
            if kind in ("loader", "iteration"):
                row["roles"] = ["train"]
            if kind != "iteration":
                row |= {"end_line": n, "column": column, "end_column": column + len(text)}
            seen.append(row | {"source": line.text.strip(), "digest": "0" * 64})
    return seen


def frames(job: Job, name: str) -> list[str]:
    """Return the stack of the training thread while it is in a line, as py-spy writes it: name (file:line), …"""
    made = lines(job)
    numbered = {line.name: (n, line) for n, line in enumerate(made, 1) if line.name}
    at, line = numbered[name]
    stack = [f"{line.within} ({FOLDER}{FILE}:{at})"]
    if line.into:
        at, line = numbered[line.into]
        stack.append(f"{line.within} ({FOLDER}{FILE}:{at})")
    return [*stack, *_BELOW.get(line.name, ())]


def _above(job: Job) -> Iterator[Line]:
    script = job.script
    yield Line("import time, torch, torch.nn.functional as F")
    yield Line("from data import Texts")
    yield Line("from model import Transformer")
    if script.laps:
        yield Line("def lap(name, since):")
        yield Line("    torch.cuda.synchronize()", "lap", within="lap")
        yield Line("    spent[name] = spent.get(name, 0.0) + time.perf_counter() - since")
        yield Line("    return time.perf_counter()")
    if script.norms == "items":
        yield Line("def grad_norm(parameters):")
        yield Line("    total = 0.0")
        yield Line("    for p in parameters:")
        text = "p.grad.detach().norm(2).item()"
        yield Line(f"        total += {text} ** 2", "each norm", (("sync", text),), "grad_norm")
        yield Line("    return total ** 0.5")
    if script.hooks:
        yield Line("def watch(gradient):")
        text = "gradient.norm().item()"
        yield Line(f"    norms.append({text})", "each gradient", (("sync", text),), "watch")
    if script.ema == "loop":
        yield Line("def average(averages, parameters, decay=0.999):")
        yield Line("    for e, p in zip(averages, parameters):")
        yield Line("        e.mul_(decay).add_(p, alpha=1 - decay)", "each average", within="average")
    yield Line("def bookkeeping(step):")
    yield Line("    return sum(i * i % 7 for i in range(step, step + size))", "each entry", within="bookkeeping")


def _setup(job: Job) -> Iterator[Line]:
    yield Line('model = Transformer().to("cuda")')
    kind = {"fused": ", fused=True", "foreach": "", "single": ", foreach=False"}[job.optimizer.kind]
    made = f"torch.optim.{job.optimizer.name}(model.parameters(), lr=3e-4{kind})"
    yield Line(f"opt = {made}", "optimizer", (("optimizer", made),))
    if job.script.hooks:
        yield Line("for p in model.parameters():")
        yield Line("    p.register_hook(watch)")
    if job.loader is not None:
        made = _loader(job, job.loader)
        yield Line(f"loader = {made}", "loader", (("loader", made),))


def _loader(job: Job, loader: Loader) -> str:
    told = [f"batch_size={job.model.tokens // job.model.sequence}", f"num_workers={loader.workers}"]
    if job.batch.memory == "pinned":
        told.append("pin_memory=True")
    if loader.workers and loader.prefetch != 2:
        told.append(f"prefetch_factor={loader.prefetch}")
    if loader.workers and loader.persistent:
        told.append("persistent_workers=True")
    return f"torch.utils.data.DataLoader(Texts(), {', '.join(told)})"


def _loop(job: Job) -> Iterator[Line]:
    script = job.script
    if job.loader is None:
        yield Line("for step in range(steps):", "iteration")
        yield Line("    x, y = batches[step % len(batches)]", "batch")
    else:
        yield Line("for step, (x, y) in enumerate(loader):", "iteration", (("iteration", ""),))
        copy = (
            'x.to("cuda")' if job.batch.waits or job.batch.memory == "pageable" else 'x.to("cuda", non_blocking=True)'
        )
        yield Line(f'    x, y = {copy}, y.to("cuda")', "batch", (("copy", copy),) if job.batch.size else ())
    if script.captured == "all":
        yield Line("    graph.replay()", "replay")
    indent = "    "
    if job.model.activations != "float32":
        made = f'torch.autocast("cuda", torch.{job.model.activations})'
        yield Line(f"    with {made}:", "", (("autocast", made),))
        indent += "    "
    loss = "F.cross_entropy(model(x), y)"
    yield Line(f"{indent}loss = {loss}", "forward", (("forward", "model(x)"), ("loss", loss)))
    if script.values == "read":
        yield Line("    log(loss=loss.item())", "loss value", (("sync", "loss.item()"),))
    elif script.values:
        yield Line("    losses += loss.detach()", "loss value")
    yield from _lap(job, "forward")
    yield Line("    loss.backward()", "backward", (("backward", "loss.backward()"),))
    yield from _lap(job, "backward")
    if script.norms == "items":
        yield Line("    norm = grad_norm(model.parameters())", "norm", into="each norm")
    elif script.norms:
        yield Line("    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])", "norm")
    read = (("sync", "opt.step()"),) if job.optimizer.kind == "single" else ()  # it reads its counts of steps
    yield Line("    opt.step()", "step", (("optimizer_step", "opt.step()"), *read))
    yield from _lap(job, "step")
    yield Line("    opt.zero_grad()", "zero_grad")
    if script.ema == "loop":
        yield Line("    average(averages, model.parameters())", "average", into="each average")
    elif script.ema:
        yield Line("    torch._foreach_lerp_(averages, parameters, 1 - decay)", "average")
    if script.values == "read":
        accuracy = "(logits.argmax(-1) == y).float().mean().item()"
        yield Line(f"    log(accuracy={accuracy})", "accuracy value", (("sync", accuracy),))
    elif script.values:
        yield Line("    right += (logits.argmax(-1) == y).float().mean()", "accuracy value")
    yield Line(*_values(job))
    if job.pauses.checkpoint:
        yield Line('    torch.save(model.state_dict(), "checkpoint.pt")', "checkpoint")
    if job.epochs.validation:
        yield Line("    validate(model)", "validation")
    yield Line("    bookkeeping(step)", "bookkeeping", into="each entry")


def _values(job: Job) -> tuple[str, str, tuple[tuple[str, str], ...]]:
    script = job.script
    if script.items:
        return "    log(loss=loss.item())", "values", (("sync", "loss.item()"),)
    if script.masks:
        return "    hard = losses[losses > limit]", "values", (("sync", "losses[losses > limit]"),)
    return "    torch.cuda.synchronize()" if script.waits else "    log(step)", "values", ()


def _lap(job: Job, phase: str) -> Sequence[Line]:
    return (Line(f'    t = lap("{phase}", t)', f"lap {phase}", into="lap"),) if job.script.laps else ()


# -- what py-spy sees


RATE = 47  # samples a second
BURST_NS = 3_000_000_000

_DATA = f"{LIBRARIES}/torch/utils/data"
_WORKER = f"_worker_loop ({_DATA}/_utils/worker.py:353)"
_FETCHES = (f"_MapDatasetFetcher.fetch ({_DATA}/_utils/fetch.py:54)", f"Texts.__getitem__ ({FOLDER}data.py:21)")
_IDLE = ("Queue.get (/usr/lib/python3.12/multiprocessing/queues.py:113)",)
_PINS = f"_pin_memory_loop ({_DATA}/_utils/pin_memory.py:52)"
_PINNING = (f"pin_memory ({_DATA}/_utils/pin_memory.py:100)", f"pin_memory ({_DATA}/_utils/pin_memory.py:57)")


def stacks(rank: Simulated, job: Job, place: Place) -> str:
    """Return one burst in py-spy's raw format, with the sampler's line before it."""
    rows = rank.records.rows
    begin, end = rows[0].end, min(rows[0].end + BURST_NS, rows[-1].end)
    rng = np.random.default_rng((job.seed, rank.rank, 1 << 28))
    ticks = np.arange(begin, end, 1e9 / RATE)
    ticks = (ticks + rng.uniform(0, 0.5e9 / RATE, len(ticks))).astype(np.int64)
    seen = Counter(_stacks(rank, job, place.pid, [int(at) for at in ticks if at < end]))
    head = {"start_ns": place.clock.at(begin), "end_ns": place.clock.at(end), "rate": RATE}
    return f"#{json.dumps(head)}\n" + "".join(f"{stack} {n}\n" for stack, n in seen.items())


def _stacks(rank: Simulated, job: Job, pid: int, ticks: Sequence[int]) -> Iterator[str]:
    lines, doing = rank.records.lines, rank.records.doing
    line_times, times = [at for at, _ in lines], [at for at, _ in doing]
    known = {name: frames(job, name) for name in {name for _, name in lines}}
    process = f'process {pid}:"python train.py"'
    for at in ticks:
        if doing[bisect_right(times, at) - 1][1] != "profiler":
            stack = known[lines[bisect_right(line_times, at) - 1][1]]
            yield ";".join((process, f"thread ({pid}): MainThread", *stack))
    if rank.queue is None:
        return
    for worker in sorted({f.pid for f in rank.queue.fetched if f.worker >= 0}):
        busy = [(f.start, f.end) for f in rank.queue.fetched if f.pid == worker]
        its = (process, f'process {worker}:"python train.py"', f"thread ({worker}): MainThread", _WORKER)
        yield from _of_thread(its, busy, _FETCHES, ticks)
    if rank.queue.pinned:
        own = (process, f"thread ({pid + 50}): Thread-1 (_pin_memory_loop)", _PINS)
        yield from _of_thread(own, rank.queue.pinned, _PINNING, ticks)


def _of_thread(
    own: Sequence[str], busy: Sequence[tuple[int, int]], works: Sequence[str], ticks: Sequence[int]
) -> Iterator[str]:
    """Return the stacks of a thread that works in such intervals, in order, and else waits for a queue."""
    begins = [begin for begin, _ in busy]
    for at in ticks:
        place = bisect_right(begins, at) - 1
        working = place >= 0 and at < busy[place][1]
        yield ";".join((*own, *(works if working else _IDLE)))
