"""Records flight_recorder/: four gloo ranks of which one leaves the loop early, dumped while the others wait for it.

Ranks 0 and 1, and 2 and 3, have a group of their own. Recorded with torch 2.13, its paths replaced by others. Anew, in
four processes with MASTER_ADDR, MASTER_PORT, WORLD_SIZE=4, RANK and TORCH_FR_BUFFER_SIZE=2000:
python tests/golden/record_flight_recorder.py FOLDER
"""

import datetime
import os
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist


def dump(folder: Path, rank: int) -> None:
    """Write what the recorder has after some seconds, as pickle and as JSON, and end the process."""
    time.sleep(4)
    recorder = torch._C._distributed_c10d
    (folder / f"nccl_trace_rank_{rank}").write_bytes(recorder._dump_fr_trace())  # type: ignore[attr-defined]
    (folder / f"nccl_trace_rank_{rank}.json").write_bytes(recorder._dump_fr_trace_json())  # type: ignore[attr-defined]
    time.sleep(1)
    os._exit(0)


def train(gradients: torch.Tensor, pair: dist.ProcessGroup, steps: int) -> None:
    """Issue the collectives of some steps."""
    for _ in range(steps):
        dist.all_reduce(torch.ones(8), group=pair)
        dist.all_reduce(gradients)


def main() -> None:
    """Issue five steps of collectives, then one that rank 2 leaves out."""
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=30))
    low, high = dist.new_group([0, 1]), dist.new_group([2, 3])
    threading.Thread(target=dump, args=(Path(sys.argv[1]), rank), daemon=True).start()
    train(torch.ones(1000), low if rank < 2 else high, 5)
    if rank != 2:
        dist.all_reduce(torch.ones(77))
    else:
        time.sleep(30)


if __name__ == "__main__":
    main()
