"""The collectives as PyTorch's calls on tensors of a size, and whether a rank had the right result of each.

Inputs are periodic patterns of small whole numbers that every element type holds exactly. Of what is added up, one rank
alone gives each element and the others zero, so that the sum does not depend on the order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

# A prime, so that what is shifted or swapped shows; its numbers fit into int8.
PERIOD = 97
# Their names from torch 2.13 on, and before.
_C10D: Any = dist
_ALL_GATHER = getattr(_C10D, "all_gather_single", None) or _C10D.all_gather_into_tensor
_REDUCE_SCATTER = getattr(_C10D, "reduce_scatter_single", None) or _C10D.reduce_scatter_tensor

# By how much patterns of different ranks, and of the parts of one rank's input, are shifted.
_BY_RANK, _BY_PART = 13, 29


@dataclass(frozen=True)
class Exchange:
    """One collective on tensors that are there. `run` does it, to its end on a CPU; on a GPU it is queued."""

    count: int  # elements that its size stands for
    bytes: int
    run: Callable[[], None]
    is_right: Callable[[], bool]  # after the first run
    sent: torch.Tensor


def prepare(collective: str, size: int, dtype: torch.dtype, device: torch.device, rank: int, ranks: int) -> Exchange:
    """Make the tensors of a collective of so many bytes, at least an element a rank; raise RuntimeError if too large.

    All-gather's bytes are its output's, the others' their input's. All but send_recv take a multiple of the ranks.
    """
    width = dtype.itemsize
    part = max(size // width, 1) if collective == "send_recv" else max(size // width // ranks, 1)
    count = part if collective == "send_recv" else part * ranks

    def empty(elements: int) -> torch.Tensor:
        return torch.empty(elements, dtype=dtype, device=device)

    if collective == "all_reduce":
        both = empty(count)
        _fill(both, _alone(both, rank, ranks, 0))
        return Exchange(count, count * width, lambda: _all_reduce(both), lambda: _holds(both, _numbers(both, 0)), both)
    if collective == "all_gather":
        given, got = empty(part), empty(count)
        _fill(given, _numbers(given, rank * _BY_RANK))
        return Exchange(
            count,
            count * width,
            lambda: _ALL_GATHER(got, given),
            lambda: all(_holds(got[r * part : (r + 1) * part], _numbers(got, r * _BY_RANK)) for r in range(ranks)),
            given,
        )
    if collective == "reduce_scatter":
        given, got = empty(count), empty(part)
        for r in range(ranks):
            _fill(given[r * part : (r + 1) * part], _alone(given, rank, ranks, r * _BY_RANK))
        return Exchange(
            count,
            count * width,
            lambda: _REDUCE_SCATTER(got, given),
            lambda: _holds(got, _numbers(got, rank * _BY_RANK)),
            given,
        )
    if collective == "all_to_all":
        given, got = empty(count), empty(count)
        for r in range(ranks):
            _fill(given[r * part : (r + 1) * part], _numbers(given, rank * _BY_RANK + r * _BY_PART))
        return Exchange(
            count,
            count * width,
            lambda: dist.all_to_all_single(got, given),
            lambda: all(
                _holds(got[r * part : (r + 1) * part], _numbers(got, r * _BY_RANK + rank * _BY_PART))
                for r in range(ranks)
            ),
            given,
        )
    after, before = (rank + 1) % ranks, (rank - 1) % ranks
    return between(after, before, part, dtype, device, rank)


def between(to: int, of: int, count: int, dtype: torch.dtype, device: torch.device, rank: int) -> Exchange:
    """Return sending to one rank and receiving from another, or the same, at once."""
    given, got = (torch.empty(count, dtype=dtype, device=device) for _ in range(2))
    _fill(given, _numbers(given, rank * _BY_RANK))

    def run() -> None:
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, given, to), dist.P2POp(dist.irecv, got, of)]):
            work.wait()

    return Exchange(count, count * dtype.itemsize, run, lambda: _holds(got, _numbers(got, of * _BY_RANK)), given)


def _all_reduce(tensor: torch.Tensor) -> None:
    dist.all_reduce(tensor)


def _numbers(like: torch.Tensor, shift: int) -> torch.Tensor:
    """Return one period of a pattern: 1 to PERIOD, shifted."""
    numbers = (torch.arange(PERIOD, device=like.device) + shift) % PERIOD + 1
    return numbers.to(like.dtype)


def _alone(like: torch.Tensor, rank: int, ranks: int, shift: int) -> torch.Tensor:
    """Return one period of what a rank gives to a sum that is `_numbers`: every ranks-th element, and else zero."""
    given = torch.zeros(PERIOD * ranks, dtype=like.dtype, device=like.device)
    given[rank::ranks] = _numbers(like, shift).repeat(ranks)[rank::ranks]
    return given


def _fill(tensor: torch.Tensor, period: torch.Tensor) -> None:
    whole = len(tensor) // len(period) * len(period)
    tensor[:whole].view(-1, len(period)).copy_(period)
    tensor[whole:] = period[: len(tensor) - whole]


def _holds(tensor: torch.Tensor, period: torch.Tensor) -> bool:
    whole = len(tensor) // len(period) * len(period)
    rest = period[: len(tensor) - whole]
    return bool((tensor[:whole].view(-1, len(period)) == period).all()) and bool((tensor[whole:] == rest).all())
