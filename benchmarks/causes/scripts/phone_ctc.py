"""Recognises strings of phones with connectionist temporal classification. --fixed: the remedy."""

import torch
import torch.nn.functional as F
from clock import FIXED, Clock
from torch import nn

PHONES, MELS, FRAMES, SPOKEN, BATCH, STEPS = 40, 40, 210, 130, 12, 110
BLANK, DISPLAY_EVERY = 0, 40


class Corpus:
    """Utterances of phones, each of which lasts one frame or two."""

    def __init__(self):
        self.sound = torch.randn(PHONES, MELS)

    def batch(self):
        phones = torch.randint(1, PHONES, (BATCH, SPOKEN))
        lasting = torch.randint(1, 3, (BATCH, SPOKEN))
        features = 0.5 * torch.randn(BATCH, FRAMES, MELS)
        for number in range(BATCH):
            course = self.sound[phones[number].repeat_interleave(lasting[number])][:FRAMES]
            features[number, : len(course)] += course
        return features, phones, lasting.sum(1).clamp(max=FRAMES)


class Acoustic(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.convs = nn.Sequential(
            nn.Conv1d(MELS, width, 5, padding=2),
            nn.ReLU(),
            nn.BatchNorm1d(width),
            nn.Conv1d(width, width, 5, padding=2),
            nn.ReLU(),
            nn.BatchNorm1d(width),
            nn.Conv1d(width, width, 5, padding=2),
            nn.ReLU(),
            nn.BatchNorm1d(width),
        )
        self.head = nn.Linear(width, PHONES)

    def forward(self, features):
        return self.head(self.convs(features.transpose(1, 2)).transpose(1, 2)).log_softmax(-1)


def greedy(log_probs, length):
    best = log_probs[:length].argmax(-1).unique_consecutive()
    return best[best != BLANK].tolist()


def edit_distance(said, heard):
    row = list(range(len(heard) + 1))
    for i, a in enumerate(said, 1):
        diagonal, row[0] = row[0], i
        for j, b in enumerate(heard, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (a != b))
    return row[-1]


class Report:
    """The rate of wrong phones, as shown beside the loss."""

    def __init__(self, every):
        self.every, self.rate = every, float("nan")

    def update(self, step, log_probs, lengths, phones):
        if FIXED and step % self.every:
            return
        wrong = 0
        for number, length in enumerate(lengths.tolist()):
            heard = greedy(log_probs[number], length)
            wrong += edit_distance(phones[number].tolist(), heard)  # the cause
        self.rate = wrong / phones.numel()

    def show(self, step, loss):
        if step % self.every == 0:
            print(f"{step:5} loss {loss.item():.4f} phone error {self.rate:.3f}")


corpus, model, report = Corpus(), Acoustic(), Report(DISPLAY_EVERY)
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, fused=True)
clock, going, step = Clock(STEPS), True, 0
while going:
    step += 1
    features, phones, lengths = corpus.batch()
    log_probs = model(features)
    spoken = torch.full((BATCH,), SPOKEN)
    loss = F.ctc_loss(log_probs.transpose(0, 1), phones, lengths, spoken, BLANK, zero_infinity=True)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    optimizer.step()
    report.update(step, log_probs.detach(), lengths, phones)  # the cause
    report.show(step, loss)
    going = clock.step()
print(f"loss {loss.item():.5f}")
