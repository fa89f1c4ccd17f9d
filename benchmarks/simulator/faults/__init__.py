"""The faults that can be simulated, by subject.

Some rules have none. `memory_growth` saves nothing, and tells from hours of readings; `thread_oversubscription`,
`idle_cores` and `needless_workers` are about a CPU's cores, and the simulated jobs compute on GPUs, with cores enough;
`periodic_work` and `unused_forward` are about steps that differ: simulated ones are alike but for stalls and
validation.
"""

from benchmarks.simulator.faults import compute, host, lines, loading, memory, ranks
from benchmarks.simulator.faults.fault import Fault

FAULTS: tuple[Fault, ...] = (
    *loading.FAULTS,
    *host.FAULTS,
    *lines.FAULTS,
    *ranks.FAULTS,
    *compute.FAULTS,
    *memory.FAULTS,
)

__all__ = ["FAULTS", "Fault"]
