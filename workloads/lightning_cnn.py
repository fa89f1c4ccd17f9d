"""Train a convolutional network with Lightning's Trainer, well, or with one of the mistakes in FAULTS.

    python workloads/lightning_cnn.py                                        one process
    torchrun --nproc-per-node 2 workloads/lightning_cnn.py                   Lightning joins torchrun's ranks
    torchrun --nproc-per-node 2 workloads/lightning_cnn.py --fault validates_often

Needs Lightning: pip install 'lightning>=2.4'. The pictures are made up in memory: a pattern for each class, and noise;
each takes --read-ms to read, as from storage.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own custom
from parts.job import announce, options, read
from parts.metrics import count_brightness
from parts.networks import small_network
from parts.pictures import Patterns
from torch import Tensor
from torch.utils.data import DataLoader

try:
    import lightning
    from lightning.pytorch.callbacks import Callback
except ImportError:
    sys.exit("lightning_cnn.py needs Lightning: pip install 'lightning>=2.4'")

# What can be planted, and the dlprof rule that must notice it. plant() has a line for each.
NEEDS = {"lightning": "pip install 'lightning>=2.4'"}
FAULTS = {
    "no_workers": "input_wait",  # the loader has no workers: Lightning warns of it, and nobody reads that
    "python_callback": "host_bound",  # a callback counts in pure Python after every batch
    "reads_every_step": "host_sync",  # the loss is read in every step, and the GPU runs dry
    "validates_often": "validation_share",  # every 10 steps
}
NEEDS_GPU = ("reads_every_step",)  # a CPU's results are there as soon as they are asked for


def plant(args: argparse.Namespace) -> None:
    """Change the settings of a healthy run into those of a run with args.fault. No other code asks for the fault."""
    healthy: dict[str, Any] = {
        "callbacks": [],
        "check_loss": lambda _loss: None,
        "validation": {"limit_val_batches": 0},
    }
    faulty: dict[str, dict[str, Any]] = {
        "no_workers": {"workers": 0},
        "python_callback": {"callbacks": [Counting()]},
        "reads_every_step": {"check_loss": check_loss},
        "validates_often": {"validation": {"val_check_interval": 10, "limit_val_batches": 5}},
    }
    vars(args).update(healthy | faulty.get(args.fault, {}))


class Counting(Callback):
    """Counts, in Python, how often each brightness was seen."""

    def __init__(self) -> None:
        self.seen: dict[int, int] = {}

    def on_train_batch_end(self, _trainer: Any, _module: Any, _outputs: Any, batch: Any, _number: int) -> None:
        """Go through the batch pixel by pixel, as nobody should."""
        count_brightness(batch[0], self.seen)


def check_loss(loss: Tensor) -> None:
    if loss.item() > 100:
        raise ValueError(f"the loss is {loss.item()}")


# On a CPU core a step then takes some 200 ms, and its one exchange little of that. A GPU's width keeps it busy.
DEFAULTS = {
    "cpu": {"width": 16, "size": 32, "batch_size": 128, "workers": 2},
    "cuda": {"width": 128, "size": 128, "batch_size": 128, "workers": 8},
}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the options, with those of the fault planted; a usage error exits with 2."""
    parser = options(__doc__, FAULTS)
    add = parser.add_argument
    add("--width", type=int, help="of the first layer")
    add("--size", type=int, help="of a picture, pixels")
    add("--batch-size", type=int, help="pictures a rank and step")
    add("--workers", type=int, help="loader workers a rank")
    add("--read-ms", type=float, default=1.5, help="a read waits so long for storage (default: 1.5)")
    add("--steps", type=int, default=100, help="(default: 100)")
    add("--lr", type=float, default=0.05, help="learning rate (default: 0.05)")
    add("--log-every", type=int, default=20, metavar="N", help="steps (default: 20)")
    args = read(parser, argv, DEFAULTS, NEEDS_GPU)
    plant(args)
    return args


class Classifier(lightning.LightningModule):
    """A convolutional network, and what Lightning calls to train it."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.args = args
        self.network = small_network(args.width, Patterns.classes)
        self.network.to(memory_format=torch.channels_last)  # type: ignore[call-overload] # absent in torch's hints

    def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> Tensor:
        """Return the loss of a batch."""
        loss = F.cross_entropy(self.network(batch[0].to(memory_format=torch.channels_last)), batch[1])
        self.args.check_loss(loss)
        if number % self.args.log_every == self.args.log_every - 1:
            self.print(f"step {number + 1}  loss {loss.item():.4f}", flush=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], _number: int) -> None:
        """Note how many of a batch are right."""
        right = (self.network(batch[0].to(memory_format=torch.channels_last)).argmax(1) == batch[1]).float().mean()
        self.log("accuracy", right, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return SGD."""
        return torch.optim.SGD(self.parameters(), self.args.lr, momentum=0.9, fused=True)


def build_loader(args: argparse.Namespace, shuffle: bool) -> DataLoader[tuple[Tensor, int]]:
    """Return the pictures in batches; Lightning gives each rank its share."""
    return DataLoader(
        Patterns(args.steps * args.batch_size * args.world, args.size, seed=0, read_ms=args.read_ms),
        args.batch_size,
        shuffle=shuffle,
        num_workers=args.workers,
        persistent_workers=args.workers > 0,
        pin_memory=args.device == "cuda",
        drop_last=True,
    )


def main() -> None:
    args = parse()
    lightning.seed_everything(args.seed, verbose=False)
    announce(args, f"{args.world} ranks on {args.device}")
    trainer = lightning.Trainer(
        accelerator="cpu" if args.device == "cpu" else "gpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
        strategy="ddp" if args.world > 1 else "auto",
        max_steps=args.steps,
        max_epochs=1,
        callbacks=args.callbacks,
        enable_checkpointing=False,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **args.validation,
    )
    trainer.fit(Classifier(args), build_loader(args, shuffle=True), build_loader(args, shuffle=False))


if __name__ == "__main__":
    main()
