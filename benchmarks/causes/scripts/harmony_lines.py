"""Writes the alto to a soprano melody: an encoder-decoder transformer on notes."""

import argparse
import time

import torch
import torch.nn.functional as F
from torch import nn

NOTES, START, LENGTH = 48, 48, 16


def make_chorales(count, seed):
    generator = torch.Generator().manual_seed(seed)
    steps = torch.randint(-3, 4, (count, LENGTH), generator=generator)
    soprano = (24 + steps.cumsum(1)).clamp(8, NOTES - 1)
    third = torch.where(soprano % 4 < 2, 4, 3)
    fourth = (torch.rand(count, LENGTH, generator=generator) < 0.1).long()
    return soprano, (soprano - third - fourth).clamp(0, NOTES - 1)


class Harmoniser(nn.Module):
    def __init__(self, width=96, heads=4, depth=2):
        super().__init__()
        self.note, self.place = nn.Embedding(NOTES + 1, width), nn.Embedding(LENGTH, width)
        options = dict(dim_feedforward=2 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(width, heads, **options), depth)
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(width, heads, **options), depth)
        self.out = nn.Linear(width, NOTES)

    def embed(self, notes):
        return self.note(notes) + self.place.weight[: notes.shape[1]]

    def listen(self, soprano):
        return self.encoder(self.embed(soprano))

    def sing(self, alto, memory):
        mask = torch.ones(alto.shape[1], alto.shape[1], dtype=torch.bool).triu(1)
        return self.out(self.decoder(self.embed(alto), memory, tgt_mask=mask))


def shifted(alto):
    """What the decoder has heard before it sings each note."""
    return torch.cat([torch.full_like(alto[:, :1], START), alto[:, :-1]], 1)


def chorale_loss(model, soprano, alto):
    memory, heard = model.listen(soprano), shifted(alto)
    sung = []
    for t in range(alto.shape[1]):  # the cause
        sung.append(model.sing(heard[:, : t + 1], memory)[:, -1])  # the cause
    return F.cross_entropy(torch.stack(sung, 1).flatten(0, 1), alto.flatten())


def chorale_loss_in_one(model, soprano, alto):
    logits = model.sing(shifted(alto), model.listen(soprano))
    return F.cross_entropy(logits.flatten(0, 1), alto.flatten())


@torch.no_grad()
def harmonise(model, soprano):
    memory, alto = model.listen(soprano), torch.full((len(soprano), 1), START)
    for _ in range(LENGTH):
        alto = torch.cat([alto, model.sing(alto[:, -LENGTH:], memory)[:, -1:].argmax(-1)], 1)
    return alto[:, 1:]


def main(args):
    torch.manual_seed(args.seed)
    soprano, alto = make_chorales(1024, args.seed)
    model = Harmoniser()
    objective = chorale_loss_in_one if args.fixed else chorale_loss
    optimizer = torch.optim.Adam(model.parameters(), lr=8e-4, betas=(0.9, 0.98))
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / 40))
    durations = []
    for step in range(args.steps):
        begin = time.perf_counter()
        pick = torch.randint(0, len(soprano), (args.batch,))
        loss = objective(model, soprano[pick], alto[pick])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warmup.step()
        durations.append(time.perf_counter() - begin)
    model.eval()
    print("alto:", harmonise(model, soprano[:1])[0].tolist())
    late = durations[len(durations) // 2 :]
    print(f"loss {loss.item():.6f}")
    print(f"{sum(late) / len(late) * 1e3:.2f} ms per step")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seed", type=int, default=6)
    parser.add_argument("--fixed", action="store_true")
    main(parser.parse_args())
