"""Transitions are drawn at random from a long deque, which has to walk to each. --fixed: a list used as a ring."""

import random
from collections import deque, namedtuple

import numpy as np
import torch
from clock import FIXED, Clock
from torch import nn

Transition = namedtuple("Transition", "state action reward next_state done")
CAPACITY = 800_000


class Pendulum:
    """A cart with a pole, roughly."""

    def __init__(self, seed=0):
        self.rng = np.random.default_rng(seed)
        self.reset()

    def reset(self):
        self.state = self.rng.uniform(-0.05, 0.05, 4).astype(np.float32)
        return self.state

    def step(self, action):
        x, v, angle, spin = self.state
        force = 10.0 if action else -10.0
        push = 9.8 * np.sin(angle) - np.cos(angle) * force * 0.1
        self.state = np.array([x + 0.02 * v, v + 0.02 * force, angle + 0.02 * spin, spin + 0.02 * push], np.float32)
        done = bool(abs(self.state[0]) > 2.4 or abs(self.state[2]) > 0.21)
        return self.state, 1.0, done


class RingMemory:
    def __init__(self, capacity):
        self.capacity, self.items, self.at = capacity, [], 0

    def append(self, item):
        if len(self.items) < self.capacity:
            self.items.append(item)
        else:
            self.items[self.at] = item
        self.at = (self.at + 1) % self.capacity

    def sample(self, count):
        return random.sample(self.items, count)


class ReplayMemory:
    def __init__(self, capacity):
        self.items = deque(maxlen=capacity)

    def append(self, item):
        self.items.append(item)

    def sample(self, count):
        return random.sample(self.items, count)  # the cause


class Agent:
    def __init__(self, memory, gamma=0.99, batch_size=128):
        self.memory, self.gamma, self.batch_size = memory, gamma, batch_size
        self.online, self.target = self.network(), self.network()
        self.target.load_state_dict(self.online.state_dict())
        self.optimizer = torch.optim.Adam(self.online.parameters(), lr=1e-3)

    @staticmethod
    def network():
        return nn.Sequential(nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2))

    def act(self, state, epsilon=0.1):
        if random.random() < epsilon:
            return random.randrange(2)
        with torch.no_grad():
            return int(self.online(torch.from_numpy(state)).argmax())

    def learn(self):
        batch = Transition(*zip(*self.memory.sample(self.batch_size), strict=True))  # the cause
        state, following = torch.from_numpy(np.stack(batch.state)), torch.from_numpy(np.stack(batch.next_state))
        action, reward = torch.tensor(batch.action), torch.tensor(batch.reward)
        alive = 1 - torch.tensor(batch.done, dtype=torch.float32)
        with torch.no_grad():
            wanted = reward + self.gamma * alive * self.target(following).amax(1)
        value = self.online(state).gather(1, action[:, None]).squeeze(1)
        loss = nn.functional.smooth_l1_loss(value, wanted)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


environment = Pendulum()
memory = RingMemory(CAPACITY) if FIXED else ReplayMemory(CAPACITY)
states = [environment.rng.normal(size=4).astype(np.float32) for _ in range(2_000)]
for n in range(CAPACITY):  # what an earlier run has collected
    memory.append(Transition(states[n % 2_000], n & 1, 1.0, states[(n + 1) % 2_000], n % 50 == 0))
agent = Agent(memory)
clock = Clock(1_500)
state = environment.reset()
more = True
while more:
    action = agent.act(state)
    following, reward, done = environment.step(action)
    memory.append(Transition(state, action, reward, following, done))
    state = environment.reset() if done else following
    agent.learn()
    more = clock.step()
    if clock.done % 200 == 0:
        agent.target.load_state_dict(agent.online.state_dict())
