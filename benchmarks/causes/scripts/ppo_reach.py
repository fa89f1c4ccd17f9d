"""PPO on a vectorised planar reaching task (numpy physics)."""

import argparse
import time

import numpy as np
import torch
import torch.nn as nn
from torch.distributions import Normal


class ReachEnvs:
    """n point masses pushed towards random goals; episodes end after 100 steps or on success."""

    def __init__(self, n, seed=0):
        self.n, self.rng = n, np.random.default_rng(seed)
        self.pos, self.vel = np.zeros((n, 2)), np.zeros((n, 2))
        self.goal, self.t = np.zeros((n, 2)), np.zeros(n, int)
        self.reset(np.ones(n, bool))

    def reset(self, mask):
        k = int(mask.sum())
        self.pos[mask] = self.rng.uniform(-1, 1, (k, 2))
        self.goal[mask] = self.rng.uniform(-1, 1, (k, 2))
        self.vel[mask] = 0
        self.t[mask] = 0

    def obs(self):
        o = np.concatenate([self.pos, self.vel, self.goal - self.pos], 1)
        return torch.from_numpy(o.astype(np.float32))

    def step(self, action):
        self.vel = 0.9 * self.vel + 0.1 * np.clip(action, -1, 1)
        self.pos = self.pos + 0.2 * self.vel
        self.t += 1
        dist = np.linalg.norm(self.goal - self.pos, axis=1)
        done = (dist < 0.05) | (self.t >= 100)
        reward = -dist + 5.0 * (dist < 0.05)
        self.reset(done)
        return self.obs(), reward.astype(np.float32), done.astype(np.float32)


class ActorCritic(nn.Module):
    def __init__(self, n_obs=6, n_act=2, h=128):
        super().__init__()
        self.pi = nn.Sequential(nn.Linear(n_obs, h), nn.Tanh(), nn.Linear(h, h), nn.Tanh(), nn.Linear(h, n_act))
        self.v = nn.Sequential(nn.Linear(n_obs, h), nn.Tanh(), nn.Linear(h, h), nn.Tanh(), nn.Linear(h, 1))
        self.log_std = nn.Parameter(torch.full((n_act,), -0.5))

    def forward(self, obs):
        return Normal(self.pi(obs), self.log_std.exp()), self.v(obs).squeeze(-1)


def gae(rewards, values, dones, last_value, gamma=0.99, lam=0.95):
    adv = torch.zeros_like(rewards)
    running = torch.zeros(())
    for t in reversed(range(len(rewards))):
        next_value = last_value if t == len(rewards) - 1 else values[t + 1]
        delta = rewards[t] + gamma * next_value * (1.0 - dones[t]) - values[t]
        running = delta + gamma * lam * (1.0 - dones[t]) * running  # the cause
        adv[t] = running
    return adv


def gae_batch(rewards, values, dones, last_value, gamma=0.99, lam=0.95):
    r, v, d = rewards.numpy(), values.numpy(), dones.numpy()
    nxt = np.concatenate([v[1:], last_value.numpy()[None]])
    delta = r + gamma * nxt * (1.0 - d) - v
    adv = np.zeros_like(r)
    running = np.zeros(r.shape[1], dtype=np.float32)
    for t in reversed(range(len(r))):
        running = delta[t] + gamma * lam * (1.0 - d[t]) * running
        adv[t] = running
    return torch.from_numpy(adv)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--iterations", type=int, default=60)
    ap.add_argument("--envs", type=int, default=32)
    ap.add_argument("--horizon", type=int, default=128)
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--minibatch", type=int, default=1024)
    ap.add_argument("--fixed", action="store_true")
    args = ap.parse_args()

    torch.manual_seed(0)
    envs = ReachEnvs(args.envs)
    net = ActorCritic()
    opt = torch.optim.Adam(net.parameters(), lr=3e-4, eps=1e-5)
    length, width = args.horizon, args.envs
    buf = {
        k: torch.zeros(length, width, *s)
        for k, s in {"obs": (6,), "act": (2,), "logp": (), "rew": (), "done": (), "val": ()}.items()
    }

    obs = envs.obs()
    skip, t0 = 4, None
    for it in range(args.iterations):
        if it == skip:
            t0 = time.perf_counter()
        with torch.no_grad():
            for t in range(length):
                dist, val = net(obs)
                act = dist.sample()
                buf["obs"][t], buf["act"][t], buf["val"][t] = obs, act, val
                buf["logp"][t] = dist.log_prob(act).sum(-1)
                obs, rew, done = envs.step(act.numpy())
                buf["rew"][t], buf["done"][t] = torch.from_numpy(rew), torch.from_numpy(done)
            last = net(obs)[1]

        if args.fixed:
            adv = gae_batch(buf["rew"], buf["val"], buf["done"], last)
        else:
            adv = torch.stack(  # the cause
                [
                    gae(buf["rew"][:, e], buf["val"][:, e], buf["done"][:, e], last[e])  # the cause
                    for e in range(width)
                ],
                1,
            )
        flat = {k: v.flatten(0, 1) for k, v in buf.items()}
        ret = (adv + buf["val"]).flatten()
        adv = adv.flatten()
        adv = (adv - adv.mean()) / (adv.std() + 1e-8)

        for _ in range(args.epochs):
            for idx in torch.randperm(length * width).split(args.minibatch):
                dist, val = net(flat["obs"][idx])
                ratio = (dist.log_prob(flat["act"][idx]).sum(-1) - flat["logp"][idx]).exp()
                a = adv[idx]
                pg = -torch.min(ratio * a, ratio.clamp(0.8, 1.2) * a).mean()
                vl = (val - ret[idx]).pow(2).mean()
                loss = pg + 0.5 * vl - 0.001 * dist.entropy().sum(-1).mean()
                opt.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(net.parameters(), 0.5)
                opt.step()
        if it % 15 == 0 or it == args.iterations - 1:
            print(f"iter {it:3d}  loss {loss.item():.4f}  reward {buf['rew'].mean().item():.4f}", flush=True)
    print(f"{1e3 * (time.perf_counter() - t0) / (args.iterations - skip):.1f} ms per step")


if __name__ == "__main__":
    main()
