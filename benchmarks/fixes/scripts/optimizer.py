"""Trains a deep, narrow network: its optimizer updates each of many small parameters by itself."""

import torch


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    blocks = [m for _ in range(60) for m in (torch.nn.Linear(64, 64), torch.nn.LayerNorm(64), torch.nn.GELU())]
    model = torch.nn.Sequential(*blocks, torch.nn.Linear(64, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    for step in range(3000):
        inputs, labels = torch.randn(16, 64), torch.randint(8, (16,))
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        if step % 500 == 0:
            print(step, loss.item())


if __name__ == "__main__":
    main()
