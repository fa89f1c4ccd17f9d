"""A job of many ranks, and what is planted into it: a slow rank, a slow host, a slow link, a bubble.

The job is a transformer in pipelines of four stages, two of them on a host of eight GPUs; the ranks of a stage
all-reduce its gradients. Only a few hosts are simulated, each with faults of its own or none; all other hosts are
copies of the healthy ones, see stamp.py. A copy draws the same jitter, and so behaves alike to the nanosecond.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from simulator.hardware import DEVICES
from simulator.job import Gradients, Job, Pipeline, Recording
from simulator.model import Model

STAGES, RANKS_A_HOST = 4, 8
HEALTHY = 3  # hosts that are simulated without a fault of their own
SLOW_RANK, SLOW_HOST = 2, 1  # in the simulated job: a rank of the first host, and the second one

# Five traced steps of about 100,000 events a rank. A pipeline is known to idle little with many micro-batches of few
# blocks, and much with few of many: the events are as many.
FEW, MANY = (4, 32), (32, 4)  # micro-batches and blocks of a stage
TOKENS = 4_096  # of a micro-batch
RECORDING = Recording(steps=24, skip=10, warmup=2, active=5, form="torch-2.13", device_step=True)


@dataclass(frozen=True)
class Planted:
    """Which faults a job has. Factors of what is planted: kernels of the rank and of the host, the link's bandwidth."""

    rank: float = 1.0
    host: float = 1.0
    link: float = 1.0
    bubble: bool = False


ALL = Planted(rank=1.5, host=1.2, link=0.2, bubble=True)
JOBS = {
    "healthy": Planted(),
    "slow rank": Planted(rank=1.5),
    "slow host": Planted(host=1.2),
    "slow link": Planted(link=0.04),
    "bubble": Planted(bubble=True),
    "all four": ALL,
}
SLOW_STAGE = 1  # whose replicas are joined by the slow link


@dataclass(frozen=True)
class Many:
    """A job of many ranks: what is simulated of it, and which simulated host each of its hosts is a copy of."""

    simulated: Job
    whole: Job
    copied: tuple[int, ...]

    @property
    def slow_rank(self) -> int:
        """The rank that the planted slow one became."""
        return self.copied.index(0) * RANKS_A_HOST + SLOW_RANK

    @property
    def slow_host(self) -> str:
        """The name of the slow host."""
        return f"node-{self.copied.index(SLOW_HOST) + 1}"

    @property
    def slow_link(self) -> tuple[int, ...]:
        """The ranks that the slow link joins."""
        return tuple(range(SLOW_STAGE, self.whole.ranks, STAGES))


def job(ranks: int, planted: Planted, shape: tuple[int, int] | None = None) -> Many:
    """Return a job of so many ranks, a multiple of eight; `shape`: its micro-batches, and the blocks of a stage.

    One host alone has the slow rank and is no slow host.
    """
    hosts = ranks // RANKS_A_HOST
    microbatches, blocks = shape or (FEW if planted.bubble else MANY)
    few = min(hosts, 2 + HEALTHY)
    model = Model(blocks=STAGES * blocks, tokens=TOKENS * microbatches, vocabulary=8_000)
    pipeline = Pipeline("1F1B", microbatches, replicas=few * RANKS_A_HOST // STAGES)
    speeds = {SLOW_HOST * RANKS_A_HOST + n: planted.host for n in range(RANKS_A_HOST)} if few > 1 else {}
    speeds[SLOW_RANK] = planted.rank
    device = DEVICES["H100"]
    simulated = Job(
        name="many ranks",
        device="H100",
        ranks=few * RANKS_A_HOST,
        hosts=few,
        model=model,
        loader=None,
        pipeline=replace(pipeline, stand_for=hosts / few),
        gradients=Gradients(bus=0.5 * device.link),
        speeds=tuple(speeds.items()),
        links=((str(1 + SLOW_STAGE), planted.link),),
    )
    whole = replace(
        simulated, ranks=ranks, hosts=hosts, pipeline=replace(pipeline, replicas=ranks // STAGES), speeds=(), links=()
    )
    return Many(simulated, whole, _copied(hosts, few))


def _copied(hosts: int, few: int) -> tuple[int, ...]:
    """Return which simulated host each host is: those with faults once, amid the job, the others in turn."""
    if hosts <= few:
        return tuple(range(hosts))
    copied = [2 + n % (few - 2) for n in range(hosts)]
    copied[hosts // 3], copied[hosts // 2] = 0, SLOW_HOST
    return tuple(copied)
