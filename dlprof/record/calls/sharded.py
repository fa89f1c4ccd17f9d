"""Names the module whose parameters an exchange of FSDP's first version moves, while the profiler records.

Its own ranges do not say whose they are, and it gathers parameters ahead, while another module runs. A range is
"dlprof::all_gather nn.Module: PATH (Class)", or "dlprof::reduce …" of gradients. FSDP2's own ranges name the module.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from dlprof.record.calls.attribution import passing
from dlprof.record.captured import capture_test
from dlprof.record.hooks import Patch, hidden, put
from dlprof.record.model.ranges import Ranges

# By module of torch's, class there ("": none) and function: what its range is called, and which argument says whose
# parameters it moves. None of these is in PyTorch's documentation; without them the ranges are not there.
_MOVING = {
    # With the views of what was gathered, whose functions are the module's as well.
    ("_flat_param", "FlatParamHandle", "unshard"): ("all_gather", 0),
    ("_runtime_utils", "", "_reduce_grad"): ("reduce", 1),
    ("_runtime_utils", "", "_reduce_grad_no_shard"): ("reduce", 1),
}


def name_exchanges(ranges: Ranges) -> list[Patch]:
    """Open a range around each exchange until the patches are undone; none where the script does not use this FSDP."""
    patches = []
    for (module, kind, name), (moves, place) in _MOVING.items():
        owner: Any = sys.modules.get(f"torch.distributed.fsdp.{module}")
        owner = getattr(owner, kind, None) if kind else owner
        original = vars(owner).get(name) if owner is not None else None
        if original is not None:
            patches.append(put(owner, name, _named(original, ranges, moves, place)))
    return patches


def _named(original: Callable[..., Any], ranges: Ranges, moves: str, place: int) -> Any:
    is_compiling, is_captured = sys.modules["torch"].compiler.is_compiling, capture_test()

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        opened = None
        if not is_compiling() and len(args) > place and not is_captured():
            module = getattr(args[place], "_fully_sharded_module", None)
            opened = None if module is None else ranges.open_exchange(module, moves)
        try:
            with passing:
                return original(*args, **kwargs)
        finally:
            if opened is not None:
                opened.__exit__(None, None, None)

    return hidden(call)
