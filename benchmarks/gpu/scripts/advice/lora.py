"""A Llama is tuned by LoRA: small matrices beside its own. --fixed: its own weights need no gradients."""

import torch
from clock import Clock, options
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

args = options(steps=80)
width, layers, batch, length = (64, 2, 2, 32) if args.tiny else (2048, 8, 8, 1024)
config = LlamaConfig(
    vocab_size=256 if args.tiny else 8192,
    hidden_size=width,
    intermediate_size=width * 11 // 4,
    num_hidden_layers=layers,
    num_attention_heads=max(1, width // 128),
    num_key_value_heads=max(1, width // 128),
    max_position_embeddings=length,
    attn_implementation="sdpa",
    use_cache=False,
)


class LoraLinear(nn.Module):
    def __init__(self, base: nn.Linear, rank: int = 16, alpha: float = 32.0) -> None:
        super().__init__()
        self.base, self.scale = base, alpha / rank
        self.lora_down = nn.Linear(base.in_features, rank, bias=False, dtype=base.weight.dtype)
        self.lora_up = nn.Linear(rank, base.out_features, bias=False, dtype=base.weight.dtype)
        nn.init.zeros_(self.lora_up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.lora_up(self.lora_down(x)) * self.scale


def add_lora(model: nn.Module, targets: tuple[str, ...]) -> None:
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if name in targets:
                setattr(module, name, LoraLinear(child))


model = LlamaForCausalLM(config).to(torch.bfloat16)
model.requires_grad_(not args.fixed)  # the cause
add_lora(model, ("q_proj", "v_proj"))
model.to(args.device).train()
trained = [parameter for name, parameter in model.named_parameters() if "lora_" in name]
optimizer = torch.optim.AdamW(trained, lr=2e-4, fused=True)  # the cause
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, args.steps)
tokens = torch.randint(config.vocab_size, (4, batch, length), device=args.device)
clock = Clock(args)
step = 0
while True:
    texts = tokens[step % len(tokens)]
    loss = model(input_ids=texts, labels=texts).loss
    optimizer.zero_grad()
    loss.backward()  # the cause
    optimizer.step()
    scheduler.step()
    step += 1
    if not clock.step():
        break
