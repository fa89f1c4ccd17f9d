"""The bars of memory by part, the table of predicted peaks, and the line on the terminal."""

from __future__ import annotations

from msgspec.structs import replace

from dlprof.plain import NBSP
from dlprof.report import html, terminal
from dlprof.report.figures.memory import described, sentence, shown
from dlprof.result.figures import DeviceMemory, Footprint, MemoryChange, MemoryPart, ModuleMemory
from tests.fixtures import results

GB = 1e9


def footprint(ranks: int = 2) -> Footprint:
    """Return ranks of 20 GB and more, each rank a little more than the one before it."""
    devices = [
        DeviceMemory(
            rank,
            "cuda:0",
            (
                MemoryPart("parameter", 4 * GB, "counted"),
                MemoryPart("activation", (14 + rank / 100) * GB, "counted"),
                MemoryPart("cache", 2 * GB, "allocator"),
            ),
            "backward",
            80 * GB,
        )
        for rank in range(ranks)
    ]
    changes = (
        MemoryChange("batch", "2", 34 * GB, 2.1, 90e6, least_bytes=30 * GB, most_bytes=41 * GB),
        MemoryChange("batch", "8", 118 * GB, 0.5, 80e6),
        MemoryChange("checkpoint", "layers.*", 9 * GB, 9.3, 130e6, "most", "as if all were computed again"),
        MemoryChange("8_bit", "", 18 * GB, 4.4, None, why="how fast its kernels are is not known"),
    )
    modules = (ModuleMemory("layers.*", "Layer", 12, 15 * GB, 3 * GB, activation=12 * GB),)
    return Footprint(tuple(reversed(devices)), ranks - 1, modules, changes, 100e6)


def test_a_bar_a_rank_with_what_is_known_of_each_part() -> None:
    memory = shown(footprint())
    assert memory is not None
    assert memory.bars.spec is not None
    traces = {trace["name"]: trace for trace in memory.bars.spec["data"]}
    assert traces["Activations"]["x"] == [14, 14.01]
    assert "tensor by tensor" in traces["Activations"]["hovertext"][0]
    assert memory.bars.legend == ("held-parameter", "held-activation", "held-cache")
    assert memory.bars.spec["layout"]["shapes"][0]["x0"] == 80


def test_many_ranks_have_thin_bars_and_the_fullest_are_drawn() -> None:
    memory = shown(footprint(200))
    assert memory is not None
    assert memory.bars.spec is not None
    assert len(memory.bars.spec["data"][0]["x"]) == 64
    assert "136 more ranks" in memory.bars.note


def test_each_change_has_its_peak_its_step_and_how_that_is_known() -> None:
    memory = shown(footprint())
    assert memory is not None
    assert memory.changes is not None
    rows = {row[0]: row[1:] for row in memory.changes.rows}
    assert rows["2 × batch"][:2] == (f"34{NBSP}GB", f"30{NBSP}GB to 41{NBSP}GB")
    assert rows["2 × batch"][3] == ""
    assert (rows["8 × batch"][1], rows["8 × batch"][3]) == ("", "does not fit")
    assert rows["checkpointing of layers.*"][4] == f"at most 130.0{NBSP}ms"
    assert rows["optimizer state in 8 bits"][4:] == ("—", "how fast its kernels are is not known")


def test_the_page_and_the_terminal_tell_it() -> None:
    result = replace(results.ddp(), footprint=footprint())
    page = html.render(result)
    assert "Predicted peak with a change" in page
    assert f"layers.* ×{NBSP}12" in page
    text = " ".join(terminal.render(result, 100).split())
    assert "Peak memory (rank 1, cuda:0): 20.0 GB of 80 GB (activations 70 %, parameters 20 %" in text


def test_a_job_on_the_cpu_fills_the_hosts_memory() -> None:
    devices = (DeviceMemory(0, "cpu", (MemoryPart("process", 3 * GB, "process"), MemoryPart("input", GB, "counted"))),)
    said = sentence(Footprint(devices, 0)).replace(NBSP, " ")
    assert said == "Peak host memory: 4 GB (process baseline 75 %, input 25 %)."


def test_a_run_whose_memory_was_not_counted_has_none_of_it() -> None:
    assert shown(None) is None
    assert sentence(None) == ""
    assert 'id="memory"' not in html.render(results.ddp())


def test_a_change_that_is_not_known_here_keeps_its_name() -> None:
    assert described(MemoryChange("shard", "3/8", 1.0)) == "FSDP (ZeRO 3) over 8 ranks"
    assert described(MemoryChange("later", "x", 1.0)) == "later x"
    assert described(MemoryChange("batch", "odd", 1.0)) == "odd × batch"
