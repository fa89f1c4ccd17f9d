"""LoRA by hand, with transformers' Trainer, which empties PyTorch's cache in every step. --fixed: it does not."""

import tempfile
from typing import Any

import torch
from clock import Clock, options
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

args = options(steps=60)
width, layers, batch, length = (64, 2, 2, 32) if args.tiny else (1024, 8, 8, 512)


class Tokens(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return batch * (args.steps + 1)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        tokens = torch.arange(number, number + length) % 8000
        return {"input_ids": tokens, "labels": tokens}


class Adapted(nn.Module):
    """A layer that stays as it is, and the product of two thin matrices that learns."""

    def __init__(self, layer: nn.Module, rank: int = 8) -> None:
        super().__init__()
        self.layer = layer
        self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.up(self.down(x))


class Timed(TrainerCallback):
    def __init__(self) -> None:
        self.clock = Clock(args)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.clock.step()


heads = max(1, width // 64)
config = LlamaConfig(
    vocab_size=8000,
    hidden_size=width,
    intermediate_size=3 * width,
    num_hidden_layers=layers,
    num_attention_heads=heads,
    num_key_value_heads=heads,
)
model = LlamaForCausalLM(config).requires_grad_(False)
for layer in model.model.layers:
    layer.self_attn.q_proj, layer.self_attn.v_proj = Adapted(layer.self_attn.q_proj), Adapted(layer.self_attn.v_proj)
with tempfile.TemporaryDirectory() as folder:
    settings = TrainingArguments(
        folder,
        per_device_train_batch_size=batch,
        max_steps=args.steps,
        bf16=args.device == "cuda",
        use_cpu=args.device == "cpu",
        torch_empty_cache_steps=None if args.fixed else 1,  # the cause
        logging_steps=50,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(model, settings, train_dataset=Tokens(), callbacks=[Timed()])  # the cause
    trainer.train()  # the cause
