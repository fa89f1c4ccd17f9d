"""A fleet of simulated taxis learns where to wait for passengers (advantage actor-critic)."""

import argparse
import time
from collections import namedtuple

import numpy as np
import torch
from torch import nn

ACTIONS, SIGHT = 5, 24
Rollout = namedtuple("Rollout", "seen actions rewards last")


class City:
    """One taxi on a ring of districts whose demand comes and goes."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.phase, self.hour = self.rng.uniform(0, 6, SIGHT - 2), 0
        self.place = int(self.rng.integers(SIGHT - 2))

    def observe(self):
        demand = 0.5 + 0.5 * np.sin(self.phase + self.hour / 5)
        return np.concatenate([np.roll(demand, -self.place), [self.place / 22, self.hour % 24 / 24]]).astype(np.float32)

    def drive(self, action):
        self.place, self.hour = (self.place + action - 2) % (SIGHT - 2), self.hour + 1
        demand = 0.5 + 0.5 * np.sin(self.phase[self.place] + self.hour / 5)
        return float(demand - 0.05 * abs(action - 2))


class Driver(nn.Module):
    def __init__(self, width=128):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(SIGHT, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.policy, self.value = nn.Linear(width, ACTIONS), nn.Linear(width, 1)

    def forward(self, seen):
        hidden = self.trunk(seen)
        return self.policy(hidden), self.value(hidden).squeeze(-1)


class Dispatcher:
    def __init__(self, driver, taxis, seed, together=False):
        self.driver, self.cities = driver, [City(seed + i) for i in range(taxis)]
        self.noise = torch.Generator().manual_seed(seed)
        self.decide = self.decide_together if together else self.decide_each

    @torch.no_grad()
    def choose(self, seen, gumbel):
        return (self.driver(torch.as_tensor(seen))[0] + gumbel).argmax(-1)  # the cause

    def decide_each(self, seen, gumbel):
        return torch.stack([self.choose(view, g) for view, g in zip(seen, gumbel)])  # the cause

    def decide_together(self, seen, gumbel):
        return self.choose(np.stack(seen), gumbel)

    def collect(self, length=16):
        views, moves, gains = [], [], []
        for _ in range(length):
            seen = [city.observe() for city in self.cities]
            uniform = torch.rand(len(seen), ACTIONS, generator=self.noise).clamp_(1e-6, 1 - 1e-6)
            actions = self.decide(seen, -torch.log(-torch.log(uniform)))
            gains.append([city.drive(a) for city, a in zip(self.cities, actions.tolist())])
            views.append(np.stack(seen))
            moves.append(actions)
        last = torch.from_numpy(np.stack([city.observe() for city in self.cities]))
        return Rollout(torch.from_numpy(np.stack(views)), torch.stack(moves), torch.tensor(gains), last)


def returns(rewards, bootstrap, discount=0.97):
    out = torch.empty_like(rewards)
    for t in reversed(range(len(rewards))):
        bootstrap = rewards[t] + discount * bootstrap
        out[t] = bootstrap
    return out


def update(driver, optimizer, rollout):
    with torch.no_grad():
        target = returns(rollout.rewards, driver(rollout.last)[1])
    logits, value = driver(rollout.seen)
    advantage = target - value
    log_prob = logits.log_softmax(-1)
    chosen = log_prob.gather(-1, rollout.actions.unsqueeze(-1)).squeeze(-1)
    entropy = -(log_prob.exp() * log_prob).sum(-1).mean()
    loss = -(chosen * advantage.detach()).mean() + 0.5 * advantage.square().mean() - 0.01 * entropy
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=240, help="updates")
    parser.add_argument("--fixed", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    driver = Driver()
    optimizer = torch.optim.Adam(driver.parameters(), lr=7e-4)
    dispatcher = Dispatcher(driver, taxis=32, seed=100, together=args.fixed)
    clock = [time.perf_counter()]
    for _ in range(args.steps):
        loss = update(driver, optimizer, dispatcher.collect())
        clock.append(time.perf_counter())
    print(f"loss {loss:.6f}")
    print(f"{np.diff(clock)[args.steps // 2 :].mean() * 1e3:.2f} ms per step")
