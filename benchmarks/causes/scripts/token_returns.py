"""Policy gradients for a small writer of tokens: returns per token, with a penalty for drift. --fixed: the remedy."""

import torch
import torch.nn.functional as F
from clock import FIXED, Clock
from torch import nn

TOKENS, WIDTH, LENGTH, BATCH, STEPS = 64, 48, 400, 8, 130
GAMMA, DRIFT = 0.98, 0.05


class Policy(nn.Module):
    def __init__(self, kernel=3, layers=3):
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.convs = nn.ModuleList(nn.Conv1d(WIDTH, 2 * WIDTH, kernel, dilation=2**n) for n in range(layers))
        self.head, self.kernel = nn.Linear(WIDTH, TOKENS), kernel

    def forward(self, tokens):
        x = self.embed(tokens).transpose(1, 2)
        for conv in self.convs:
            reach = conv.dilation[0] * (self.kernel - 1)
            x = x + F.glu(conv(F.pad(x, (reach, 0))), dim=1)
        return self.head(x.transpose(1, 2))


def discounted_returns(rewards, lengths):
    if FIXED:
        steps = torch.arange(rewards.shape[1])
        ahead = (steps[:, None] - steps).clamp(min=0)
        return rewards @ (GAMMA**ahead).tril()
    returns = torch.zeros_like(rewards)
    for sample, length in enumerate(lengths.tolist()):
        running = torch.zeros(())
        for t in reversed(range(length)):  # the cause
            running = rewards[sample, t] + GAMMA * running  # the cause
            returns[sample, t] = running
    return returns


class Rollouts:
    """Answers of a frozen writer, with the log-probabilities that it gave them and a score for each."""

    def __init__(self, reference):
        self.reference = reference.requires_grad_(False).eval()

    @torch.no_grad()
    def __call__(self):
        tokens = torch.randint(TOKENS, (BATCH, LENGTH + 1))
        lengths = torch.randint(LENGTH // 2, LENGTH + 1, (BATCH,))
        mask = (torch.arange(LENGTH) < lengths[:, None]).float()
        old = log_probability(self.reference(tokens[:, :-1]), tokens[:, 1:])
        score = ((tokens[:, 1:] < TOKENS // 4) * mask).sum(1) / lengths
        return tokens, lengths, mask, old, score


def log_probability(logits, tokens):
    return -F.cross_entropy(logits.transpose(1, 2), tokens, reduction="none")


def advantages(new, old, score, lengths, mask):
    rewards = -DRIFT * (new.detach() - old) * mask
    rewards[torch.arange(BATCH), lengths - 1] += score
    returns = discounted_returns(rewards, lengths) * mask
    mean = (returns * mask).sum() / mask.sum()
    spread = (((returns - mean) ** 2 * mask).sum() / mask.sum()).sqrt()
    return (returns - mean) / (spread + 1e-8)


policy = Policy()
rollouts = Rollouts(Policy())
optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-4, fused=True)
clock, going = Clock(STEPS), True
while going:
    tokens, lengths, mask, old, score = rollouts()
    new = log_probability(policy(tokens[:, :-1]), tokens[:, 1:])
    advantage = advantages(new, old, score, lengths, mask)
    loss = -(advantage * new * mask).sum() / mask.sum()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
    going = clock.step()
print(f"loss {loss.item():.5f}")
