"""Loss and accuracy are read in every step. --fixed: added up on the GPU, and read at the end."""

import torch
import torch.nn.functional as F
from clock import Clock, options
from networks import Language

args = options(steps=80)
width, layers, batch, length = (64, 2, 2, 16) if args.tiny else (512, 12, 48, 128)
model = Language(1000, width, layers).to(args.device)
tokens = torch.randint(1000, (batch, length), device=args.device)
wanted = tokens.flatten()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
losses: torch.Tensor | float = 0.0
right: torch.Tensor | float = 0.0
clock = Clock(args)
while True:
    with torch.autocast(args.device, torch.bfloat16):
        scores = model(tokens).flatten(0, 1)
        loss = F.cross_entropy(scores, wanted)
    hits = (scores.argmax(1) == wanted).float().mean()
    losses += loss.detach() if args.fixed else loss.item()  # the cause
    right += hits if args.fixed else hits.item()  # the cause
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if not clock.step():
        break
print(f"loss {float(losses) / args.steps:.3f}, accuracy {float(right) / args.steps:.3f}")
