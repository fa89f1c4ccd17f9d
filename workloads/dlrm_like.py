"""Train a click predictor, large tables of embeddings and a small network, well, or with one of FAULTS planted.

    python workloads/dlrm_like.py                                          one process
    torchrun --nproc-per-node 2 workloads/dlrm_like.py                     the tables shared out among the ranks
    torchrun --nproc-per-node 2 workloads/dlrm_like.py --fault python_ids

After Naumov et al., Deep Learning Recommendation Model for Personalization and Recommendation Systems, 2019. A rank
holds some of the tables and looks up in them for the samples of all ranks; an all-to-all brings each sample's features
home. The network is a copy on each rank (DistributedDataParallel). Whether a sample is clicked on depends on hidden
weights of its numbers and ids, so the loss falls.
"""

from __future__ import annotations

import argparse
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own custom
from parts.exchanges import exchange, to_owners
from parts.job import Log, announce, options, process_group, read
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

# ---- the faults ----------------------------------------------------------------------------------------------------

# What can be planted, and the dlprof rule that must notice it. plant() has a line for each.
FAULTS = {
    "host_tables": "host_embedding",  # the tables stay in the host's memory: features and gradients cross PCIe
    "pageable": "pageable_copy",  # batches copied to the GPU from ordinary memory
    "python_ids": "host_bound",  # ids are hashed one by one, in Python, in the training loop
    "table_by_table": "small_collectives",  # an exchange for each table, and not one for all
    "uneven_tables": "straggler",  # the first rank holds all tables but one for each other rank
}
# What else a fault needs, to cost more than a little: more of the tables, and less of the network.
SHOWN_WITH = {"uneven_tables": "--width 32 --hidden 256 --batch-size 2048"}
NEEDS_GPU = ("host_tables", "pageable", "table_by_table")  # a CPU rank copies nothing, and gloo's trace tells no sizes
NEEDS_TWO_RANKS = ("table_by_table", "uneven_tables")


def plant(args: argparse.Namespace) -> None:
    """Change the settings of a healthy run into those of a run with args.fault. No other code asks for the fault."""
    healthy: dict[str, Any] = {"tables_on": args.device, "pin_memory": args.device == "cuda", "share_out": share_out}
    healthy |= {"on_host": lambda ids, _rows: ids, "on_device": hash_ids, "send_home": all_at_once}
    faulty: dict[str, dict[str, Any]] = {
        "host_tables": {"tables_on": "cpu"},
        "pageable": {"pin_memory": False},
        "python_ids": {"on_host": hash_one_by_one, "on_device": lambda ids, _rows: ids},
        "table_by_table": {"send_home": table_by_table},
        "uneven_tables": {"share_out": share_out_unevenly},
    }
    vars(args).update(healthy | faulty.get(args.fault, {}))


def hash_one_by_one(ids: Tensor, rows: int) -> Tensor:
    return torch.tensor([number * 2_654_435_761 % rows for number in ids.flatten().tolist()]).view_as(ids)


