"""A language model with Lightning, which logs numbers that were read from the GPU. --fixed: logs tensors."""

import logging
import warnings
from typing import Any

import lightning
import torch
import torch.nn.functional as F
from clock import Clock, options
from lightning.pytorch.plugins.environments import LightningEnvironment
from networks import Language
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")
args = options(steps=80)
width, layers, batch, length = (64, 2, 2, 16) if args.tiny else (512, 12, 64, 128)


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model, self.clock = Language(1000, width, layers), Clock(args)

    def training_step(self, rows: tuple[Tensor], _: int) -> Tensor:
        tokens = rows[0]
        scores = self.model(tokens).flatten(0, 1)
        loss = F.cross_entropy(scores, tokens.flatten())
        right = (scores.argmax(1) == tokens.flatten()).float().mean()
        sure = scores.detach().softmax(1).amax(1).mean()
        for name, value in {"loss": loss.detach(), "right": right, "sure": sure}.items():
            self.log(name, value if args.fixed else value.item())  # the cause
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)

    def on_train_batch_end(self, *_: Any) -> None:
        self.clock.step()


data = TensorDataset(torch.randint(1000, (batch * (args.steps + 1), length)))
loader = DataLoader(data, batch, pin_memory=args.device == "cuda", num_workers=0 if args.tiny else 2)
trainer = lightning.Trainer(
    accelerator="gpu" if args.device == "cuda" else "cpu",
    devices=1,
    precision="bf16-mixed",
    max_steps=args.steps,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    plugins=[LightningEnvironment()],  # else it looks for MPI, and where that cannot start, the process ends
)
trainer.fit(Module(), loader)
