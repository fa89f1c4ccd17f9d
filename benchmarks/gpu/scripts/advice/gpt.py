"""GPT-2, as large as its tokenizer says. --fixed: the scores have 47 columns more, a multiple of 64, which are cut."""

import math

import torch
import torch.nn.functional as F
from clock import Clock, options
from torch import Tensor, nn

args = options(steps=70)
vocabulary, width, layers, batch, length = (257, 64, 2, 2, 32) if args.tiny else (50257, 768, 4, 16, 1024)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.c_attn(self.ln_1(x)).unflatten(2, (3, -1, 64)).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.c_proj(found.transpose(1, 2).flatten(2))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.h = nn.Sequential(*(Block() for _ in range(layers)))
        self.ln_f, self.lm_head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)  # the cause
        nn.init.normal_(self.lm_head.weight, std=0.02)
        if args.fixed:
            rows = math.ceil(vocabulary / 64) * 64
            self.lm_head.weight = nn.Parameter(F.pad(self.lm_head.weight.detach(), (0, 0, 0, rows - vocabulary)))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        return self.lm_head(self.ln_f(self.h(x)))[..., :vocabulary]  # the cause


def groups(model: nn.Module, decay: float = 0.1) -> list[dict[str, object]]:
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    return [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]


model = GPT().to(args.device)
optimizer = torch.optim.AdamW(groups(model), lr=6e-4, betas=(0.9, 0.95), fused=True)
tokens = torch.randint(vocabulary, (4, batch, length + 1), device=args.device)
clock = Clock(args)
step = 0
while True:
    texts = tokens[step % len(tokens)]
    with torch.autocast(args.device, torch.bfloat16):
        scores = model(texts[:, :-1])  # the cause
        loss = F.cross_entropy(scores.flatten(0, 1), texts[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()  # the cause
    optimizer.step()
    step += 1
    if not clock.step():
        break
