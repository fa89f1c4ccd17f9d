"""Keeps an average of the weights of a deep, narrow network, parameter by parameter."""

import copy

import torch


@torch.no_grad()
def follow(average, model, decay=0.999):
    for kept, now in zip(average.parameters(), model.parameters(), strict=True):
        kept.mul_(decay).add_(now, alpha=1 - decay)


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    blocks = [m for _ in range(80) for m in (torch.nn.Linear(48, 48), torch.nn.LayerNorm(48))]
    model = torch.nn.Sequential(*blocks, torch.nn.Linear(48, 8))
    average = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)
    for step in range(3000):
        inputs, labels = torch.randn(16, 48), torch.randint(8, (16,))
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        follow(average, model)
        if step % 500 == 0:
            print(step, loss.item())


if __name__ == "__main__":
    main()
