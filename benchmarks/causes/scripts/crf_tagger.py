"""A BiLSTM with a conditional random field tags the words of sentences. --fixed: the remedy."""

import torch
from clock import FIXED, Clock
from torch import nn

WORDS, TAGS, LENGTH, BATCH = 2_000, 9, 24, 16


class CRF(nn.Module):
    def __init__(self, tags):
        super().__init__()
        self.tags = tags
        self.transitions = nn.Parameter(torch.randn(tags, tags) * 0.1)  # to, from
        self.start = nn.Parameter(torch.zeros(tags))
        self.stop = nn.Parameter(torch.zeros(tags))

    def log_partition(self, emissions):
        alpha = self.start + emissions[:, 0]
        for t in range(1, emissions.shape[1]):
            if FIXED:
                scores = alpha[:, None, :] + self.transitions + emissions[:, t, :, None]
                alpha = torch.logsumexp(scores, dim=2)
                continue
            alphas_t = []
            for tag in range(self.tags):  # the cause
                scores = alpha + self.transitions[tag] + emissions[:, t, tag].unsqueeze(1)  # the cause
                alphas_t.append(torch.logsumexp(scores, dim=1))  # the cause
            alpha = torch.stack(alphas_t, dim=1)  # the cause
        return torch.logsumexp(alpha + self.stop, dim=1)

    def path_score(self, emissions, tags):
        emitted = emissions.gather(2, tags[:, :, None]).squeeze(2).sum(1)
        moved = self.transitions[tags[:, 1:], tags[:, :-1]].sum(1)
        return emitted + moved + self.start[tags[:, 0]] + self.stop[tags[:, -1]]

    def forward(self, emissions, tags):
        return (self.log_partition(emissions) - self.path_score(emissions, tags)).mean()


class Tagger(nn.Module):
    def __init__(self, embedding=64, hidden=64):
        super().__init__()
        self.words = nn.Embedding(WORDS, embedding)
        self.lstm = nn.LSTM(embedding, hidden, bidirectional=True, batch_first=True)
        self.emissions = nn.Linear(2 * hidden, TAGS)
        self.crf = CRF(TAGS)

    def forward(self, words, tags):
        hidden, _ = self.lstm(self.words(words))
        return self.crf(self.emissions(hidden), tags)


def sentences():
    corpus = torch.randint(0, WORDS, (800, LENGTH))
    tags = (corpus + corpus.roll(1, 1) // 400) % TAGS
    while True:
        for rows in torch.randperm(len(corpus)).split(BATCH):
            yield corpus[rows], tags[rows]


model = Tagger()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
clock = Clock(200)
for words, tags in sentences():
    loss = model(words, tags)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    optimizer.step()
    if not clock.step():
        break
print(f"loss {loss.item():.3f}")
