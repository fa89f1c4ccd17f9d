"""Double DQN on a vectorised corridor-navigation task, warm started from logged episodes."""

import argparse
import collections
import random
import sys
import time

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

FIXED = "--fixed" in sys.argv

Transition = collections.namedtuple("Transition", "obs action reward next_obs done")


class CorridorEnv:
    """A batch of point robots with range-finder readings; reward for moving to the goal."""

    def __init__(self, n, obs_dim, seed):
        self.rng = np.random.default_rng(seed)
        self.n, self.obs_dim = n, obs_dim
        self.mix = self.rng.normal(size=(2, obs_dim)).astype(np.float32)
        self.pos = self.rng.uniform(-1, 1, (n, 2)).astype(np.float32)

    moves = 0.1 * np.array([[1, 0], [-1, 0], [0, 1], [0, -1]], dtype=np.float32)

    def observe(self):
        return np.tanh(self.pos @ self.mix)

    def step(self, actions):
        before = np.linalg.norm(self.pos, axis=1)
        self.pos = np.clip(self.pos + self.moves[actions], -1, 1)
        after = np.linalg.norm(self.pos, axis=1)
        done = after < 0.1
        reward = (before - after + done).astype(np.float32)
        next_obs = self.observe()
        if done.any():
            self.pos[done] = self.rng.uniform(-1, 1, (int(done.sum()), 2))
        return next_obs, reward, done


class ReplayMemory:
    def __init__(self, capacity):
        self.capacity = capacity
        self.memory = [] if FIXED else collections.deque(maxlen=capacity)  # the cause
        self.head = 0

    def push(self, item):
        if not FIXED or len(self.memory) < self.capacity:
            self.memory.append(item)
        else:
            self.memory[self.head] = item
        self.head = (self.head + 1) % self.capacity

    def sample(self, batch_size):
        rows = random.sample(self.memory, batch_size)  # the cause
        batch = Transition(*zip(*rows))
        return (
            torch.from_numpy(np.stack(batch.obs)),
            torch.from_numpy(np.array(batch.action, dtype=np.int64)),
            torch.from_numpy(np.array(batch.reward, dtype=np.float32)),
            torch.from_numpy(np.stack(batch.next_obs)),
            torch.from_numpy(np.array(batch.done, dtype=np.float32)),
        )

    def __len__(self):
        return len(self.memory)


def load_logged_episodes(memory, env, n_steps):
    rng = np.random.default_rng(11)
    obs = env.observe()
    for _ in range(n_steps):
        act = rng.integers(0, 4, env.n)
        nxt, rew, done = env.step(act)
        for row in zip(obs, act.tolist(), rew.tolist(), nxt, done.tolist()):
            memory.push(Transition._make(row))
        obs = env.observe()


def build_q(obs_dim, hidden):
    return nn.Sequential(
        nn.Linear(obs_dim, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 4)
    )


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--fixed", action="store_true")
    p.add_argument("--capacity", type=int, default=1_000_000)
    p.add_argument("--logged-steps", type=int, default=1400)
    p.add_argument("--envs", type=int, default=400)
    p.add_argument("--obs-dim", type=int, default=24)
    p.add_argument("--batch-size", type=int, default=384)
    p.add_argument("--hidden", type=int, default=512)
    p.add_argument("--steps", type=int, default=900)
    p.add_argument("--gamma", type=float, default=0.97)
    p.add_argument("--target-every", type=int, default=100)
    args = p.parse_args()

    random.seed(0)
    torch.manual_seed(0)
    rng = np.random.default_rng(2)
    memory = ReplayMemory(args.capacity)
    load_logged_episodes(memory, CorridorEnv(args.envs, args.obs_dim, 1), args.logged_steps)
    print(f"{len(memory)} logged transitions", flush=True)

    env = CorridorEnv(16, args.obs_dim, 1)
    q, target = build_q(args.obs_dim, args.hidden), build_q(args.obs_dim, args.hidden)
    target.load_state_dict(q.state_dict())
    opt = torch.optim.Adam(q.parameters(), lr=3e-4)
    obs, warmup, t0 = env.observe(), 20, None
    for step in range(args.steps):
        if step == warmup:
            t0 = time.perf_counter()
        with torch.no_grad():
            act = q(torch.from_numpy(obs)).argmax(1).numpy()
        explore = rng.random(env.n) < 0.2
        act = np.where(explore, rng.integers(0, 4, env.n), act)
        nxt, rew, done = env.step(act)
        for row in zip(obs, act.tolist(), rew.tolist(), nxt, done.tolist()):
            memory.push(Transition._make(row))
        obs = env.observe()

        s, a, r, s2, d = memory.sample(args.batch_size)
        with torch.no_grad():
            best = q(s2).argmax(1, keepdim=True)
            y = r + args.gamma * (1 - d) * target(s2).gather(1, best).squeeze(1)
        loss = F.smooth_l1_loss(q(s).gather(1, a[:, None]).squeeze(1), y)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        if (step + 1) % args.target_every == 0:
            target.load_state_dict(q.state_dict())
            print(f"step {step + 1} td {loss.item():.5f}", flush=True)
    wall = time.perf_counter() - t0
    print(f"final loss {loss.item():.6f}")
    print(f"{1000 * wall / (args.steps - warmup):.2f} ms per step")


if __name__ == "__main__":
    main()
