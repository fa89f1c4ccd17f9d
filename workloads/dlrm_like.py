"""Train a click predictor, large tables of embeddings and a small network, well, or with one of FAULTS planted.

    python workloads/dlrm_like.py                                          one process
    torchrun --nproc-per-node 2 workloads/dlrm_like.py                     the tables shared out among the ranks
    torchrun --nproc-per-node 2 workloads/dlrm_like.py --fault python_ids

After Naumov et al., Deep Learning Recommendation Model for Personalization and Recommendation Systems, 2019. A rank
holds some of the tables and looks up in them for the samples of all ranks; an all-to-all brings each sample's features
home. The network is a copy on each rank (DistributedDataParallel). Whether a sample is clicked on depends on hidden
weights of its numbers and ids, so the loss falls. Plain PyTorch: any profiler can be pointed at it, and none is
imported.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - torch's own custom
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

# What can be planted, and the dlprof rule that must notice it. Each is one `if args.fault == ...` below.
FAULTS = {
    "host_tables": "exposed_copy",  # the tables stay in the host's memory: features and gradients cross PCIe
    "pageable": "pageable_copy",  # batches copied to the GPU from ordinary memory
    "python_ids": "host_bound",  # ids are hashed one by one, in Python, in the training loop
    "table_by_table": "small_collectives",  # an exchange for each table, and not one for all
    "uneven_tables": "straggler",  # the first rank holds all tables but one for each other rank
}
# What else a fault needs, to cost more than a little: more of the tables, and less of the network.
SHOWN_WITH = {"uneven_tables": "--width 32 --hidden 256 --batch-size 2048"}
NEEDS_GPU = ("host_tables", "pageable", "table_by_table")
NEEDS_TWO_RANKS = ("table_by_table", "uneven_tables")

DENSE = 13  # numbers of a sample, as in Criteo's logs


# ---- the clicks ----------------------------------------------------------------------------------------------------


class Clicks(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """Whole batches of made-up clicks: numbers, ids (tables × samples × ids a bag), whether it was clicked on.

    Ids are as uneven as real ones: some are far more common than others.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        # The same on every rank; samples are not.
        generator = torch.Generator().manual_seed(args.seed)
        self.dense = torch.randn(DENSE, generator=generator)
        self.sparse = torch.randn(args.tables, 64, generator=generator)

    def __len__(self) -> int:
        return int(self.args.steps)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        args = self.args
        generator = torch.Generator().manual_seed((args.seed + 1) * 1_000_003 + index * args.world + args.rank)
        numbers = torch.randn(args.batch_size, DENSE, generator=generator)
        shape = (args.tables, args.batch_size, args.bag)
        ids = (torch.rand(shape, generator=generator) ** 4 * args.rows).long()
        known = self.sparse.gather(1, (ids[:, :, 0] % 64))
        score = numbers @ self.dense / DENSE**0.5 + known.sum(0) / args.tables**0.5
        return numbers, ids, (score > 0).float()


# ---- the model -----------------------------------------------------------------------------------------------------


class ToOwners(torch.autograd.Function):
    """An all-to-all that gradients go back through: pieces of the first dimension, so many for and from each rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, give: Sequence[int], take: Sequence[int]) -> Tensor:
        """Return what the ranks have for this one, in their order."""
        ctx.give, ctx.take = give, take
        return exchange(x, give, take)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """Return each rank the gradients of what it sent."""
        return exchange(grads[0], ctx.take, ctx.give), None, None


to_owners: Callable[[Tensor, Sequence[int], Sequence[int]], Tensor] = ToOwners.apply


def exchange(x: Tensor, give: Sequence[int], take: Sequence[int]) -> Tensor:
    """Send each rank its rows, and give those that came, in the ranks' order."""
    came = x.new_empty(sum(take), *x.shape[1:])
    dist.all_to_all_single(came, x.contiguous(), list(take), list(give))
    return came


