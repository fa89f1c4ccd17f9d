"""Runs a script once it is its turn: `waits.py TURN SCRIPT [ARGS]`. Before, it imports torch and wakes the GPU.

TURN.ready says that it has come so far; TURN.go lets it go on, unless it says why not.
"""

from __future__ import annotations

import runpy
import sys
import time
from pathlib import Path

import torch

turn, script = sys.argv[1:3]
sys.argv = sys.argv[2:]
sys.path[0] = str(Path(script).parent)
if torch.cuda.is_available():
    torch.ones(8, 8, device="cuda").mm(torch.ones(8, 8, device="cuda"))
    torch.cuda.synchronize()
Path(f"{turn}.ready").touch()
while not Path(f"{turn}.go").exists():
    time.sleep(0.02)
if why := Path(f"{turn}.go").read_text():
    sys.exit(why)
runpy.run_path(script, run_name="__main__")
