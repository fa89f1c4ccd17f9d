"""An autoencoder with a discrete codebook. --fixed: the remedy."""

import torch
from clock import FIXED, Clock
from torch import nn
from torch.nn import functional

torch.set_num_threads(2)  # no worker needs the other core

CODES, WIDTH, SIDE, BATCH = 4_096, 16, 32, 24


class VectorQuantizer(nn.Module):
    def __init__(self, codes, width, beta=0.25):
        super().__init__()
        self.codes, self.beta = codes, beta
        self.embedding = nn.Embedding(codes, width)
        nn.init.uniform_(self.embedding.weight, -1 / codes, 1 / codes)

    def nearest(self, flat):
        weight = self.embedding.weight
        return torch.argmin(weight.pow(2).sum(1) - 2 * flat @ weight.t(), dim=1)

    def forward(self, z):
        flat = z.permute(0, 2, 3, 1).reshape(-1, z.shape[1])
        with torch.no_grad():
            indices = self.nearest(flat)
        if FIXED:
            quantized = self.embedding(indices)
            usage = torch.bincount(indices, minlength=self.codes) / len(indices)
        else:
            encodings = torch.zeros(len(indices), self.codes)  # the cause
            encodings.scatter_(1, indices[:, None], 1)  # the cause
            quantized = encodings @ self.embedding.weight  # the cause
            usage = encodings.mean(0)  # the cause
        loss = functional.mse_loss(quantized, flat.detach()) + self.beta * functional.mse_loss(flat, quantized.detach())
        perplexity = torch.exp(-(usage * torch.log(usage + 1e-10)).sum())
        quantized = flat + (quantized - flat).detach()
        quantized = quantized.view(len(z), *z.shape[2:], -1).permute(0, 3, 1, 2)
        return quantized, loss, perplexity


class VQVAE(nn.Module):
    def __init__(self, hidden=32):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, hidden, 4, stride=2, padding=1), nn.ReLU(), nn.Conv2d(hidden, WIDTH, 4, stride=2, padding=1)
        )
        self.quantizer = VectorQuantizer(CODES, WIDTH)
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(WIDTH, hidden, 4, stride=2, padding=1),
            nn.ReLU(),
            nn.ConvTranspose2d(hidden, 3, 4, stride=2, padding=1),
        )

    def forward(self, x):
        quantized, loss, perplexity = self.quantizer(self.encoder(x))
        return functional.mse_loss(self.decoder(quantized), x) + loss, perplexity


images = functional.interpolate(torch.rand(512, 3, 8, 8), size=SIDE, mode="bilinear")
model = VQVAE()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
clock = Clock(70)
running = True
while running:
    loss, perplexity = model(images[torch.randint(len(images), (BATCH,))])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    running = clock.step()
print(f"loss {loss.item():.5f} perplexity {perplexity.item():.2f}")
