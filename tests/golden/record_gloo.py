"""Records gloo_rank0.json.gz and gloo_rank1.json.gz: two steps of DDP on the CPU, then one collective of every sort.

To record them anew: torchrun --nproc-per-node 2 tests/golden/record_gloo.py
"""

from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.data import DataLoader


def main() -> None:
    """Train two profiled steps and write this rank's trace beside this file."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader: DataLoader[torch.Tensor] = DataLoader(torch.randn(64, 64), batch_size=16)  # type: ignore[arg-type]
    with profile(
        activities=[ProfilerActivity.CPU], record_shapes=True, schedule=schedule(wait=0, warmup=1, active=3)
    ) as profiler:
        for batch, _ in zip(loader, range(3), strict=False):
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
            profiler.step()
        mine, all_of_them = torch.ones(10), torch.zeros(20)
        dist.all_gather_into_tensor(all_of_them, mine)
        dist.reduce_scatter_tensor(mine, all_of_them)
        dist.broadcast(mine, 0)
        dist.barrier()
        if rank == 0:
            dist.send(mine, 1)
        else:
            dist.recv(mine, 0)
    profiler.export_chrome_trace(str(Path(__file__).parent / f"gloo_rank{rank}.json.gz"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
