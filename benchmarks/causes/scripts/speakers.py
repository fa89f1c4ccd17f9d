"""Trains embeddings of speakers with the generalised end-to-end loss. --fixed: the remedy."""

import torch
import torch.nn.functional as F
from clock import FIXED, Clock
from torch import nn

SPEAKERS, UTTERANCES, MELS, FRAMES, STEPS = 12, 5, 40, 80, 80


class Voices:
    """Features of utterances: each speaker has a timbre, each utterance its own course."""

    def __init__(self, people=120):
        self.timbre = torch.randn(people, MELS)

    def batch(self):
        who = torch.randperm(len(self.timbre))[:SPEAKERS]
        course = torch.randn(SPEAKERS, UTTERANCES, FRAMES, MELS)
        return 0.4 * self.timbre[who][:, None, None] + course


class Encoder(nn.Module):
    def __init__(self, width=96, size=64):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(MELS, width, 5, padding=2),
            nn.ReLU(),
            nn.BatchNorm1d(width),
            nn.Conv1d(width, width, 3, padding=2, dilation=2),
            nn.ReLU(),
            nn.BatchNorm1d(width),
            nn.Conv1d(width, width, 3, padding=3, dilation=3),
            nn.ReLU(),
            nn.BatchNorm1d(width),
        )
        self.project = nn.Linear(2 * width, size)

    def forward(self, x):
        h = self.layers(x.flatten(0, 1).transpose(1, 2))
        pooled = torch.cat([h.mean(2), h.std(2)], 1)
        return F.normalize(self.project(pooled), dim=1).view(SPEAKERS, UTTERANCES, -1)


def similarities_each(embeddings):
    centroids = embeddings.mean(1)
    out = torch.zeros(SPEAKERS, UTTERANCES, SPEAKERS)
    for speaker, own in enumerate(embeddings):
        for number, utterance in enumerate(own):
            for other, centroid in enumerate(centroids):  # the cause
                if other == speaker:
                    centroid = (own.sum(0) - utterance) / (UTTERANCES - 1)
                out[speaker, number, other] = F.cosine_similarity(utterance, centroid, dim=0)  # the cause
    return out


def similarities(embeddings):
    total = embeddings.sum(1, keepdim=True)
    own = F.cosine_similarity(embeddings, (total - embeddings) / (UTTERANCES - 1), dim=-1)
    others = F.normalize(embeddings, dim=-1) @ F.normalize(total[:, 0] / UTTERANCES, dim=-1).T
    diagonal = torch.eye(SPEAKERS, dtype=torch.bool)[:, None]
    return torch.where(diagonal, own[:, :, None], others)


class SpeakerLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.w, self.b = nn.Parameter(torch.tensor(10.0)), nn.Parameter(torch.tensor(-5.0))

    def forward(self, embeddings):
        cosines = similarities(embeddings) if FIXED else similarities_each(embeddings)
        logits = self.w.clamp(min=1e-6) * cosines + self.b
        target = torch.arange(SPEAKERS).repeat_interleave(UTTERANCES)
        return F.cross_entropy(logits.flatten(0, 1), target)


voices, encoder, criterion = Voices(), Encoder(), SpeakerLoss()
parameters = [*encoder.parameters(), *criterion.parameters()]
optimizer = torch.optim.SGD(parameters, lr=0.01, momentum=0.9)
clock, going = Clock(STEPS), True
while going:
    loss = criterion(encoder(voices.batch()))
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(parameters, 3.0)
    optimizer.step()
    going = clock.step()
print(f"loss {loss.item():.5f}")
