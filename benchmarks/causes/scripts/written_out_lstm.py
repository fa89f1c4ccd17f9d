"""An LSTM is written out, step by step in time. --fixed: nn.LSTM with the same weights."""

import torch
from clock import FIXED, Clock

lstm, head = torch.nn.LSTM(32, 64, batch_first=True), torch.nn.Linear(64, 1)


def unrolled(x):
    """Compute what `lstm` does."""
    hidden = cell = x.new_zeros(len(x), 64)
    outputs = []
    for now in x.unbind(1):
        gates = (
            now @ lstm.weight_ih_l0.T + lstm.bias_ih_l0 + hidden @ lstm.weight_hh_l0.T + lstm.bias_hh_l0
        )  # the cause
        take, forget, new, give = gates.chunk(4, 1)  # the cause
        cell = forget.sigmoid() * cell + take.sigmoid() * new.tanh()  # the cause
        hidden = give.sigmoid() * cell.tanh()  # the cause
        outputs.append(hidden)
    return torch.stack(outputs, 1)


optimizer = torch.optim.Adam([*lstm.parameters(), *head.parameters()])
clock = Clock(250)
while True:
    x = torch.rand(24, 60, 32)
    out = lstm(x)[0] if FIXED else unrolled(x)
    loss = torch.nn.functional.mse_loss(head(out)[..., 0], x.mean(2))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if not clock.step():
        break
