"""A folder with a mixture of files is one run: each file by its content, each rank once, what is left with a reason."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from dlprof.commands.report import analyse
from dlprof.errors import DlprofError
from dlprof.read import mixture
from dlprof.read.mixture import gather, one_file
from dlprof.read.run import TRACE, open_run
from dlprof.units import listed
from tests.fixtures import dialects, dumps, runs, traces

SMI = "timestamp, index, utilization.gpu [%]\n2026/03/04 05:06:07.250, 0, 87 %\n"


def mixed(folder: Path) -> Path:
    """Write two windows of two ranks, and what else lies in such folders."""
    for window in range(2):
        for rank in range(2):
            traces.write(folder / f"iteration_{window}" / f"rank{rank}.json.gz", traces.training(rank=rank))
    (folder / "readings.txt").write_text(SMI)
    (folder / "loss.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    (folder / "train.log").write_text("step 1 loss 2\n")
    (folder / "et.json").write_text(dialects.execution_trace())
    (folder / "model.pt").write_bytes(b"PK\x03\x04 weights")
    (folder / "timeline").write_text(dialects.horovod(ranks=2))
    return folder


def test_a_mixture_is_one_run_and_every_file_is_accounted_for(tmp_path: Path) -> None:
    folder = mixed(tmp_path / "job")
    found = gather(folder)
    assert {rank: sorted(files) for rank, files in found.files.items()} == {0: ["nvidia_smi", TRACE], 1: [TRACE]}
    assert {path.parent.name for files in found.files.values() for path in files.values() if path.suffix == ".gz"} == {
        "iteration_1"
    }
    told = {one.path.relative_to(folder).as_posix(): one for one in found.taken}
    assert len(told) == sum(path.is_file() for path in folder.rglob("*"))
    assert told["readings.txt"].ranks == (0,)
    assert "picture" in told["loss.png"].left
    assert "checkpoints" in told["model.pt"].left
    assert "text" in told["train.log"].left
    assert "window 1" in told["iteration_0/rank1.json.gz"].left
    assert "no times of a device" in told["et.json"].left
    assert "read from a torch.profiler trace" in told["timeline"].left


def test_what_dlprof_keeps_beside_traces_is_none_of_them(tmp_path: Path) -> None:
    traces.write(tmp_path / "rank0.json", traces.training())
    before = gather(tmp_path)
    traces.write(tmp_path / ".dlprof" / "ranks" / "rank1.json", traces.training(rank=1))
    assert gather(tmp_path) == before


def test_another_window_can_be_asked_for(tmp_path: Path) -> None:
    folder = mixed(tmp_path / "job")
    first = open_run(folder, window=1)
    assert {rank.files[TRACE].parent.name for rank in first.ranks} == {"iteration_0"}
    with pytest.raises(DlprofError, match="no window 3: there are 2"):
        open_run(folder, window=3)
    with pytest.raises(DlprofError, match="no window 2"):
        open_run(runs.foreign(tmp_path / "one", traces.training()), window=2)


def test_a_window_that_is_cut_off_is_not_the_last_complete_one(tmp_path: Path) -> None:
    folder = mixed(tmp_path / "job")
    path = folder / "iteration_1" / "rank1.json.gz"
    path.write_bytes(path.read_bytes()[:-20])
    run = open_run(folder)
    assert {rank.files[TRACE].parent.name for rank in run.ranks} == {"iteration_0"}
    assert any("2 windows are there; read: 1" in w for w in run.warnings)


def test_a_log_of_gpus_alone_is_a_run(tmp_path: Path) -> None:
    (tmp_path / "gpu.csv").write_text(SMI)
    for where in (tmp_path, tmp_path / "gpu.csv"):
        assert [(rank.index, list(rank.files)) for rank in open_run(where).ranks] == [(0, ["nvidia_smi"])]


def test_a_file_of_several_ranks_is_that_many(tmp_path: Path) -> None:
    (tmp_path / "timeline.json").write_text(dialects.horovod(ranks=3))
    found = one_file(tmp_path / "timeline.json")
    assert {rank: pieces["horovod"] for rank, pieces in found.pieces.items()} == {0: "0", 1: "1", 2: "2"}


def test_a_file_of_no_known_format_is_refused_with_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("some words\n")
    with pytest.raises(DlprofError, match="dlprof explain sources"):
        open_run(tmp_path / "notes")
    (tmp_path / "half.json").write_text('{"schemaVersion": 1')
    assert one_file(tmp_path / "half.json").files[0][TRACE].name == "half.json"


def test_files_of_a_process_are_windows_of_one_rank(tmp_path: Path) -> None:
    for at in (1700000000000, 1700000009000):
        traces.write(tmp_path / f"node_4711.{at}.pt.trace.json", traces.training(rank=None))
    run = open_run(tmp_path)
    assert [rank.files[TRACE].name for rank in run.ranks] == ["node_4711.1700000009000.pt.trace.json"]


def test_beside_a_recording_its_own_trace_is_read(tmp_path: Path) -> None:
    run = runs.recorded(tmp_path / "run", (traces.training(world_size=1), [], runs.CPU))
    (run / "gpu.csv").write_text(SMI)
    traces.write(run / "other.json", traces.training(world_size=1))
    opened = open_run(run)
    assert sorted(opened.ranks[0].files) == ["nvidia_smi", TRACE]
    assert opened.ranks[0].files[TRACE].parent.name == "00000"
    assert [one.path.name for one in opened.taken] == ["gpu.csv"]


def test_odd_files_are_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    traces.write(tmp_path / "job" / "rank0.json", traces.training(world_size=1))
    os.mkfifo(tmp_path / "job" / "pipe")
    (tmp_path / "secret").write_text("own words")
    (tmp_path / "job" / "link").symlink_to(tmp_path / "secret")
    found = gather(tmp_path / "job")
    assert [one.path.name for one in found.taken] == ["rank0.json"]
    assert any("not followed" in w for w in found.warnings)
    monkeypatch.setattr(mixture, "MOST_OTHERS", 2)
    for n in range(5):
        (tmp_path / "job" / f"{n}.png").write_bytes(b"\x89PNG\r\n")
    assert any("3 more files" in w for w in gather(tmp_path / "job").warnings)


@pytest.mark.parametrize("link", [Path.symlink_to, Path.hardlink_to])
def test_a_second_name_of_a_file_makes_no_second_rank(tmp_path: Path, link: Callable[[Path, Path], None]) -> None:
    file = traces.write(tmp_path / "job" / "rank3.json", traces.training(rank=None))
    for n in (0, 7):
        link(tmp_path / "job" / f"rank{n}.json", file)
    found = gather(tmp_path / "job")
    assert len(found.files) == 1
    assert sorted(bool(one.left) for one in found.taken) == [False, True, True]
    (warning,) = found.warnings
    assert warning.count("the same file as") == 2


def test_a_folder_of_links_to_windows_reads_each_window_once(tmp_path: Path) -> None:
    for rank in range(2):
        traces.write(tmp_path / "job" / "step_9" / f"rank{rank}.json", traces.training(rank=rank))
    (tmp_path / "job" / "latest").symlink_to("step_9")
    found = gather(tmp_path / "job")
    assert sorted(found.files) == [0, 1]
    assert not any("windows" in w for w in found.warnings)


@pytest.mark.parametrize("beside", [True, False])
def test_a_rank_that_no_job_has_is_named_and_makes_nothing_large(tmp_path: Path, beside: bool) -> None:
    traces.write(tmp_path / "b.json", traces.training(rank=10**9))
    if beside:
        traces.write(tmp_path / "a.json", traces.training(rank=1))
    found = gather(tmp_path)
    assert sorted(found.files) == [1 if beside else 0]
    assert "b.json: says that it is of rank 1,000,000,000" in found.warnings[0]
    assert sorted(one_file(tmp_path / "b.json").files) == [0]


@pytest.mark.parametrize(
    ("seconds", "read"),
    [((0, 5, 10), [0, 1, 2]), ((0, 86_400), [1]), ((0, 5, 86_400), [0, 1]), ((86_400, 0, 172_800, 5), [1, 3])],
)
def test_of_traces_that_began_far_apart_the_largest_group_is_read(
    tmp_path: Path, seconds: tuple[int, ...], read: list[int]
) -> None:
    for rank, after in enumerate(seconds):
        base = traces.BASE_NS + after * 10**9
        traces.write(tmp_path / f"rank{rank}.json", traces.training(rank=rank, base_ns=base))
    found = gather(tmp_path)
    others = sorted(set(range(len(seconds))) - set(read))
    assert sorted(found.files) == read
    assert [one.path.name for one in found.taken if one.left] == [f"rank{rank}.json" for rank in others]
    assert len(found.warnings) == bool(others)
    if others:
        assert found.warnings[0].endswith(f"left out are {listed(others)}")


def test_a_folder_without_anything_to_read_says_what_it_saw(tmp_path: Path) -> None:
    (tmp_path / "et.json").write_text(dialects.execution_trace())
    (tmp_path / "settings.json").write_text(json.dumps({"lr": 0.1}))
    with pytest.raises(DlprofError, match="looked into 2 files; execution trace"):
        gather(tmp_path)


def test_dumps_of_ranks_without_a_trace_are_read_beside_the_traces_of_others(tmp_path: Path) -> None:
    for rank in range(2):
        traces.write(tmp_path / f"rank{rank}.json.gz", traces.training(rank=rank))
    dumps.hung(tmp_path / "dumps")
    run = open_run(tmp_path)
    assert [sorted(rank.files) for rank in run.ranks] == 2 * [["flight_recorder", TRACE]] + 6 * [["flight_recorder"]]
    result = analyse(tmp_path, 1)
    assert result.window is not None
    assert "Ranks 3 and 5 never entered all_reduce #4" in result.found[0].title
    assert {part.rank for part in result.time} == {0, 1}


def test_a_log_of_gpus_is_of_the_host_in_its_path(tmp_path: Path) -> None:
    for rank in range(4):
        traces.write(tmp_path / f"rank{rank}.json.gz", traces.training(rank=rank, host=f"gpu-{1 + rank // 2}.cluster"))
    (tmp_path / "smi_gpu-1.csv").write_text(SMI)
    (tmp_path / "gpu-2").mkdir()
    (tmp_path / "gpu-2" / "smi.csv").write_text(SMI.replace("87", "33"))
    (tmp_path / "smi_gpu-12.csv").write_text(SMI)
    found = gather(tmp_path)
    assert {
        rank: files["nvidia_smi"].relative_to(tmp_path).as_posix()
        for rank, files in found.files.items()
        if "nvidia_smi" in files
    } == {
        0: "smi_gpu-1.csv",
        2: "gpu-2/smi.csv",
    }
    assert any(one.path.name == "smi_gpu-12.csv" and "rank 0 has another log" in one.left for one in found.taken)


# Folders as frameworks leave them: the files of two ranks, by rank and window, the number of windows, and whether the
# traces say their rank.
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
