"""Proximal policy optimisation of a walker with many joints in a simulated, vectorised world."""

import argparse
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Independent, MultivariateNormal, Normal


class Walkers:
    def __init__(self, count, observed=32, joints=20):
        self.count, self.observed, self.joints = count, observed, joints
        self.drift = 0.95 * torch.linalg.qr(torch.randn(observed, observed))[0]
        self.push = 0.3 * torch.randn(joints, observed) / joints**0.5
        self.state = torch.randn(count, observed)

    def step(self, action):
        noise = 0.05 * torch.randn(self.count, self.observed)
        self.state = self.state @ self.drift + action.clamp(-2, 2) @ self.push + noise
        reward = -self.state[:, :8].square().mean(1) - 0.01 * action.square().mean(1)
        return self.state, reward


def mlp(*widths):
    layers = []
    for a, b in zip(widths, widths[1:]):
        layers += [nn.Linear(a, b), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


class ActorCritic(nn.Module):
    def __init__(self, observed, joints, diagonal):
        super().__init__()
        self.actor, self.critic, self.diagonal = mlp(observed, 64, 64, joints), mlp(observed, 64, 64, 1), diagonal
        self.log_std = nn.Parameter(torch.full((joints,), -0.5))

    def distribution(self, state):
        mean = self.actor(state)
        if self.diagonal:
            return Independent(Normal(mean, self.log_std.exp().expand_as(mean)), 1)
        variance = (2 * self.log_std).exp().expand_as(mean)
        return MultivariateNormal(mean, torch.diag_embed(variance))  # the cause

    def act(self, state):
        dist = self.distribution(state)
        action = dist.sample()
        return action, dist.log_prob(action), self.critic(state).squeeze(-1)

    def evaluate(self, state, action):
        dist = self.distribution(state)  # the cause
        return dist.log_prob(action), dist.entropy(), self.critic(state).squeeze(-1)


@torch.no_grad()
def collect(world, policy, horizon, gamma=0.99, lam=0.95):
    states, actions, logps, values, rewards = [], [], [], [], []
    state = world.state
    for _ in range(horizon):
        action, logp, value = policy.act(state)
        states.append(state), actions.append(action), logps.append(logp), values.append(value)
        state, reward = world.step(action)
        rewards.append(reward)
    values.append(policy.critic(state).squeeze(-1))
    advantage, advantages = torch.zeros(world.count), []
    for t in reversed(range(horizon)):
        delta = rewards[t] + gamma * values[t + 1] - values[t]
        advantage = delta + gamma * lam * advantage
        advantages.insert(0, advantage)
    advantages, values = torch.cat(advantages), torch.cat(values[:-1])
    batch = torch.cat(states), torch.cat(actions), torch.cat(logps), advantages + values, advantages
    return batch, torch.stack(rewards).mean().item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--horizon", type=int, default=32)
    parser.add_argument("--minibatch", type=int, default=2048)
    parser.add_argument("--iterations", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--fixed", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    world = Walkers(256)
    policy = ActorCritic(world.observed, world.joints, diagonal=args.fixed)
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-4)
    step, began = 0, time.perf_counter()
    for iteration in range(1, args.iterations + 1):
        (states, actions, old, returns, advantages), reward = collect(world, policy, args.horizon)
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        for _ in range(args.epochs):
            for rows in torch.randperm(len(states)).split(args.minibatch):
                logp, entropy, value = policy.evaluate(states[rows], actions[rows])
                ratio, gain = (logp - old[rows]).exp(), advantages[rows]
                surrogate = torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain)
                loss = -surrogate.mean() + 0.5 * F.mse_loss(value, returns[rows]) - 0.001 * entropy.mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
                optimizer.step()
                step += 1
        if iteration % 4 == 0:
            print(f"iteration {iteration} updates {step} loss {loss.item():.4f} reward {reward:.4f}", flush=True)
    print(f"{(time.perf_counter() - began) / step * 1e3:.2f} ms per step")


if __name__ == "__main__":
    main()
