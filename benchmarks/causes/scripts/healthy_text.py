"""A classifier of texts of various lengths, in batches of about the same. Nothing is known to be wrong with it."""

import random
import time

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset, Sampler

VOCABULARY, STEPS, WARM = 5_000, 110, 10


class Texts(Dataset):
    """Texts as tensors of numbers of words, all of them tokenised."""

    def __init__(self, count=6_000):
        generator = torch.Generator().manual_seed(5)
        lengths = torch.randint(8, 60, (count,), generator=generator).tolist()
        self.texts = [torch.randint(1, VOCABULARY, (length,), generator=generator) for length in lengths]
        self.labels = [int(text.float().mean() > VOCABULARY / 2) for text in self.texts]

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, index):
        return self.texts[index], self.labels[index]


class LengthBatches(Sampler):
    """Shuffles, sorts by length in large pools, and shuffles the batches."""

    def __init__(self, lengths, batch_size, pool=50, seed=0):
        self.lengths, self.batch_size, self.pool = lengths, batch_size, pool * batch_size
        self.random = random.Random(seed)

    def __len__(self):
        return -(-len(self.lengths) // self.batch_size)

    def __iter__(self):
        order = list(range(len(self.lengths)))
        self.random.shuffle(order)
        batches = []
        for start in range(0, len(order), self.pool):
            pool = sorted(order[start : start + self.pool], key=self.lengths.__getitem__)
            batches += [pool[at : at + self.batch_size] for at in range(0, len(pool), self.batch_size)]
        self.random.shuffle(batches)
        return iter(batches)


def collate(samples):
    texts, labels = zip(*samples, strict=True)
    lengths = torch.tensor([len(text) for text in texts])
    return pad_sequence(texts, batch_first=True), lengths, torch.tensor(labels)


class Classifier(nn.Module):
    def __init__(self, width=96):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width, padding_idx=0)
        self.rnn = nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.head = nn.Sequential(nn.Dropout(0.2), nn.Linear(2 * width, 2))

    def forward(self, ids, lengths):
        packed = pack_padded_sequence(self.embedding(ids), lengths, batch_first=True, enforce_sorted=False)
        _, last = self.rnn(packed)
        return self.head(torch.cat([last[0], last[1]], 1))


torch.manual_seed(0)
torch.set_num_threads(1)  # the operations are too small to be shared out
data = Texts()
sampler = LengthBatches([len(text) for text in data.texts], batch_size=32)
loader = DataLoader(data, batch_sampler=sampler, collate_fn=collate)
model = Classifier()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
step, began, running = 0, 0.0, torch.zeros(())
while step < STEPS:
    for ids, lengths, labels in loader:
        loss = nn.functional.cross_entropy(model(ids, lengths), labels)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        running += loss.detach()
        step += 1
        if step == WARM:
            began = time.perf_counter()
        if step % 50 == 0:
            print(f"step {step}: loss {running.item() / 50:.3f}")
            running.zero_()
        if step == STEPS:
            break
print(f"STEP_MS {(time.perf_counter() - began) / (STEPS - WARM) * 1e3:.3f}")
