"""A language model trained in float32, on tokens from a loader. --fixed: bf16, by autocast."""

import torch
import torch.nn.functional as F
from clock import Clock, options
from networks import Language
from torch.utils.data import DataLoader, TensorDataset

args = options(steps=60)
on_gpu = args.device == "cuda"
vocabulary, width, layers, batch, length = (256, 64, 2, 2, 32) if args.tiny else (16384, 768, 8, 8, 512)
model = Language(vocabulary, width, layers).to(args.device)
optimizer = torch.optim.AdamW(model.parameters(), 3e-4, fused=True)
data = TensorDataset(torch.randint(vocabulary, (batch * (args.steps + 1), length)))
clock = Clock(args)
for (tokens,) in DataLoader(data, batch, pin_memory=on_gpu, num_workers=0 if args.tiny else 2):
    tokens = tokens.to(args.device, non_blocking=True)
    with torch.autocast(args.device, torch.bfloat16, enabled=args.fixed):  # the cause
        scores = model(tokens)  # the cause
        loss = F.cross_entropy(scores.flatten(0, 1), tokens.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if not clock.step():
        break
