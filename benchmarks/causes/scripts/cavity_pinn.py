"""Physics-informed network for the unsteady flow in a lid-driven cavity (two-dimensional Navier-Stokes)."""

import argparse
import time

import torch
from torch import nn

REYNOLDS = 100.0


class Flow(nn.Module):
    """(x, y, t) -> (u, v, p)."""

    def __init__(self, width=64, depth=5):
        super().__init__()
        sizes = [3] + [width] * depth
        layers = []
        for a, b in zip(sizes[:-1], sizes[1:]):
            layers += [nn.Linear(a, b), nn.Tanh()]
        self.net = nn.Sequential(*layers, nn.Linear(width, 3))

    def forward(self, x, y, t):
        return self.net(torch.stack([x, y, t], -1)).unbind(-1)


def derivative(value, *coordinates):
    out = torch.autograd.grad(value, coordinates, torch.ones_like(value), create_graph=True)
    return out if len(out) > 1 else out[0]


class CavityProblem:
    def __init__(self, net):
        self.net = net

    def residuals(self, x, y, t):
        u, v, p = self.net(x, y, t)
        u_x, u_y, u_t = derivative(u, x), derivative(u, y), derivative(u, t)  # the cause
        v_x, v_y, v_t = derivative(v, x), derivative(v, y), derivative(v, t)  # the cause
        p_x, p_y = derivative(p, x), derivative(p, y)  # the cause
        u_xx, u_yy = derivative(derivative(u, x), x), derivative(derivative(u, y), y)  # the cause
        v_xx, v_yy = derivative(derivative(v, x), x), derivative(derivative(v, y), y)  # the cause
        return self.balance(u, v, u_x, u_y, u_t, v_x, v_y, v_t, p_x, p_y, u_xx + u_yy, v_xx + v_yy)

    def residuals_at_once(self, x, y, t):
        u, v, p = self.net(x, y, t)
        (u_x, u_y, u_t), (v_x, v_y, v_t), (p_x, p_y) = (
            derivative(u, x, y, t),
            derivative(v, x, y, t),
            derivative(p, x, y),
        )
        u_xx, u_yy, v_xx, v_yy = derivative(u_x, x), derivative(u_y, y), derivative(v_x, x), derivative(v_y, y)
        return self.balance(u, v, u_x, u_y, u_t, v_x, v_y, v_t, p_x, p_y, u_xx + u_yy, v_xx + v_yy)

    @staticmethod
    def balance(u, v, u_x, u_y, u_t, v_x, v_y, v_t, p_x, p_y, u_bent, v_bent):
        momentum_x = u_t + u * u_x + v * u_y + p_x - u_bent / REYNOLDS
        momentum_y = v_t + u * v_x + v * v_y + p_y - v_bent / REYNOLDS
        return momentum_x, momentum_y, u_x + v_y

    def walls(self, side, along, t):
        x = torch.where(side < 2, along, (side - 2).to(along))
        y = torch.where(side < 2, side.to(along), along)
        u, v, _ = self.net(x, y, t)
        lid = (side == 1).float()
        return ((u - lid) ** 2 + v**2).mean()


class Trainer:
    def __init__(self, problem, collocation, walls, fixed):
        self.problem, self.collocation, self.walls, self.fixed = problem, collocation, walls, fixed
        self.optimizer = torch.optim.Adam(problem.net.parameters(), lr=1e-3)

    def step(self):
        x, y, t = (torch.rand(self.collocation, requires_grad=True) for _ in range(3))
        residuals = self.problem.residuals_at_once(x, y, t) if self.fixed else self.problem.residuals(x, y, t)
        physics = sum((r**2).mean() for r in residuals)
        boundary = self.problem.walls(torch.randint(4, (self.walls,)), torch.rand(self.walls), torch.rand(self.walls))
        loss = physics + 10 * boundary
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def fit(self, steps):
        for step in range(steps):
            if step == 10:
                start = time.perf_counter()
            loss = self.step()
        print(f"{(time.perf_counter() - start) / (steps - 10) * 1e3:.2f} ms per step")
        print(f"loss {loss:.6f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--steps", type=int, default=240)
    args = parser.parse_args()
    torch.manual_seed(0)
    Trainer(CavityProblem(Flow()), collocation=1000, walls=400, fixed=args.fixed).fit(args.steps)
