"""A detector whose boxes are matched image by image, by masks. --fixed: all at once, padded to the most of an image."""

import torch
import torch.nn.functional as F
from clock import Clock, options
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

args = options(steps=70)
width, batch, size = (8, 2, 64) if args.tiny else (64, 16, 256)


def convolution(into: int, out: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(into, out, 3, 2, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU())


def overlap(boxes: Tensor, anchors: Tensor) -> Tensor:
    """Return intersection over union: of boxes (…, n, 4) with each of the anchors (m, 4), (…, n, m)."""
    boxes = boxes.unsqueeze(-2)
    low, high = torch.maximum(boxes[..., :2], anchors[:, :2]), torch.minimum(boxes[..., 2:], anchors[:, 2:])
    shared = (high - low).clamp(min=0).prod(-1)
    both = (boxes[..., 2:] - boxes[..., :2]).prod(-1) + (anchors[:, 2:] - anchors[:, :2]).prod(-1)
    return shared / (both - shared)


def one_by_one(moved: Tensor, scores: Tensor, targets: list[Tensor]) -> Tensor:
    loss = scores.new_zeros(())
    for move, score, boxes in zip(moved, scores, targets, strict=True):  # the cause
        best, which = overlap(boxes, anchors).max(0)  # the cause
        fits = best > 0.3  # the cause
        wanted = boxes[which[fits]] - anchors[fits]  # the cause
        loss = loss + F.smooth_l1_loss(move[fits], wanted, reduction="sum")  # the cause
        loss = loss + F.binary_cross_entropy_with_logits(score, fits.float())  # the cause
    return loss


def at_once(moved: Tensor, scores: Tensor, targets: list[Tensor]) -> Tensor:
    boxes = pad_sequence(targets, batch_first=True)  # an empty box overlaps none
    best, which = overlap(boxes, anchors).max(1)
    fits = (best > 0.3).float()
    wanted = boxes.gather(1, which.unsqueeze(2).expand(-1, -1, 4)) - anchors
    loss = (F.smooth_l1_loss(moved, wanted, reduction="none").sum(2) * fits).sum()
    return loss + len(targets) * F.binary_cross_entropy_with_logits(scores, fits)


rows = torch.arange(size // 16, device=args.device) * 16.0 + 8
centres = torch.cartesian_prod(rows, rows).repeat_interleave(3, 0)
reach = torch.tensor([12.0, 24.0, 48.0], device=args.device).repeat(len(rows) ** 2).unsqueeze(1)
anchors = torch.cat([centres - reach, centres + reach], 1)
corners = [torch.rand(int(n), 2, device=args.device) * size * 0.6 for n in torch.randint(3, 25, (batch,))]
targets = [torch.cat([c, c + 16 + torch.rand_like(c) * size * 0.3], 1) for c in corners]
stages = [convolution(3, width), *(convolution(width * n, width * n * 2) for n in (1, 2, 4))]
model = nn.Sequential(*stages, nn.Conv2d(8 * width, 3 * 5, 1))
model.to(args.device, memory_format=torch.channels_last)
images = torch.randn(batch, 3, size, size, device=args.device).to(memory_format=torch.channels_last)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
matched = at_once if args.fixed else one_by_one
clock = Clock(args)
while True:
    with torch.autocast(args.device, torch.bfloat16):
        found = model(images)
    found = found.float().permute(0, 2, 3, 1).reshape(batch, -1, 5)
    loss = matched(found[..., :4], found[..., 4], targets)  # the cause
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if not clock.step():
        break
