"""Next-byte model of server logs, its matrices updated along orthogonalised momentum (Muon) and the rest by AdamW."""

import argparse
import time

import torch
import torch.nn.functional as F
from torch import nn

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalise(g, rounds=5):
    a, b, c = COEFFICIENTS
    x = g / (g.norm() + 1e-7)
    for _ in range(rounds):
        gram = x @ x.T  # the cause
        x = a * x + (b * gram + c * gram @ gram) @ x  # the cause
    return x


def orthogonalise_short_side(g, rounds=5):
    return orthogonalise(g.T, rounds).T if g.shape[0] > g.shape[1] else orthogonalise(g, rounds)


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.95, map=orthogonalise):  # noqa: A002
        super().__init__(params, {"lr": lr, "momentum": momentum})
        self.map = map

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                momentum = state["momentum"].lerp_(p.grad, 1 - group["momentum"])
                direction = self.map(p.grad.lerp(momentum, group["momentum"]))
                p.add_(direction, alpha=-group["lr"] * max(1, p.shape[0] / p.shape[1]) ** 0.5)


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.relu(self.up(self.norm2(x))).square())


class LogModel(nn.Module):
    def __init__(self, width=128, heads=4, depth=2):
        super().__init__()
        self.bytes, self.layers = nn.Embedding(256, width), nn.Sequential(*[Layer(width, heads) for _ in range(depth)])
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, 256)

    def forward(self, tokens):
        return self.head(self.norm(self.layers(self.bytes(tokens))))


def log_bytes(lines=20_000):
    g = torch.Generator().manual_seed(5)
    codes, times = torch.randint(200, 505, (lines,), generator=g), torch.randint(1, 9999, (lines,), generator=g)
    text = "".join(f"GET /item/{i % 977} {c} {t}ms\n" for i, (c, t) in enumerate(zip(codes.tolist(), times.tolist())))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=96)
    args = parser.parse_args()
    torch.manual_seed(0)
    data, model = log_bytes(), LogModel()
    matrices = [p for p in model.layers.parameters() if p.ndim == 2]
    inside = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in inside]
    optimizers = [
        Muon(matrices, map=orthogonalise_short_side if args.fixed else orthogonalise),
        torch.optim.AdamW(others, lr=3e-3),
    ]
    for step in range(args.steps):
        if step == 10:
            start = time.perf_counter()
        begin = torch.randint(len(data) - args.length - 1, (args.batch, 1))
        rows = data[begin + torch.arange(args.length + 1)]
        loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    print(f"{(time.perf_counter() - start) / (args.steps - 10) * 1e3:.2f} ms per step")
    print(f"loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
