"""A VQ-VAE, whose codes are looked up in a codebook. --fixed: the distances come from a matrix product."""

import torch
import torch.nn.functional as F
from clock import Clock, options
from torch import Tensor, nn

args = options(steps=80)
torch.backends.cudnn.benchmark = True
width, codes, depth, batch, size = (8, 16, 4, 2, 16) if args.tiny else (256, 1024, 64, 64, 128)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.ReLU(), nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


class Quantizer(nn.Module):
    """The nearest code of each place, by which the gradient passes straight through."""

    def __init__(self, commitment: float = 0.25) -> None:
        super().__init__()
        self.book, self.commitment = nn.Embedding(codes, depth), commitment
        nn.init.uniform_(self.book.weight, -1 / codes, 1 / codes)

    def distances(self, flat: Tensor) -> Tensor:
        book = self.book.weight
        if args.fixed:
            return flat.pow(2).sum(1, keepdim=True) + book.pow(2).sum(1) - 2 * flat @ book.T
        return (flat.unsqueeze(1) - book.unsqueeze(0)).pow(2).sum(2)  # the cause

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.permute(0, 2, 3, 1)
        nearest = self.distances(x.reshape(-1, depth)).argmin(1)  # the cause
        found = self.book(nearest).view(x.shape)
        loss = F.mse_loss(found, x.detach()) + self.commitment * F.mse_loss(x, found.detach())
        return (x + (found - x).detach()).permute(0, 3, 1, 2), loss


encoder = nn.Sequential(
    nn.Conv2d(3, width // 2, 4, 2, 1),
    nn.ReLU(),
    nn.Conv2d(width // 2, width, 4, 2, 1),
    Residual(),
    Residual(),
    nn.ReLU(),
    nn.Conv2d(width, depth, 1),
)
decoder = nn.Sequential(
    nn.Conv2d(depth, width, 3, padding=1),
    Residual(),
    Residual(),
    nn.ReLU(),
    nn.ConvTranspose2d(width, width // 2, 4, 2, 1),
    nn.ReLU(),
    nn.ConvTranspose2d(width // 2, 3, 4, 2, 1),
)
model = nn.ModuleDict({"encoder": encoder, "quantizer": Quantizer(), "decoder": decoder})
model.to(args.device, memory_format=torch.channels_last)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4, fused=True)
images = torch.rand(4, batch, 3, size, size, device=args.device)
clock = Clock(args)
step = 0
while True:
    pictures = images[step % len(images)].to(memory_format=torch.channels_last)
    with torch.autocast(args.device, torch.bfloat16):
        encoded = model["encoder"](pictures)
    quantized, commitment = model["quantizer"](encoded.float())  # the cause
    with torch.autocast(args.device, torch.bfloat16):
        decoded = model["decoder"](quantized)
    loss = F.mse_loss(decoded.float(), pictures) + commitment
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    if not clock.step():
        break
