"""A recurrent network whose cell is written out, time by time. --fixed: nn.LSTM."""

import torch
import torch.nn.functional as F
from clock import Clock, options
from torch import Tensor, nn

args = options(steps=60)
width, batch, length = (16, 2, 8) if args.tiny else (512, 64, 96)


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen, self.kept = nn.Linear(width, 4 * width), nn.Linear(width, 4 * width)

    def forward(self, rows: Tensor) -> tuple[Tensor, None]:
        hidden = memory = rows.new_zeros(len(rows), width)
        outputs = []
        for now in rows.unbind(1):  # the cause
            into, forget, new, out = (self.seen(now) + self.kept(hidden)).chunk(4, 1)  # the cause
            memory = forget.sigmoid() * memory + into.sigmoid() * new.tanh()  # the cause
            hidden = out.sigmoid() * memory.tanh()  # the cause
            outputs.append(hidden)
        return torch.stack(outputs, 1), None


cell = (nn.LSTM(width, width, batch_first=True) if args.fixed else Cell()).to(args.device)
head = nn.Linear(width, width).to(args.device)
rows = torch.randn(batch, length, width, device=args.device)
optimizer = torch.optim.AdamW([*cell.parameters(), *head.parameters()], fused=True)
clock = Clock(args)
while True:
    with torch.autocast(args.device, torch.bfloat16):
        outputs, _ = cell(rows)  # the cause
        loss = F.mse_loss(head(outputs).float(), rows)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if not clock.step():
        break