def mlp(*widths: int) -> nn.Sequential:
    """Return linear layers with ReLU between them."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Network(nn.Module):
    """What every rank has: it brings the numbers to the embeddings' width, and weighs all their products."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.bottom = mlp(DENSE, args.hidden, args.width)
        pairs = (args.tables + 1) * args.tables // 2
        self.top = mlp(args.width + pairs, args.hidden, args.hidden, 1)
        self.register_buffer("above", torch.tril_indices(args.tables + 1, args.tables + 1, -1), persistent=False)
        self.above: Tensor

    def forward(self, numbers: Tensor, features: Tensor) -> Tensor:
        """Return a logit a sample, of its numbers and features (samples × tables × width)."""
        x = self.bottom(numbers)
        all_of = torch.cat((x.unsqueeze(1), features), 1)
        products = all_of @ all_of.transpose(1, 2)
        logits: Tensor = self.top(torch.cat((x, products[:, self.above[0], self.above[1]]), 1))
        return logits.squeeze(1)


def share_out(tables: int, ranks: int, uneven: bool) -> list[list[int]]:
    """Return the tables that each rank holds."""
    if uneven:
        first = tables - (ranks - 1)
        return [list(range(first)), *([table] for table in range(first, tables))]
    return [list(range(rank, tables, ranks)) for rank in range(ranks)]


def look_up(bags: nn.ModuleList, ids: Tensor, owners: list[list[int]], args: argparse.Namespace) -> Tensor:
    """Return features, samples × tables × width, of the ids (tables × samples × ids a bag) of this rank's samples."""
    held, counts = len(owners[args.rank]), [len(tables) for tables in owners]
    order = torch.tensor([table for tables in owners for table in tables], device=ids.device)
    samples = ids.shape[1]
    # Ids go to the rank that holds their table; of each table here come those of all ranks' samples.
    ids = exchange(ids[order], counts, [held] * args.world).view(args.world, held, samples, -1).transpose(0, 1)
    if args.fault == "host_tables":
        ids = ids.cpu()
    found = [bag(of_table.flatten(0, 1)) for bag, of_table in zip(bags, ids, strict=True)]
    if args.fault == "host_tables":
        found = [features.to(args.device) for features in found]
    if args.fault == "table_by_table":
        even = [samples] * args.world
        came = [to_owners(features, even, even).view(args.world, samples, -1) for features in found]
        features = torch.stack(came, 1).flatten(0, 1)
    else:
        together = torch.stack(found).view(held, args.world, samples, -1).transpose(0, 1).flatten(0, 2)
        take = [count * samples for count in counts]
        features = to_owners(together, [held * samples] * args.world, take).view(-1, samples, args.width)
    in_order: Tensor = features[order.argsort()].transpose(0, 1)
    return in_order


# ---- one rank ------------------------------------------------------------------------------------------------------

# On two CPU cores a step then takes some 120 ms; on GPUs the tables take 12 GB, and AdaGrad's sums as much again.
DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {"tables": 8, "rows": 20_000, "width": 16, "bag": 8, "hidden": 512, "batch_size": 4096, "workers": 0},
    "cuda": {
        "tables": 24,
        "rows": 1_000_000,
        "width": 128,
        "bag": 20,
        "hidden": 1024,
        "batch_size": 8192,
        "workers": 6,
    },
}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line and fill what it leaves open with the device's DEFAULTS; a usage error exits with 2."""
    faults = "\n".join(f"  {name:22s} must be noticed by {rule}" for name, rule in FAULTS.items())
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0],
        epilog=f"faults:\n{faults}\n\nOptions without a stated default have one for the CPU and one for GPUs.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tables", type=int, help="of embeddings, in all")
    parser.add_argument("--rows", type=int, help="of a table")
    parser.add_argument("--width", type=int, help="of an embedding")
    parser.add_argument("--bag", type=int, help="ids of a sample in each table; their embeddings are added up")
    parser.add_argument("--hidden", type=int, help="width of the network's layers")
    parser.add_argument("--batch-size", type=int, help="samples a rank and step")
    parser.add_argument("--workers", type=int, help="loader workers a rank")
    parser.add_argument("--steps", type=int, default=100, help="(default: 100)")
    parser.add_argument("--lr", type=float, default=0.02, help="learning rate (default: 0.02)")
    parser.add_argument("--log-every", type=int, default=20, metavar="N", help="steps (default: 20)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fault", choices=list(FAULTS), help="plant this mistake")
    args = parser.parse_args(argv)

    # torchrun says who we are; without it we are the only rank.
    args.rank, args.world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    args.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    for name, value in DEFAULTS[args.device].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.fault in NEEDS_GPU and args.device != "cuda":
        parser.error(f"--fault {args.fault} needs a GPU: a CPU rank copies nothing, and gloo's trace tells no sizes")
    if args.fault in NEEDS_TWO_RANKS and args.world < 2:
        parser.error(f"--fault {args.fault} needs two ranks: torchrun --nproc-per-node 2 {parser.prog} ...")
    if args.tables < args.world:
        parser.error(f"--tables {args.tables} cannot be shared out among {args.world} ranks")
    if args.fault == "table_by_table" and args.tables % args.world:
        parser.error(f"--fault table_by_table needs as many tables on each rank: --tables {args.tables} are not")
    return args