def table_by_table(found: list[Tensor], _counts: list[int], args: argparse.Namespace) -> Tensor:
    """Return what all_at_once returns, after an exchange for each table; all ranks must hold as many."""
    even = [len(found[0]) // args.world] * args.world
    came = [to_owners(features, even, even).view(args.world, even[0], -1) for features in found]
    return torch.stack(came, 1).flatten(0, 1)


def share_out_unevenly(tables: int, ranks: int) -> list[list[int]]:
    first = tables - (ranks - 1)
    return [list(range(first)), *([table] for table in range(first, tables))]


# ---- the clicks ----------------------------------------------------------------------------------------------------

DENSE = 13  # numbers of a sample, as in Criteo's logs


class Clicks(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """Whole batches of made-up clicks: numbers, ids (tables × samples × ids a bag), whether it was clicked on.

    Ids are as uneven as real ones: some are far more common than others.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.steps, self.rank, self.world, self.seed = args.steps, args.rank, args.world, args.seed
        self.shape, self.rows = (args.tables, args.batch_size, args.bag), args.rows
        # The same on every rank; samples are not.
        generator = torch.Generator().manual_seed(args.seed)
        self.dense = torch.randn(DENSE, generator=generator)
        self.sparse = torch.randn(args.tables, 64, generator=generator)

    def __len__(self) -> int:
        return int(self.steps)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed((self.seed + 1) * 1_000_003 + index * self.world + self.rank)
        numbers = torch.randn(self.shape[1], DENSE, generator=generator)
        ids = (torch.rand(self.shape, generator=generator) ** 4 * self.rows).long()
        known = self.sparse.gather(1, (ids[:, :, 0] % 64))
        score = numbers @ self.dense / DENSE**0.5 + known.sum(0) / self.shape[0] ** 0.5
        return numbers, ids, (score > 0).float()


def hash_ids(ids: Tensor, rows: int) -> Tensor:
    """Return the row of each id, which a hash finds: there are more ids than rows."""
    return ids * 2_654_435_761 % rows


# ---- the model -----------------------------------------------------------------------------------------------------


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


def share_out(tables: int, ranks: int) -> list[list[int]]:
    """Return the tables that each rank holds."""
    return [list(range(rank, tables, ranks)) for rank in range(ranks)]


def look_up(bags: nn.ModuleList, ids: Tensor, owners: list[list[int]], args: argparse.Namespace) -> Tensor:
    """Return features, samples × tables × width, of the ids (tables × samples × ids a bag) of this rank's samples."""
    held, counts = len(owners[args.rank]), [len(tables) for tables in owners]
    order = torch.tensor([table for tables in owners for table in tables], device=ids.device)
    # Ids go to the rank that holds their table; of each table here come those of all ranks' samples.
    ids = exchange(ids[order], counts, [held] * args.world).view(args.world, held, ids.shape[1], -1).transpose(0, 1)
    ids = ids.to(args.tables_on)
    found = [bag(of_table.flatten(0, 1)).to(args.device) for bag, of_table in zip(bags, ids, strict=True)]
    in_order: Tensor = args.send_home(found, counts, args)[order.argsort()].transpose(0, 1)
    return in_order


def all_at_once(found: list[Tensor], counts: list[int], args: argparse.Namespace) -> Tensor:
    """Send each rank the features of its samples, and return those of this rank's: tables × samples × width.

    `found` are the features of all ranks' samples in each table here. The returned tables stand in the order of the
    ranks that hold them, `counts` of them.
    """
    samples = len(found[0]) // args.world
    together = torch.stack(found).view(len(found), args.world, samples, -1).transpose(0, 1).flatten(0, 2)
    take = [count * samples for count in counts]
    return to_owners(together, [len(found) * samples] * args.world, take).view(-1, samples, args.width)


# ---- the options ---------------------------------------------------------------------------------------------------

# On two CPU cores a step then takes some 120 ms; on GPUs the tables take 12 GB, and AdaGrad's sums as much again.
DEFAULTS = {
    "cpu": {"tables": 8, "rows": 20_000, "width": 16, "bag": 8, "hidden": 512, "batch_size": 4096, "workers": 0},
    "cuda": {"tables": 24, "rows": 1_000_000, "width": 128, "bag": 20, "hidden": 1024}
    | {"batch_size": 8192, "workers": 6},
}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the options, with those of the fault planted; a usage error exits with 2."""
    parser = options(__doc__, FAULTS)
    add = parser.add_argument
    add("--tables", type=int, help="of embeddings, in all")
    add("--rows", type=int, help="of a table")
    add("--width", type=int, help="of an embedding")
    add("--bag", type=int, help="ids of a sample in each table; their embeddings are added up")
    add("--hidden", type=int, help="width of the network's layers")
    add("--batch-size", type=int, help="samples a rank and step")
    add("--workers", type=int, help="loader workers a rank")
    add("--steps", type=int, default=100, help="(default: 100)")
    add("--lr", type=float, default=0.02, help="learning rate (default: 0.02)")
    add("--log-every", type=int, default=20, metavar="N", help="steps (default: 20)")
    args = read(parser, argv, DEFAULTS, NEEDS_GPU, NEEDS_TWO_RANKS)
    plant(args)
    if args.tables < args.world:
        parser.error(f"--tables {args.tables} cannot be shared out among {args.world} ranks")
    if args.send_home is table_by_table and args.tables % args.world:
        parser.error(f"--fault table_by_table needs as many tables on each rank: --tables {args.tables} are not")
    return args


# ---- training: one rank --------------------------------------------------------------------------------------------


def train(args: argparse.Namespace) -> None:
    owners = args.share_out(args.tables, args.world)
    torch.manual_seed(args.seed)  # the network is the same on every rank
    network: nn.Module = Network(args).to(args.device)
    if args.world > 1:
        network = DistributedDataParallel(network, args.device_ids)
    bags = nn.ModuleList(
        nn.EmbeddingBag(args.rows, args.width, mode="sum", sparse=True, _weight=torch.randn(args.rows, args.width) / 16)
        for _ in owners[args.rank]
    )
    bags.to(args.tables_on)
    announce(
        args,
        f"{args.tables} tables of {args.rows:,} × {args.width}, {[len(tables) for tables in owners]} a rank, on"
        f" {args.device}, batch {args.batch_size} a rank",
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
        pin_memory=args.pin_memory,
        persistent_workers=args.workers > 0,
    )
    log = Log(args, "samples", args.batch_size * args.world)
    for step, (numbers, ids, clicked) in enumerate(loader, start=1):
        ids = args.on_host(ids, args.rows)
        numbers, ids, clicked = (x.to(args.device, non_blocking=True) for x in (numbers, ids, clicked))
        ids = args.on_device(ids, args.rows)
        logits = network(numbers, look_up(bags, ids, owners, args))
        loss = F.binary_cross_entropy_with_logits(logits, clicked)
        loss.backward()  # type: ignore[no-untyped-call]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        log.step(step, loss)


def main() -> None:
    args = parse()
    with process_group(args):
        train(args)


if __name__ == "__main__":
    main()
