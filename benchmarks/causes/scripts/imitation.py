"""A policy and a discriminator learn from recorded expert transitions. --fixed: the remedy."""

import itertools

import numpy as np
import torch
from clock import FIXED, Clock
from torch import nn

OBSERVATION, ACTION, BATCH = 17, 6, 256


class ExpertDataset:
    """The transitions of an expert, from which each update draws distinct ones."""

    def __init__(self, size=400_000, seed=0):
        rng = np.random.default_rng(seed)
        self.observations = rng.standard_normal((size, OBSERVATION), np.float32)
        mixing = rng.standard_normal((OBSERVATION, ACTION)).astype(np.float32) / OBSERVATION**0.5
        self.actions = np.tanh(self.observations @ mixing)
        self.rng = rng

    def sample(self, batch_size):
        if FIXED:
            rows = self.rng.choice(len(self.actions), batch_size, replace=False)
        else:
            rows = np.random.choice(len(self.actions), batch_size, replace=False)  # the cause
        return torch.from_numpy(self.observations[rows]), torch.from_numpy(self.actions[rows])


def mlp(*widths):
    layers = []
    for n, (before, after) in enumerate(itertools.pairwise(widths)):
        layers += [nn.Linear(before, after)] + [nn.Tanh()] * (n < len(widths) - 2)
    return nn.Sequential(*layers)


def main():
    np.random.seed(0)
    expert = ExpertDataset()
    policy = mlp(OBSERVATION, 128, 128, ACTION)
    discriminator = mlp(OBSERVATION + ACTION, 128, 128, 1)
    policy_optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
    discriminator_optimizer = torch.optim.Adam(discriminator.parameters(), lr=3e-4)
    bce = nn.functional.binary_cross_entropy_with_logits
    clock = Clock(600)
    while True:
        observations, actions = expert.sample(BATCH)
        proposed = policy(observations)
        real = discriminator(torch.cat([observations, actions], dim=1))
        fake = discriminator(torch.cat([observations, proposed.detach()], dim=1))
        loss = bce(real, torch.ones_like(real)) + bce(fake, torch.zeros_like(fake))
        discriminator_optimizer.zero_grad()
        loss.backward()
        discriminator_optimizer.step()

        policy_loss = nn.functional.mse_loss(proposed, actions)
        policy_optimizer.zero_grad()
        policy_loss.backward()
        policy_optimizer.step()
        if not clock.step():
            break
    print(f"loss {policy_loss.item():.4f}")


if __name__ == "__main__":
    main()
