"""Deep Q-learning of a lander from a large memory of transitions, drawn in proportion to their last error."""

import argparse
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


class Lander:
    """A point mass above the ground with three engines; an episode ends when it touches down or drifts away."""

    actions, observed = 4, 8

    def __init__(self, rng):
        self.rng = rng
        self.thrust = np.array([[0.0, 0.0], [0.0, 0.3], [-0.2, 0.05], [0.2, 0.05]])
        self.reset()

    def reset(self):
        self.place, self.speed = np.array([self.rng.normal(), 4.0]), self.rng.normal(0, 0.1, 2)
        return self.observe()

    def observe(self):
        return np.concatenate([self.place, self.speed, self.place**2, np.abs(self.speed) * 3]).astype(np.float32)

    def step(self, action):
        self.speed = self.speed + self.thrust[action] - (0.0, 0.1)
        self.place = self.place + 0.2 * self.speed
        done = self.place[1] <= 0 or np.abs(self.place).max() > 8
        reward = -0.01 * np.abs(self.place).sum() - (abs(self.speed).sum() if done else 0.0)
        return self.observe(), float(reward), bool(done)


class PrioritizedMemory:
    def __init__(self, capacity, observed, rng, fixed, alpha=0.6, beta=0.4):
        self.capacity, self.rng, self.fixed, self.alpha, self.beta = capacity, rng, fixed, alpha, beta
        self.states = np.zeros((capacity, observed), np.float32)
        self.after = np.zeros((capacity, observed), np.float32)
        self.actions, self.rewards = np.zeros(capacity, np.int64), np.zeros(capacity, np.float32)
        self.done = np.zeros(capacity, np.float32)
        self.priorities, self.at, self.size = np.zeros(capacity), 0, 0

    def add(self, state, action, reward, after, done):
        i = self.at
        self.states[i], self.actions[i], self.rewards[i] = state, action, reward
        self.after[i], self.done[i] = after, done
        self.priorities[i] = self.priorities[: self.size].max() if self.size else 1.0
        self.at, self.size = (i + 1) % self.capacity, min(self.size + 1, self.capacity)

    def sample(self, count):
        scaled = self.priorities[: self.size] ** self.alpha
        chances = scaled / scaled.sum()
        if self.fixed:
            rows = self.rng.choice(self.size, size=count, p=chances)
        else:
            rows = np.array([self.rng.choice(self.size, p=chances) for _ in range(count)])  # the cause
        weights = (self.size * chances[rows]) ** -self.beta
        columns = self.states, self.actions, self.rewards, self.after, self.done
        batch = [torch.from_numpy(column[rows]) for column in columns]
        return rows, torch.from_numpy((weights / weights.max()).astype(np.float32)), batch

    def update(self, rows, errors):
        self.priorities[rows] = np.abs(errors) + 1e-3


def q_network(observed, actions, width=256):
    return nn.Sequential(
        nn.Linear(observed, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, actions)
    )


def explore(env, memory, steps):
    state = env.reset()
    for _ in range(steps):
        action = int(memory.rng.integers(env.actions))
        after, reward, done = env.step(action)
        memory.add(state, action, reward, after, done)
        state = env.reset() if done else after


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--updates", type=int, default=400)
    parser.add_argument("--memory", type=int, default=60000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--fixed", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    env = Lander(rng)
    memory = PrioritizedMemory(args.memory, env.observed, rng, args.fixed)
    explore(env, memory, steps=2000)
    while memory.size < memory.capacity:  # the rest comes from an earlier run
        n = min(2000, memory.capacity - memory.size)
        for column in (memory.states, memory.after, memory.actions, memory.rewards, memory.done):
            column[memory.size : memory.size + n] = column[:n]
        memory.priorities[memory.size : memory.size + n] = rng.gamma(1.0, 1.0, n)
        memory.size += n
    online, target = q_network(env.observed, env.actions), q_network(env.observed, env.actions)
    target.load_state_dict(online.state_dict())
    optimizer = torch.optim.Adam(online.parameters(), lr=5e-4)
    state, returned, began = env.reset(), 0.0, time.perf_counter()
    for update in range(1, args.updates + 1):
        for _ in range(4):
            with torch.no_grad():
                greedy = online(torch.from_numpy(state)).argmax().item()
            action = greedy if rng.random() > 0.1 else int(rng.integers(env.actions))
            after, reward, done = env.step(action)
            memory.add(state, action, reward, after, done)
            state, returned = env.reset() if done else after, returned + reward
        rows, weights, (states, actions, rewards, afters, dones) = memory.sample(args.batch)
        with torch.no_grad():
            best = online(afters).argmax(1, keepdim=True)
            goal = rewards + 0.99 * (1 - dones) * target(afters).gather(1, best).squeeze(1)
        value = online(states).gather(1, actions.unsqueeze(1)).squeeze(1)
        loss = (weights * F.smooth_l1_loss(value, goal, reduction="none")).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        memory.update(rows, (goal - value).detach().numpy())
        if update % 100 == 0:
            target.load_state_dict(online.state_dict())
        if update % 20 == 0:
            print(f"update {update} loss {loss.item():.5f} return {returned:.3f}", flush=True)
    print(f"{(time.perf_counter() - began) / args.updates * 1e3:.2f} ms per step")


if __name__ == "__main__":
    main()
