"""The faults that can be simulated, by subject; what cannot be, and why."""

from collections.abc import Mapping

from benchmarks.simulator.faults import compute, host, loading, ranks
from benchmarks.simulator.faults.fault import Fault

FAULTS: tuple[Fault, ...] = (*loading.FAULTS, *host.FAULTS, *ranks.FAULTS, *compute.FAULTS)

# Rules that nothing is simulated for.
NOT_SIMULATED: Mapping[str, str] = {
    "idle_cores": "it is about a CPU's threads: the simulated jobs compute on GPUs",
    "memory_growth": "it saves nothing: it tells when memory will be used up, from hours of readings",
    "needless_workers": "it is about training that computes on a CPU: the simulated jobs have devices",
    "periodic_work": "the simulator's steps are all alike but for stalls and validation",
    "step_python": "it reads stacks of Python, and the simulator has none",
    "unused_forward": "the simulator's steps have one forward pass for each backward pass",
    "thread_oversubscription": "it is about cores that threads share: the simulated host has cores enough",
}

__all__ = ["FAULTS", "NOT_SIMULATED", "Fault"]
