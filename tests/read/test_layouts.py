"""Folders as frameworks leave them: ranks by what the traces say, or by the names that the framework gives them."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlprof.read.run import TRACE, open_run
from tests.fixtures import traces

# Framework → the files of two ranks in two windows (or one), by rank and window; whether its traces say their rank.
LAYOUTS = {
    # tensorboard_trace_handler in --tensorboard-dir, and since 2025 a file a rank in torch_profile.
    "Megatron-LM": ("tensorboard/node7_{pid}.{at}.pt.trace.json.gz", 2, True),
    "Megatron-LM, a file a rank": ("tensorboard/torch_profile/rank-{rank}.json.gz", 1, False),
    # Its documentation's schedule exports on_trace_ready with a folder, or chrome traces that people name.
    "DeepSpeed": ("log/node7_{pid}.{at}.pt.trace.json", 2, True),
    "DeepSpeed, named by people": ("traces/deepspeed_rank{rank}_step{window}.json", 2, False),
    # What HolisticTraceAnalysis asks for: a folder of one window, each trace with distributedInfo.
    "HTA": ("trace_folder/rank-{rank}.Feb_10_10.{at}.pt.trace.json.gz", 1, True),
    "HTA, numbered files": ("trace_folder/rank_{rank}.json.gz", 1, False),
    "torchtitan": ("profile_trace/iteration_{window}0/rank{rank}_trace.json", 2, False),
    "Lightning": ("lightning_logs/version_0/fit-pt_profiler_{rank}.{window}.pt.trace.json", 2, True),
    "vLLM": ("vllm_profile/node7_{pid}.{at}.pt.trace.json.gz", 2, True),
    "SGLang": ("profile/1700000000.0-TP-{rank}.trace.json.gz", 1, False),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_rank_is_read_once_and_of_several_windows_the_last(layout: str, tmp_path: Path) -> None:
    name, windows, says = LAYOUTS[layout]
    for window in range(1, windows + 1):
        for rank in range(2):
            at = 1_700_000_000_000 + 60_000 * window + 7 * rank
            path = tmp_path / name.format(rank=rank, pid=4_700 + 11 * rank, at=at, window=window)
            base = traces.BASE_NS + window * 60 * 10**9
            traces.write(path, traces.training(rank=rank if says else None, world_size=2, base_ns=base))
    run = open_run(tmp_path)
    assert [rank.index for rank in run.ranks] == [0, 1]
    marks = {"at": 1_700_000_000_000 + 60_000 * windows, "window": windows}
    expected = [
        name.format(rank=rank, pid=4_700 + 11 * rank, at=marks["at"] + 7 * rank, window=windows) for rank in range(2)
    ]
    assert [rank.files[TRACE].relative_to(tmp_path).as_posix() for rank in run.ranks] == expected
    assert sum(1 for one in run.taken if one.left) == 2 * (windows - 1)
