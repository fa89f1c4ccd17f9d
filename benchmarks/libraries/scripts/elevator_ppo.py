"""PPO on a small elevator-control environment with stable-baselines3."""
import time

import gymnasium as gym
import numpy as np
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import SubprocVecEnv

FLOORS = 8
N_ENVS = 8


class ElevatorEnv(gym.Env):
    """One cabin, passengers arrive on random floors; the reward is minus the waiting people."""

    action_space = gym.spaces.Discrete(3)
    observation_space = gym.spaces.Box(0.0, 1.0, (2 * FLOORS,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.waiting = np.zeros(FLOORS, dtype=np.float32)
        self.floor, self.clock = 0, 0
        return self._observe(), {}

    def _observe(self):
        cabin = np.zeros(FLOORS, dtype=np.float32)
        cabin[self.floor] = 1.0
        return np.concatenate([cabin, np.minimum(self.waiting / 5.0, 1.0)])

    def step(self, action):
        if action == 0:
            self.floor = max(self.floor - 1, 0)
        elif action == 1:
            self.floor = min(self.floor + 1, FLOORS - 1)
        else:
            self.waiting[self.floor] = 0.0
        if self.np_random.random() < 0.3:
            self.waiting[self.np_random.integers(FLOORS)] += 1.0
        self.clock += 1
        return self._observe(), -float(self.waiting.sum()) / 10.0, False, self.clock >= 200, {}


class StepClock(BaseCallback):
    """Times the PPO steps, each one a rollout and its updates."""

    def __init__(self, skip=2):
        super().__init__()
        self.skip, self.rollouts = skip, 0

    def _on_rollout_start(self):
        if self.rollouts == self.skip:
            self.start = time.perf_counter()
        self.rollouts += 1

    def _on_step(self):
        return True

    def _on_training_end(self):
        elapsed = time.perf_counter() - self.start
        print(f"mean episode reward {np.mean([e['r'] for e in self.model.ep_info_buffer]):.2f}")
        print(f"{elapsed / (self.rollouts - self.skip) * 1000:.1f} ms per step")


def main():
    env = make_vec_env(ElevatorEnv, n_envs=N_ENVS, seed=4, vec_env_cls=SubprocVecEnv)
    model = PPO("MlpPolicy", env, n_steps=128, batch_size=256, n_epochs=4, learning_rate=3e-4,
                gamma=0.98, seed=4, device="cpu")
    model.learn(total_timesteps=N_ENVS * 128 * 48, callback=StepClock())
    env.close()


if __name__ == "__main__":
    main()
