"""A Wasserstein GAN: several critic updates to each update of the generator. --fixed: the remedy."""

import contextlib

import torch
from clock import FIXED, Clock
from torch import nn

torch.set_num_threads(2)  # no worker needs the other core

LATENT, SIDE, BATCH, CRITIC_STEPS, CLIP = 64, 32, 32, 4, 0.02


class Generator(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.project = nn.Linear(LATENT, 2 * width * 8 * 8)
        self.net = nn.Sequential(
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.ConvTranspose2d(2 * width, width, 4, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.ConvTranspose2d(width, width, 4, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 3, 3, padding=1),
            nn.Tanh(),
        )

    def forward(self, z):
        return self.net(self.project(z).view(len(z), -1, 8, 8))


class Critic(nn.Sequential):
    def __init__(self, width=16):
        super().__init__(
            nn.Conv2d(3, width, 4, stride=2, padding=1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(width, 2 * width, 4, stride=2, padding=1),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
            nn.Linear(2 * width * 8 * 8, 1),
        )


def critic_loss(generator, critic, real):
    z = torch.randn(len(real), LATENT)
    with torch.no_grad() if FIXED else contextlib.nullcontext():
        fake = generator(z)  # the cause
    return critic(fake).mean() - critic(real).mean()


pictures = torch.nn.functional.interpolate(torch.rand(256, 3, 4, 4), size=SIDE, mode="bilinear") * 2 - 1
generator, critic = Generator(), Critic()
generator_optimizer = torch.optim.RMSprop(generator.parameters(), lr=1e-4)
critic_optimizer = torch.optim.RMSprop(critic.parameters(), lr=1e-4)
clock = Clock(120)
step = 0
running = True
while running:
    real = pictures[torch.randint(len(pictures), (BATCH,))]
    loss = critic_loss(generator, critic, real)
    critic_optimizer.zero_grad()
    loss.backward()  # the cause
    critic_optimizer.step()
    with torch.no_grad():
        for weight in critic.parameters():
            weight.clamp_(-CLIP, CLIP)
    step += 1
    if step % CRITIC_STEPS == 0:
        generator_loss = -critic(generator(torch.randn(BATCH, LATENT))).mean()
        generator_optimizer.zero_grad()
        generator_loss.backward()
        generator_optimizer.step()
    running = clock.step()
print(f"loss {loss.item():.5f} {generator_loss.item():.5f}")
