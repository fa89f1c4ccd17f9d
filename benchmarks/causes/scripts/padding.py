"""Every text is padded to the longest that may come. --fixed: to the longest of its batch."""

import torch
from clock import FIXED, Clock
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset


class Texts(Dataset):
    def __init__(self):
        self.texts = [torch.randint(1, 1000, (int(n),)) for n in torch.randint(10, 40, (2000,))]

    def __len__(self):
        return 200_000

    def __getitem__(self, index):
        return self.texts[index % 2000]


def collate(texts):  # the cause
    padded = pad_sequence(texts, batch_first=True)
    if FIXED:
        return padded
    return torch.nn.functional.pad(padded, (0, 128 - padded.shape[1]))  # the cause


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(1000, 64, padding_idx=0)
        layer = torch.nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
        self.body = torch.nn.TransformerEncoder(layer, 2)

    def forward(self, tokens):
        return self.body(self.embed(tokens), src_key_padding_mask=tokens == 0)


model = Model()
optimizer = torch.optim.AdamW(model.parameters())
clock = Clock(250)
for tokens in DataLoader(Texts(), batch_size=16, collate_fn=collate):  # the cause
    loss = model(tokens).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if not clock.step():
        break