def main() -> None:
    args = parse()
    if args.device == "cuda":
        torch.cuda.set_device(args.local_rank)
    if args.world == 1:
        os.environ.setdefault("MASTER_ADDR", "localhost")
        os.environ.setdefault("MASTER_PORT", "0")
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo", rank=args.rank, world_size=args.world)
    owners = share_out(args.tables, args.world, uneven=args.fault == "uneven_tables")
    torch.manual_seed(args.seed)  # the network is the same on every rank
    network: nn.Module = Network(args).to(args.device)
    if args.world > 1:
        network = DistributedDataParallel(network, [args.local_rank] if args.device == "cuda" else None)
    bags = nn.ModuleList(
        nn.EmbeddingBag(args.rows, args.width, mode="sum", sparse=True, _weight=torch.randn(args.rows, args.width) / 16)
        for _ in owners[args.rank]
    )
    bags.to("cpu" if args.fault == "host_tables" else args.device)
    if args.rank == 0:
        print(
            f"{args.tables} tables of {args.rows:,} × {args.width}, {[len(tables) for tables in owners]} a rank, on"
            f" {args.device}, batch {args.batch_size} a rank, fault: {args.fault or 'none'}",
            flush=True,
        )
    # Of a table, only the rows that were looked up have gradients.
    optimizers = [
        torch.optim.AdamW(network.parameters(), args.lr / 10, fused=True),
        torch.optim.Adagrad(bags.parameters(), args.lr),
    ]

    loader = DataLoader(
        Clicks(args),
        batch_size=None,  # the data set gives whole batches
        num_workers=args.workers,
        pin_memory=args.device == "cuda" and args.fault != "pageable",
        persistent_workers=args.workers > 0,
    )
    logged_at = time.perf_counter()
    for step, (numbers, ids, clicked) in enumerate(loader, start=1):
        # Rows are found by a hash, as there are more ids than rows.
        if args.fault == "python_ids":
            hashed = [number * 2_654_435_761 % args.rows for number in ids.flatten().tolist()]
            ids = torch.tensor(hashed).view_as(ids)
        numbers, ids, clicked = (x.to(args.device, non_blocking=True) for x in (numbers, ids, clicked))
        if args.fault != "python_ids":
            ids = ids * 2_654_435_761 % args.rows
        logits = network(numbers, look_up(bags, ids, owners, args))
        loss = F.binary_cross_entropy_with_logits(logits, clicked)
        loss.backward()  # type: ignore[no-untyped-call]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        if step % args.log_every == 0 and args.rank == 0:
            value = loss.item()  # waits for the device, so not at every step
            now = time.perf_counter()
            rate = args.log_every * args.batch_size * args.world / (now - logged_at)
            print(f"step {step}  loss {value:.4f}  {rate:,.0f} samples/s", flush=True)
            logged_at = now

    # Before its group: the other way round, PyTorch 2.13 and gloo's threads may wait for each other for ever.
    del network
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
