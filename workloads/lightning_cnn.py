"""Train a convolutional network with Lightning's Trainer, well, or with one of the mistakes in FAULTS.

    python workloads/lightning_cnn.py                                        one process
    torchrun --nproc-per-node 2 workloads/lightning_cnn.py                   Lightning joins torchrun's ranks
    torchrun --nproc-per-node 2 workloads/lightning_cnn.py --fault validates_often

Needs Lightning: pip install 'lightning>=2.4'. The pictures are made up in memory: a pattern for each class, and noise;
each takes --read-ms to read, as from storage. Lightning and PyTorch alone: any profiler can be pointed at it, and none
is imported.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own custom
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

try:
    import lightning
    from lightning.pytorch.callbacks import Callback
except ImportError:
    sys.exit("lightning_cnn.py needs Lightning: pip install 'lightning>=2.4'")

# What can be planted, and the dlprof rule that must notice it. Each is one `if args.fault == ...` below.
FAULTS = {
    "no_workers": "input_wait",  # the loader has no workers: Lightning warns of it, and nobody reads that
    "python_callback": "host_bound",  # a callback counts in pure Python after every batch
    "reads_every_step": "host_sync",  # the loss is read in every step, and the GPU runs dry
    "validates_often": "validation_share",  # every 10 steps
}
NEEDS_GPU = ("reads_every_step",)

CLASSES = 10


class Patterns(Dataset[tuple[Tensor, int]]):
    """Pictures, 3 × size × size: the pattern of a class, and as much noise."""

    def __init__(self, count: int, size: int, read_ms: float) -> None:
        self.count, self.size, self.read_ms = count, size, read_ms
        coarse = torch.randn(CLASSES, 3, 4, 4, generator=torch.Generator().manual_seed(0))
        self.patterns = F.interpolate(coarse, size=(size, size), mode="bilinear")

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        time.sleep(self.read_ms / 1000)
        generator = torch.Generator().manual_seed(index)
        return self.patterns[index % CLASSES] + torch.randn(
            3, self.size, self.size, generator=generator
        ), index % CLASSES


class Classifier(lightning.LightningModule):
    """Convolutions that halve the picture and double the width three times, and a linear layer."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.args = args
        layers: list[nn.Module] = []
        inputs = 3
        for outputs in (args.width, 2 * args.width, 4 * args.width):
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
            layers += [nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
            layers.append(nn.MaxPool2d(2))
            inputs = outputs
        self.network = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, CLASSES))

    def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> Tensor:
        """Return the loss of a batch."""
        loss = F.cross_entropy(self.network(batch[0]), batch[1])
        if self.args.fault == "reads_every_step" and loss.item() > 100:
            raise ValueError(f"batch {number}: the loss is {loss.item()}")
        if number % self.args.log_every == self.args.log_every - 1:
            self.print(f"step {number + 1}  loss {loss.item():.4f}", flush=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], _number: int) -> None:
        """Note how many of a batch are right."""
        right = (self.network(batch[0]).argmax(1) == batch[1]).float().mean()
        self.log("accuracy", right, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return SGD."""
        return torch.optim.SGD(self.parameters(), self.args.lr, momentum=0.9, fused=True)


class Counting(Callback):
    """Counts, in Python, how often each brightness was seen."""

    def __init__(self) -> None:
        self.seen: dict[int, int] = {}

    def on_train_batch_end(self, _trainer: Any, _module: Any, _outputs: Any, batch: Any, _number: int) -> None:
        """Go through the batch pixel by pixel, as nobody should."""
        for pixel in batch[0].flatten().tolist():
            brightness = round(10 * pixel)
            self.seen[brightness] = self.seen.get(brightness, 0) + 1


# On a CPU core a step then takes some 200 ms, and its one exchange little of that. A GPU's width keeps it busy.
DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {"width": 16, "size": 32, "batch_size": 128, "workers": 2},
    "cuda": {"width": 128, "size": 128, "batch_size": 128, "workers": 8},
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
    parser.add_argument("--width", type=int, help="of the first layer")
    parser.add_argument("--size", type=int, help="of a picture, pixels")
    parser.add_argument("--batch-size", type=int, help="pictures a rank and step")
    parser.add_argument("--workers", type=int, help="loader workers a rank")
    parser.add_argument("--read-ms", type=float, default=1.5, help="a read waits so long for storage (default: 1.5)")
    parser.add_argument("--steps", type=int, default=100, help="(default: 100)")
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate (default: 0.05)")
    parser.add_argument("--log-every", type=int, default=20, metavar="N", help="steps (default: 20)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fault", choices=list(FAULTS), help="plant this mistake")
    args = parser.parse_args(argv)

    args.world = int(os.environ.get("WORLD_SIZE", "1"))
    for name, value in DEFAULTS[args.device].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.fault in NEEDS_GPU and args.device != "cuda":
        parser.error(f"--fault {args.fault} needs a GPU: a CPU's results are there as soon as they are asked for")
    if args.fault == "no_workers":
        args.workers = 0
    return args


def main() -> None:
    args = parse()
    lightning.seed_everything(args.seed, verbose=False)
    callbacks: list[Callback] = []
    if args.fault == "python_callback":
        callbacks.append(Counting())
    trainer = lightning.Trainer(
        accelerator="cpu" if args.device == "cpu" else "gpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
        strategy="ddp" if args.world > 1 else "auto",
        max_steps=args.steps,
        max_epochs=1,
        val_check_interval=10 if args.fault == "validates_often" else None,
        limit_val_batches=5 if args.fault == "validates_often" else 0,
        callbacks=callbacks,
        enable_checkpointing=False,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    if trainer.is_global_zero:
        print(f"{args.world} ranks on {args.device}, fault: {args.fault or 'none'}", flush=True)
    loaders = [
        DataLoader(
            Patterns(args.steps * args.batch_size * args.world, args.size, args.read_ms),
            args.batch_size,
            shuffle=shuffle,
            num_workers=args.workers,
            persistent_workers=args.workers > 0,
            pin_memory=args.device == "cuda",
            drop_last=True,
        )
        for shuffle in (True, False)
    ]
    trainer.fit(Classifier(args), loaders[0], loaders[1])


if __name__ == "__main__":
    main()
