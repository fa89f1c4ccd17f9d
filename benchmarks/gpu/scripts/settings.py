"""Train a small network with one setting that a profiler must see rightly, and print what the script itself knows.

--what tf32    float32 products in TF32, asked for by PyTorch's newer API where there is one
--what ieee    float32 products in float32, by the same API
--what fp16    autocast to float16 with a GradScaler
--what alloc   nothing: the allocator's settings come with PYTORCH_ALLOC_CONF
--what last    on the last GPU, which torch.cuda.set_device never names
"""

from __future__ import annotations

import argparse
import json
import os
import time
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own custom
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH = 256


def precision(how: str) -> str:
    """Set how float32 is multiplied, and return what PyTorch then says of it."""
    matmul: Any = torch.backends.cuda.matmul
    if hasattr(matmul, "fp32_precision"):
        matmul.fp32_precision = how
        return str(matmul.fp32_precision)
    matmul.allow_tf32 = how == "tf32"
    return "tf32" if matmul.allow_tf32 else "ieee"


def main() -> None:
    """Train, and print the truth."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--what", choices=["tf32", "ieee", "fp16", "alloc", "last"], default="alloc")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--linger-s", type=float, default=0.0, help="after the last step, with everything still there")
    args = parser.parse_args()

    torch.manual_seed(0)
    on_gpu = args.device == "cuda"
    told: dict[str, Any] = {"pid": os.getpid(), "alloc": os.environ.get("PYTORCH_ALLOC_CONF", "")}
    if args.what in ("tf32", "ieee"):
        told["precision"] = precision(args.what)
    device = torch.device("cpu")
    if on_gpu:
        device = torch.device("cuda", torch.cuda.device_count() - 1 if args.what == "last" else 0)
        told["uuid"] = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
    model = nn.Sequential(nn.Linear(args.width, args.width), nn.GELU(), nn.Linear(args.width, args.width)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    half = args.what == "fp16"
    scaler = torch.amp.GradScaler(device.type, enabled=half)
    data = TensorDataset(torch.randn(BATCH * args.steps, args.width))
    # Pinning memory makes a context on the current device, which is the first one.
    for (batch,) in DataLoader(data, BATCH, pin_memory=on_gpu and args.what != "last"):
        x = batch.to(device, non_blocking=True)
        with torch.autocast(device.type, torch.float16, enabled=half):
            loss = F.mse_loss(model(x), x)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
    told |= {"steps": args.steps, "loss": loss.item(), "scale": scaler.get_scale() if half else None}
    if on_gpu:
        told["backend"] = torch.cuda.get_allocator_backend()
    print(json.dumps(told), flush=True)
    time.sleep(args.linger_s)


if __name__ == "__main__":
    main()
