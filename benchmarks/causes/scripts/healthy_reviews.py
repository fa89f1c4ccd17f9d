"""Rates reviews from one to five stars with attention over word vectors."""

import argparse
import random
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

STARS = 5


def write_reviews(count, vocabulary=4000, seed=0):
    rng = random.Random(seed)
    words = [f"w{i}" for i in range(vocabulary)]
    share = vocabulary // (2 * STARS)
    reviews = []
    for _ in range(count):
        star, length = rng.randrange(STARS), rng.randint(40, 90)
        telling = rng.choices(words[star * share : (star + 1) * share], k=length // 4)
        text = telling + rng.choices(words, k=length - len(telling))
        rng.shuffle(text)
        reviews.append((" ".join(text), star))
    return reviews


class Reviews(Dataset):
    def __init__(self, reviews, numbers):
        self.texts = [torch.tensor([numbers.get(word, 1) for word in text.split()]) for text, _ in reviews]
        self.stars = [star for _, star in reviews]

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, index):
        return self.texts[index], self.stars[index]


def collate(batch):
    texts, stars = zip(*batch)
    return pad_sequence(texts, batch_first=True), torch.tensor(stars)


class AttentionPool(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.key, self.query = nn.Linear(width, width), nn.Parameter(0.1 * torch.randn(width))

    def forward(self, x, padding):
        scores = self.key(x).tanh() @ self.query
        weights = scores.masked_fill(padding, float("-inf")).softmax(1)
        return (weights.unsqueeze(-1) * x).sum(1)


class ReviewNet(nn.Module):
    def __init__(self, vocabulary, width=64):
        super().__init__()
        self.words = nn.Embedding(vocabulary, width, padding_idx=0)
        self.mix = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.pool, self.head = AttentionPool(width), nn.Linear(width, STARS)

    def forward(self, texts):
        padding = texts == 0
        return self.head(self.pool(self.mix(self.words(texts), src_key_padding_mask=padding), padding))


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    off = torch.cat([(model(texts).argmax(1) - stars).abs() for texts, stars in loader]).float()
    model.train()
    return (off == 0).float().mean().item(), off.mean().item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(0)
    reviews = write_reviews(5200)
    training, held_out = reviews[:-400], reviews[-400:]
    words = sorted({word for text, _ in training for word in text.split()})
    numbers = {word: i for i, word in enumerate(words, start=2)}
    loader = DataLoader(Reviews(training, numbers), 48, shuffle=True, collate_fn=collate)
    validation = DataLoader(Reviews(held_out, numbers), 200, collate_fn=collate)
    model = ReviewNet(len(numbers) + 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    seconds = step = 0
    for epoch in range(args.epochs):
        began = time.perf_counter()
        for texts, stars in loader:
            loss = F.cross_entropy(model(texts), stars)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step += 1
            if step % 50 == 0:
                print(f"step {step} loss {loss.item():.5f}", flush=True)
        seconds += time.perf_counter() - began
        accuracy, distance = evaluate(model, validation)
        print(f"epoch {epoch} loss {loss.item():.5f} accuracy {accuracy:.3f} off by {distance:.3f} stars", flush=True)
    print(f"{seconds / step * 1e3:.2f} ms per step")


if __name__ == "__main__":
    main()
