"""The checks of `make gpu`, in the order in which they run: what a cut-off run should have first stands first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.gpu import (
    advice,
    asynchronous,
    faults,
    live,
    modes,
    overhead,
    patches,
    probes,
    ranks,
    rates,
    settings,
)
from benchmarks.gpu.bench import Bench


@dataclass(frozen=True)
class Check:
    """One check: what passes it, what it runs, and its time.

    It is ended after `budget_s`, or when the time of all is over; with less than `least_s` left it does not begin. Of
    that time, `reserved_s` are kept for it by those before it.
    """

    name: str
    passes: str
    run: Callable[[Bench], None]
    budget_s: float
    least_s: float
    reserved_s: float = 0.0


# To add a check: its function in a module of its subject, its line here. The budgets of all but the last two add up to
# more than ten minutes, as each of them holds what a slow machine may need; what one leaves, the others have. What is
# reserved counts where `--only` names a check that takes all the time there is before others.
CHECKS: tuple[Check, ...] = (
    Check("doctor", "CUPTI gives a kernel, NVML and GPM answer", probes.doctor, 90, 15),
    Check(
        "async",
        "a device that is never idle, 1, 3 and 8 steps ahead: computation within 3 points of CUDA events, no"
        " host_bound, traced ÷ steady 0.9 to 1.1",
        asynchronous.run_ahead,
        120,
        40,
    ),
    Check(
        "sync",
        "the same with .item() and 10 ms of Python: host_bound or host_sync, saving ± 15 % of the measured",
        asynchronous.wait_each_step,
        80,
        30,
    ),
    Check(
        "modes",
        "eager, reduce-overhead, one captured graph a step: exit 0, steps counted, losses equal",
        modes.equal,
        150,
        40,
    ),
    Check(
        "settings", "TF32 by the new API, fp16 with GradScaler, PYTORCH_ALLOC_CONF: facts right", settings.seen, 60, 15
    ),
    Check("placement", "no set_device: the right UUID, no context on another GPU", settings.placed, 60, 25),
    Check(
        "product",
        "8192³ bf16 products: MFU ± 3 points, GPM's tensor cores > 0.6, nvidia-smi agrees",
        rates.product,
        60,
        30,
    ),
    Check(
        "copies",
        "device copies: GPM's memory > 0.8; 10 GB from pinned memory: PCIe 0.98 to 1.10 × that",
        rates.copies,
        80,
        40,
        reserved_s=45,
    ),
    Check(
        "ranks",
        "two ranks on one GPU: collectives matched > 95 %, a rank 20 ms late ± 20 %",
        ranks.late,
        100,
        30,
        reserved_s=35,
    ),
    Check(
        "live",
        "jobs that run: top's step ± 10 %, the GPU's use ± 10 points, a second window, ps, attach, hang; they go on",
        live.looked_at,
        110,
        40,
    ),
    Check("overhead", "the step log adds < 1 %, all sources < 2 %, in turn", overhead.step, 110, 70, reserved_s=75),
    Check("calls", "as many synchronising calls as without dlprof", overhead.calls, 80, 35, reserved_s=40),
    Check(
        "tests",
        "every test marked gpu, none skipped for want of a GPU",
        probes.marked_tests,
        120,
        30,
        reserved_s=35,
    ),
    Check(
        "advice",
        "scripts with one mistake each: the first cure is the true cause, with its line and the change, and the step"
        " after it ± 15 % of the measured one, inside the range; the fixed script: not advised again",
        advice.first_lines,
        3600,
        40,
        reserved_s=45,
    ),
    Check(
        "fix",
        "`dlprof fix` on a script with one mistake: the patch is kept, applies, leaves the losses as they are, and"
        " gives what was printed (± 7 %, as two runs of a script differ)",
        patches.proven,
        800,
        120,
        reserved_s=130,
    ),
    Check(
        "faults",
        "every fault of the workloads found, gain within 15 % of the fixed run's; healthy runs: nothing of 5 %",
        faults.planted,
        3600,
        45,
        reserved_s=75,
    ),
)
