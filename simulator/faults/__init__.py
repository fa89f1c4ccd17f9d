"""The faults that can be simulated, by subject.

Some rules have none. `memory_growth` saves nothing, and tells from hours of readings; `thread_oversubscription`,
`idle_cores` and `needless_workers` are about a CPU's cores, and the simulated jobs compute on GPUs, with cores enough;
`periodic_work` and `unused_forward` are about steps that differ: simulated ones are alike but for stalls and
validation.
"""

from collections.abc import Mapping

from simulator.faults import device, host, loading, ranks
from simulator.faults.fault import Fault

FAULTS: tuple[Fault, ...] = (
    *loading.FAULTS,
    *host.FAULTS,
    *ranks.FAULTS,
    *device.FAULTS,
)

FILES: Mapping[str, str] = {
    fault.name: file.__name__.rpartition(".")[2] for file in (loading, host, ranks, device) for fault in file.FAULTS
}

__all__ = ["FAULTS", "FILES", "Fault"]
