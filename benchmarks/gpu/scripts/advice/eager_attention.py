"""transformers' eager attention at a length of 2,048. --fixed: attn_implementation="sdpa"."""

import torch
from clock import Clock, options
from transformers import AutoModelForCausalLM, GPT2Config

args = options(steps=60)
width, layers, batch, length = (64, 2, 2, 64) if args.tiny else (768, 8, 4, 2048)
heads = max(1, width // 64)
config = GPT2Config(vocab_size=8192, n_positions=length, n_embd=width, n_layer=layers, n_head=heads, attn_pdrop=0.0)
kind = "sdpa" if args.fixed else "eager"
model = AutoModelForCausalLM.from_config(config, attn_implementation=kind)  # the cause
model.to(args.device)
tokens = torch.randint(8192, (batch, length), device=args.device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
clock = Clock(args)
while True:
    with torch.autocast(args.device, torch.bfloat16):
        loss = model(tokens, labels=tokens).loss  # the cause
    optimizer.zero_grad()
    loss.backward()  # the cause
    optimizer.step()
    if not clock.step():
        break
