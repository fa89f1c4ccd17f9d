"""Offline double DQN on frames of a game, drawn from a replay memory. --fixed: a memory of tensors on the GPU."""

import copy
import random

import numpy as np
import torch
import torch.nn.functional as F
from clock import Clock, options
from torch import Tensor, nn

args = options(steps=80)
torch.backends.cudnn.benchmark = True
width, batch, held, actions = (4, 4, 64, 6) if args.tiny else (64, 256, 4096, 18)
discount, rate = 0.99, 0.005


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.relu(self.first(F.relu(x))))


class Impala(nn.Module):
    """IMPALA's network: three stages of a convolution, a pooling, and two residual blocks."""

    def __init__(self) -> None:
        super().__init__()
        stages, into = [], 4
        for out in (width, 2 * width, 2 * width):
            stages += [nn.Conv2d(into, out, 3, padding=1), nn.MaxPool2d(3, 2, 1), Residual(out), Residual(out)]
            into = out
        self.body = nn.Sequential(*stages, nn.ReLU(), nn.Flatten())
        self.head = nn.Sequential(nn.Linear(into * 11 * 11, 512), nn.ReLU(), nn.Linear(512, actions))

    def forward(self, frames: Tensor) -> Tensor:
        return self.head(self.body((frames / 255).to(memory_format=torch.channels_last)))


class ReplayMemory:
    """Transitions: state, action, reward, next state, and whether the game went on."""

    def __init__(self) -> None:
        drawn = np.random.default_rng(0)
        frames = drawn.integers(0, 256, (held + 1, 4, 84, 84), dtype=np.uint8)
        played, rewards = drawn.integers(actions, size=held), drawn.standard_normal(held).astype(np.float32)
        went_on = (drawn.random(held) > 0.01).astype(np.float32)
        self.transitions = list(zip(frames[:-1], played, rewards, frames[1:], went_on, strict=True))
        if args.fixed:
            columns = (frames[:-1], played, rewards, frames[1:], went_on)
            self.columns = [torch.from_numpy(column).to(args.device) for column in columns]

    def sample(self) -> list[Tensor]:
        if args.fixed:
            rows = torch.tensor(random.sample(range(held), batch), device=args.device)
            states, played, rewards, later, went_on = (column[rows] for column in self.columns)
            return [states.float(), played, rewards, later.float(), went_on]
        chosen = random.sample(self.transitions, batch)
        states, played, rewards, later, went_on = map(np.array, zip(*chosen, strict=True))  # the cause
        return [
            torch.tensor(states, dtype=torch.float32).to(args.device),  # the cause
            torch.tensor(played).to(args.device),
            torch.tensor(rewards).to(args.device),
            torch.tensor(later, dtype=torch.float32).to(args.device),  # the cause
            torch.tensor(went_on).to(args.device),
        ]


random.seed(0)
memory = ReplayMemory()
online = Impala().to(args.device, memory_format=torch.channels_last)
target = copy.deepcopy(online).requires_grad_(False)
optimizer = torch.optim.AdamW(online.parameters(), lr=1e-4, fused=True)
clock = Clock(args)
while True:
    states, played, rewards, later, went_on = memory.sample()  # the cause
    with torch.autocast(args.device, torch.bfloat16):
        with torch.no_grad():
            best = online(later).argmax(1, keepdim=True)
            worth = target(later).gather(1, best).squeeze(1)
            wanted = rewards + discount * went_on * worth
        guess = online(states).gather(1, played.unsqueeze(1)).squeeze(1)
        loss = F.smooth_l1_loss(guess, wanted)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        torch._foreach_lerp_(list(target.parameters()), list(online.parameters()), rate)
    if not clock.step():
        break
