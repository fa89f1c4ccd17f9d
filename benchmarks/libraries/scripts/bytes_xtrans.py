"""Byte-level language model of log files, x-transformers decoder."""
import math
import random
import time

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset
from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

SEQ_LEN = 1024
BATCH = 2
STEPS = 85
WARMUP = 5
CLIP = 0.5


def make_logs(lines=6000):
    rng = random.Random(5)
    services = ["auth", "billing", "search", "mail", "cache"]
    levels = ["INFO", "INFO", "INFO", "WARN", "ERROR"]
    verbs = ["started", "finished", "retry", "timeout", "accepted", "closed"]
    out = []
    clock = 0
    for _ in range(lines):
        clock += rng.randint(1, 900)
        out.append(
            f"{clock:08d} {rng.choice(levels)} {rng.choice(services)}[{rng.randint(100, 999)}]: "
            f"request {rng.choice(verbs)} in {rng.randint(1, 400)} ms"
        )
    return torch.frombuffer(bytearray("\n".join(out), "utf8"), dtype=torch.uint8)


class LogWindows(Dataset):
    """Random windows of SEQ_LEN + 1 bytes."""

    def __init__(self, data, windows):
        self.data = data
        gen = torch.Generator().manual_seed(9)
        self.starts = torch.randint(len(data) - SEQ_LEN - 1, (windows,), generator=gen)

    def __len__(self):
        return len(self.starts)

    def __getitem__(self, index):
        start = self.starts[index]
        return self.data[start : start + SEQ_LEN + 1].long()


def learning_rate(step, base=6e-4, warmup=20):
    if step < warmup:
        return base * (step + 1) / warmup
    progress = (step - warmup) / max(1, STEPS - warmup)
    return base * 0.5 * (1 + math.cos(math.pi * progress))


def build_model():
    decoder = Decoder(
        dim=128,
        depth=3,
        heads=4,
        attn_dim_head=32,
        rotary_pos_emb=True,
        use_rmsnorm=True,
    )
    network = TransformerWrapper(num_tokens=256, max_seq_len=SEQ_LEN, attn_layers=decoder)
    return AutoregressiveWrapper(network)


def main():
    torch.manual_seed(0)
    data = make_logs()
    dataset = LogWindows(data, STEPS * BATCH)
    loader = DataLoader(dataset, batch_size=BATCH, shuffle=True)
    model = build_model()
    count = sum(p.numel() for p in model.parameters())
    print(f"{len(data) / 1e3:.0f} kB of logs, {count / 1e6:.2f} M parameters")

    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1)
    marks = []
    model.train()
    for step, window in enumerate(loader):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        loss = model(window)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            value = loss.item()
            print(f"step {step:3d}  loss {value:.4f}  bits per byte {value / math.log(2):.3f}")
        marks.append(time.perf_counter())

    model.eval()
    prompt = data[:64].long()[None]
    with torch.no_grad():
        held_out = F.cross_entropy(model.net(prompt)[:, :-1].transpose(1, 2), prompt[:, 1:])
    steps = torch.tensor(marks, dtype=torch.float64).diff()[WARMUP:]
    print(f"loss on the first bytes {held_out.item():.3f}")
    print(f"final loss {loss.item():.4f}")
    print(f"{1000 * steps.mean().item():.1f} ms per step")


if __name__ == "__main__":
    main()
