"""All-to-alls of unequal pieces, and the way back of their gradients."""

from __future__ import annotations

import torch
from parts.exchanges import to_owners
from torch import distributed as dist
from torch.multiprocessing.spawn import spawn

GIVE = ((1, 2), (3, 1))  # rows of each rank for each


def _exchange(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    give, take = GIVE[rank], [GIVE[other][rank] for other in range(2)]
    x = torch.arange(sum(give), dtype=torch.float32).add(10 * rank).unsqueeze(1).requires_grad_()
    came = to_owners(x, give, take)
    (came * (rank + 1)).sum().backward()  # type: ignore[no-untyped-call]
    torch.save((came.detach().flatten(), x.grad), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_rows_go_to_their_owners_and_gradients_come_back(tmp_path: object) -> None:
    spawn(_exchange, (str(tmp_path),), nprocs=2)  # type: ignore[no-untyped-call]
    (first, its), (second, others) = (torch.load(f"{tmp_path}/{rank}.pt") for rank in range(2))
    assert first.tolist() == [0, 10, 11, 12]
    assert second.tolist() == [1, 2, 13]
    # What rank 1 got counts twice.
    assert its.flatten().tolist() == [1, 2, 2]
    assert others.flatten().tolist() == [1, 1, 1, 2]
