"""What it costs to hand a batch from a worker to the training thread, which a loop that fetches itself does not pay.

A worker puts each tensor into shared memory of its own, whose pages the kernel makes empty first, and passes a file
descriptor for it through a socket: one connection, with both ends' authentication, a tensor (torch.multiprocessing's
reductions, the strategy file_descriptor). So both sides pay by the tensor, and by the byte: the worker copies, and the
training thread's first touch of each page is a fault. Workers compute beside training, and what they compute costs
that more than their own time where its operators are split over all cores.
"""

from __future__ import annotations

from dataclasses import dataclass

_MS, _MB = 1e6, 1e6

# CPU time of the training thread and of the worker: of a batch, of each of its tensors, and of each megabyte. Measured
# with batches of 1 to 40 tensors of 1 kB to 4 MB, torch 2.13 on two cores of an AMD EPYC.
_TAKING = (0.2 * _MS, 0.15 * _MS, 0.3 * _MS)
_SENDING = (0.2 * _MS, 0.16 * _MS, 0.9 * _MS)

# A host may be so many times faster or slower than that one.
HOSTS_DIFFER = 2.0

# Tensors of a batch where they were not counted: features and targets, and at the worst a recommender's tables.
_USUAL, _MANY = 2, 32

# What a millisecond of a worker's computing costs an operator that is split over all cores: more than one, for all its
# threads wait at its end for the one that lost its core, and caches are cold after. 1.3 for convolutions of tens of
# milliseconds (workloads/ddp_resnet.py, two threads on two cores), 1.6 for those of one (pytorch/examples mnist).
BARRIER = 1.4
LEAST_BARRIER, MOST_BARRIER = 1.0, 2.0


@dataclass(frozen=True)
class Handover:
    """What a batch costs beside its fetch where a worker makes it, ns of computing."""

    taking_ns: float = 0.0  # of the training thread
    sending_ns: float = 0.0  # of the worker

    def times(self, factor: float) -> Handover:
        """Return the same on a host that takes so many times as long."""
        return Handover(self.taking_ns * factor, self.sending_ns * factor)


def handover(tensors: float, size: float) -> Handover:
    """Return what a batch of so many tensors, which hold so many bytes, costs to hand over."""

    def cost(a_batch: float, a_tensor: float, a_megabyte: float) -> float:
        return a_batch + a_tensor * tensors + a_megabyte * size / _MB

    return Handover(cost(*_TAKING), cost(*_SENDING))


@dataclass(frozen=True)
class Told:
    """What is known of a batch's handover: the usual, and between which it is."""

    usual: Handover = Handover()
    least: Handover = Handover()
    most: Handover = Handover()


# Of a batch whose handover costs nothing, as far as anybody waits for it.
UNTOLD = Told()


def told(tensors: float, size: float, taken_ns: float) -> Told:
    """Return what a batch of so many tensors costs; −1: they were not counted. `taken_ns`, where that was measured."""
    usual = handover(*((tensors, size) if tensors >= 0 else (_USUAL, 0.0)))
    least, most = usual.times(1 / HOSTS_DIFFER), usual.times(HOSTS_DIFFER)
    if tensors < 0:
        least, most = Handover(), handover(_MANY, 0.0).times(HOSTS_DIFFER)
    if taken_ns >= 0:
        usual, least, most = (Handover(taken_ns, one.sending_ns) for one in (usual, least, most))
    return Told(usual, least, most)
