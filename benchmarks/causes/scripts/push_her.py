"""DDPG with hindsight goals for a pushing robot, from a buffer of recorded episodes."""

import argparse
import copy
import time

import numpy as np
import torch
from torch import nn

OBS, GOAL, ACT = 25, 3, 4


class PushEnv:
    """What the learner needs of the environment: its reward."""

    threshold = 0.05

    def compute_reward(self, achieved_goal, desired_goal, info):
        distance = np.linalg.norm(achieved_goal - desired_goal, axis=-1)
        return -(distance > self.threshold).astype(np.float32)


class HindsightBuffer:
    def __init__(self, env, episodes, length, seed=0, relabelled=0.8, fixed=False):
        rng = np.random.default_rng(seed)
        self.env, self.length, self.relabelled, self.fixed = env, length, relabelled, fixed
        self.rng = np.random.default_rng(seed + 1)
        walk = rng.normal(scale=0.05, size=(episodes, length + 1, OBS)).cumsum(1).astype(np.float32)
        self.observation, self.achieved = walk, np.ascontiguousarray(walk[..., :GOAL])
        self.desired = rng.uniform(-0.3, 0.3, (episodes, GOAL)).astype(np.float32)
        self.action = rng.uniform(-1, 1, (episodes, length, ACT)).astype(np.float32)

    def sample(self, count):
        episode = self.rng.integers(len(self.action), size=count)
        moment = self.rng.integers(self.length, size=count)
        future = moment + 1 + (self.rng.random(count) * (self.length - moment)).astype(np.int64)
        hindsight = self.rng.random(count) < self.relabelled
        if self.fixed:
            return self._gather(episode, moment, future, hindsight)
        return self._collect(episode, moment, future, hindsight)

    def _gather(self, episode, moment, future, hindsight):
        goal = np.where(hindsight[:, None], self.achieved[episode, future], self.desired[episode])
        reward = self.env.compute_reward(self.achieved[episode, moment + 1], goal, None)
        now, after = self.observation[episode, moment], self.observation[episode, moment + 1]
        parts = (now, goal, self.action[episode, moment], reward, after)
        return {key: torch.from_numpy(part) for key, part in zip(("obs", "goal", "act", "rew", "next"), parts)}

    def _collect(self, episode, moment, future, hindsight):
        batch = {"obs": [], "goal": [], "act": [], "rew": [], "next": []}
        for e, t, f, relabel in zip(episode, moment, future, hindsight):  # the cause
            goal = self.achieved[e, f] if relabel else self.desired[e]  # the cause
            reward = self.env.compute_reward(self.achieved[e, t + 1], goal, {"episode": e})  # the cause
            batch["obs"].append(self.observation[e, t])  # the cause
            batch["goal"].append(goal)  # the cause
            batch["act"].append(self.action[e, t])  # the cause
            batch["rew"].append(reward)  # the cause
            batch["next"].append(self.observation[e, t + 1])  # the cause
        return {key: torch.from_numpy(np.stack(rows)) for key, rows in batch.items()}  # the cause


def mlp(inside, out, width=192):
    return nn.Sequential(nn.Linear(inside, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, out))


class Agent:
    def __init__(self, gamma=0.98, tau=0.05):
        self.gamma, self.tau = gamma, tau
        self.actor, self.critic = mlp(OBS + GOAL, ACT), mlp(OBS + GOAL + ACT, 1)
        self.target_actor, self.target_critic = copy.deepcopy(self.actor), copy.deepcopy(self.critic)
        self.actor_optimizer = torch.optim.Adam(self.actor.parameters(), lr=1e-3)
        self.critic_optimizer = torch.optim.Adam(self.critic.parameters(), lr=1e-3)

    def update(self, batch):
        state, after = torch.cat([batch["obs"], batch["goal"]], 1), torch.cat([batch["next"], batch["goal"]], 1)
        with torch.no_grad():
            value = self.target_critic(torch.cat([after, self.target_actor(after).tanh()], 1)).squeeze(1)
            target = (batch["rew"] + self.gamma * value).clamp(-1 / (1 - self.gamma), 0)
        critic_loss = nn.functional.mse_loss(self.critic(torch.cat([state, batch["act"]], 1)).squeeze(1), target)
        self.critic_optimizer.zero_grad()
        critic_loss.backward()
        self.critic_optimizer.step()
        self.critic.requires_grad_(False)
        actor_loss = -self.critic(torch.cat([state, self.actor(state).tanh()], 1)).mean()
        self.actor_optimizer.zero_grad()
        actor_loss.backward()
        self.actor_optimizer.step()
        self.critic.requires_grad_(True)
        with torch.no_grad():
            for target_net, net in ((self.target_actor, self.actor), (self.target_critic, self.critic)):
                torch._foreach_lerp_(list(target_net.parameters()), list(net.parameters()), self.tau)
        return critic_loss.detach()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=2048)
    args = parser.parse_args()
    torch.manual_seed(0)
    buffer = HindsightBuffer(PushEnv(), episodes=2000, length=50, fixed=args.fixed)
    agent = Agent()
    for step in range(args.steps):
        if step == 10:
            start = time.perf_counter()
        loss = agent.update(buffer.sample(args.batch_size))
    print(f"{(time.perf_counter() - start) / (args.steps - 10) * 1e3:.2f} ms per step")
    print(f"loss {loss.item():.6f}")
