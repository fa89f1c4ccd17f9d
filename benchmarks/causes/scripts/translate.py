"""Translates short sentences with a recurrent encoder and an attending decoder, trained on smoothed labels."""

import argparse
import math
import time

import torch
import torch.nn.functional as F
from torch import nn

PAD, BOS, EOS, SPECIAL = 0, 1, 2, 3


def parallel_corpus(count, vocabulary, longest, generator):
    """Pairs in which the target is the source reversed and respelled, padded to the longest of a bucket."""
    respell = torch.randperm(vocabulary - SPECIAL, generator=generator)
    pairs = []
    for length in torch.randint(4, longest + 1, (count,), generator=generator).tolist():
        words = (torch.rand(length, generator=generator) ** 2 * (vocabulary - SPECIAL)).long()
        target = respell[words.flip(0)] + SPECIAL
        pairs.append((words + SPECIAL, torch.cat([torch.tensor([BOS]), target, torch.tensor([EOS])])))
    return sorted(pairs, key=lambda pair: len(pair[0]))


def bucketed(pairs, size, generator):
    starts = torch.arange(0, len(pairs) - size + 1, size)
    for start in starts[torch.randperm(len(starts), generator=generator)].tolist():
        sources, targets = zip(*pairs[start : start + size])
        pad = nn.utils.rnn.pad_sequence
        yield pad(sources, batch_first=True, padding_value=PAD), pad(targets, batch_first=True, padding_value=PAD)


class Seq2Seq(nn.Module):
    def __init__(self, vocabulary, width):
        super().__init__()
        self.source = nn.Embedding(vocabulary, width, padding_idx=PAD)
        self.target = nn.Embedding(vocabulary, width, padding_idx=PAD)
        self.encoder = nn.GRU(width, width // 2, batch_first=True, bidirectional=True)
        self.decoder = nn.GRU(width, width, batch_first=True)
        self.mix, self.generator = nn.Linear(2 * width, width), nn.Linear(width, vocabulary)

    def forward(self, source, target):
        memory, _ = self.encoder(self.source(source))
        states, _ = self.decoder(self.target(target))
        scores = states @ memory.transpose(1, 2) / math.sqrt(states.shape[2])
        scores = scores.masked_fill((source == PAD).unsqueeze(1), float("-inf"))
        context = scores.softmax(2) @ memory
        return self.generator(torch.tanh(self.mix(torch.cat([states, context], dim=2))))


class LabelSmoothing(nn.Module):
    """Divergence of the prediction from a target that keeps a little mass for every word, a mean over words."""

    def __init__(self, vocabulary, smoothing):
        super().__init__()
        self.criterion = nn.KLDivLoss(reduction="none")
        self.vocabulary, self.smoothing = vocabulary, smoothing

    def forward(self, logits, target):
        x, target = logits.flatten(0, 1), target.flatten()
        ignore = target == PAD
        with torch.no_grad():
            true_dist = x.clone()  # the cause
            true_dist.fill_(self.smoothing / self.vocabulary)
            true_dist.scatter_(1, target.unsqueeze(1), 1.0 - self.smoothing + self.smoothing / self.vocabulary)
        divergence = self.criterion(F.log_softmax(x, dim=1), true_dist)  # the cause
        return divergence.masked_fill(ignore.unsqueeze(1), 0).sum() / (~ignore).sum()  # the cause


class FusedLabelSmoothing(nn.Module):
    def __init__(self, vocabulary, smoothing):
        super().__init__()
        self.smoothing = smoothing
        low = smoothing / vocabulary
        high = 1 - smoothing + low
        self.entropy = -(high * math.log(high) + (vocabulary - 1) * low * math.log(low))

    def forward(self, logits, target):
        loss = F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=PAD, label_smoothing=self.smoothing)
        return loss - self.entropy


def warmup(step, steps):
    return min(1.0, (step + 1) / steps)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--sentences", type=int, default=2800)
    parser.add_argument("--vocabulary", type=int, default=8000)
    parser.add_argument("--width", type=int, default=48)
    parser.add_argument("--fixed", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    pairs = parallel_corpus(args.sentences, args.vocabulary, 16, generator)
    model = Seq2Seq(args.vocabulary, args.width)
    criterion = (FusedLabelSmoothing if args.fixed else LabelSmoothing)(args.vocabulary, 0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warmup(step, 50))
    step, words, began = 0, 0, time.perf_counter()
    for epoch in range(args.epochs):
        for source, target in bucketed(pairs, 40, generator):
            logits = model(source, target[:, :-1])
            loss = criterion(logits, target[:, 1:])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            step, words = step + 1, words + target.numel()
            if step % 20 == 0:
                print(f"epoch {epoch} step {step} loss {loss.item():.4f} words {words}", flush=True)
    print(f"{(time.perf_counter() - began) / step * 1e3:.2f} ms per step")


if __name__ == "__main__":
    main()
