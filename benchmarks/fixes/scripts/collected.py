"""Calls the garbage collector in every step, to save memory."""

import gc

import torch


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    embedding = torch.nn.Embedding(1000, 128)
    layer = torch.nn.TransformerEncoderLayer(128, 4, dim_feedforward=512, dropout=0.0, batch_first=True)
    model = torch.nn.Sequential(embedding, layer, torch.nn.Linear(128, 1000))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(1500):
        tokens = torch.randint(1000, (8, 64))
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        gc.collect()
        if step % 100 == 0:
            print(step, loss.item())


if __name__ == "__main__":
    main()
