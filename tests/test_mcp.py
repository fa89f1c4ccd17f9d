"""The MCP server as a client meets it: the real process, over its stdin and stdout."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from benchmarks.gpu.fixtures import unpack
from tests.fixtures.jobs import DLPROF, environment, launch, running, spawned, tiny, until
from tests.fixtures.places import ROOT

pytest.importorskip("mcp", reason="needs the package mcp")

from mcp import Client, StdioServerParameters, stdio_client

from dlprof.mcp import MOST, fitted

TOOLS = {"record", "report", "explain", "evidence", "try", "compare", "check_advice"}
GPU = next((ROOT / "reports" / "gpu" / "h100-2").glob("*.tar.gz"))

# A sample costs 4 ms of sleep: a worker hides them, whatever else the machine does.
SLEEPS = """
class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 400_000
    def __getitem__(self, i):
        time.sleep(0.004)
        return data[i % 64]

for batch in DataLoader(Slow(), batch_size=8, num_workers=0):
    train(batch)
"""

Call = Callable[..., Coroutine[Any, Any, tuple[str, bool]]]


@asynccontextmanager
async def client(folder: Path, *options: str) -> AsyncIterator[tuple[Client, Call]]:
    """Start a server for a folder; give its client, and a call that returns the answer and whether it failed."""
    words = (*DLPROF[1:], "mcp", *options, str(folder))
    server = StdioServerParameters(command=sys.executable, args=list(words), env=environment(), cwd=folder)
    async with Client(stdio_client(server)) as connected:

        async def call(tool: str, **arguments: Any) -> tuple[str, bool]:
            said = await connected.call_tool(tool, arguments)
            (content,) = said.content
            assert content.type == "text"
            assert len(content.text.encode()) <= MOST
            return content.text, said.is_error

        yield connected, call


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a recording, and links and a run that lead out of it."""
    above = tmp_path_factory.mktemp("place")
    unpack(GPU, above / "outside")
    (above / "outside" / "advice-conv_layout").rename(above / "inside-run")
    inside = above / "inside"
    inside.mkdir()
    (above / "inside-run").rename(inside / "run")
    (inside / "link").symlink_to(above / "outside")
    (inside / "elsewhere").mkdir()
    (inside / "elsewhere" / "run.json").write_text(json.dumps({"format": 2, "command": ["true"], "cwd": str(above)}))
    return inside


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("report", {"run": "../outside/rate-copy"}),
    ("report", {"run": "/etc"}),
    ("report", {"run": "link/rate-copy"}),
    ("evidence", {"run": "link/rate-copy", "rule": "input_wait"}),
    ("check_advice", {"run": "..", "advice": "bf16"}),
    ("compare", {"before": "run", "after": "link/rate-copy"}),
    ("try", {"run": "link/rate-copy"}),
    ("try", {"run": "elsewhere"}),
    ("record", {"command": ["true"], "folder": ".."}),
    ("record", {"command": ["true"], "folder": "link"}),
    ("record", {"command": ["true"], "out": "link/new"}),
]
FAILED: list[tuple[str, dict[str, Any], str]] = [
    ("report", {"run": "nowhere"}, "nowhere"),
    ("evidence", {"run": "run", "rule": "none"}, "memory_format"),
    ("explain", {"name": "none"}, "there are: rules"),
    ("explain", {"name": "--help"}, "nothing is called"),
    ("explain", {"rule": "input_wait"}, "rule"),
    ("try", {"run": "run", "minutes": 100_000}, "minutes"),
    ("record", {"command": []}, "command"),
    ("record", {"command": ["true"], "out": "run"}, "exists already"),
    ("record", {"command": ["--nsys", "x"]}, "nothing was recorded"),
    ("nothing", {}, "no tool 'nothing'; there are: report"),
]


@pytest.mark.long
def test_only_its_folders_and_one_line_for_what_fails(place: Path) -> None:
    async def main() -> None:
        async with client(place) as (_, call):
            for tool, arguments in REFUSED:
                text, failed = await call(tool, **arguments)
                assert (failed, "outside of the folders" in text, "\n" in text) == (True, True, False), (tool, text)
            for tool, arguments, words in FAILED:
                text, failed = await call(tool, **arguments)
                assert (failed, words in text, "\n" in text) == (True, True, False), (tool, text)

    anyio.run(main)
    assert not (place.parent / "outside" / "new").exists()


def test_what_it_reads_is_answered_in_four_kilobytes(place: Path) -> None:
    async def main() -> None:
        async with client(place, "--read-only") as (connected, call):
            listed = {tool.name: tool for tool in (await connected.list_tools()).tools}
            assert set(listed) == TOOLS - {"record", "try"}
            assert listed["report"].input_schema["required"] == ["run"]
            assert all(tool.description for tool in listed.values())
            told = json.loads((await call("report", run="run"))[0])
            assert told["findings"][0]["rule"] == "memory_format"
            text, _ = await call("evidence", run="run", rule="memory_format")
            assert text.startswith("memory_format: found: ")
            assert "change: `.to(memory_format=torch.channels_last)`" in text
            text, _ = await call("check_advice", run="run", advice="use channels_last")
            assert text.startswith("model.memory_format=channels_last (now contiguous_format): would help\n")
            assert (await call("explain", name="num_workers"))[0].startswith("loader.num_workers = 0, 1, 2")
            assert "… left out: " in (await call("explain", name="rules"))[0]
            assert "No difference" in (await call("compare", before="run", after="run"))[0]
            assert (await call("record", command=["true"]))[1]

    anyio.run(main)


@pytest.mark.long
def test_stdout_holds_the_protocol_alone_and_the_server_ends_with_its_client(place: Path) -> None:
    asked: list[dict[str, Any]] = [
        {
            "id": 1,
            "method": "initialize",
            "params": {
                "protocolVersion": "2025-06-18",
                "capabilities": {},
                "clientInfo": {"name": "test", "version": "0"},
            },
        },
        {"method": "notifications/initialized"},
        {"id": 2, "method": "tools/call", "params": {"name": "report", "arguments": {"run": "run"}}},
        {"id": 3, "method": "tools/call", "params": {"name": "evidence", "arguments": {"run": "run", "rule": "x"}}},
    ]
    with spawned(
        [*DLPROF, "mcp", str(place)], stdin=-1, stdout=-1, stderr=subprocess.DEVNULL, env=environment(), text=True
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        for one in asked:
            server.stdin.write(json.dumps({"jsonrpc": "2.0", **one}) + "\n")
            server.stdin.flush()
        answers = [json.loads(server.stdout.readline()) for _ in range(3)]
        server.stdin.close()
        assert server.stdout.read() == ""
        assert server.wait(timeout=30) == 0
    assert all(answer["jsonrpc"] == "2.0" for answer in answers)
    assert {answer["id"] for answer in answers} == {1, 2, 3}


@pytest.mark.parametrize(
    ("text", "left"),
    [("a\n" * 10, ""), ("é" * MOST, "1 lines"), ("line\n" * 2_000, f"{2_000 - (MOST - 60) // 5:,} lines")],
)
def test_answers_are_cut_from_the_end_and_say_how_much(text: str, left: str) -> None:
    cut = fitted(text)
    assert len(cut.encode()) <= MOST
    assert text.startswith(cut.partition("\n… left out")[0])
    assert f"left out: {left}" in cut if left else cut == text.strip()


@pytest.mark.long
def test_without_the_package_one_line_says_what_to_install(tmp_path: Path) -> None:
    code = "import sys; sys.modules['mcp'] = None; from dlprof.cli import main; sys.argv = ['dlprof', 'mcp']; main()"
    done = launch([sys.executable, "-c", code], tmp_path, env=environment(PYTHONPATH=str(ROOT)))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert "pip install 'dlprof[mcp]'" in done.stderr
    done = launch([*DLPROF, "mcp", "none"], tmp_path, env=environment(PYTHONPATH=str(ROOT)))
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)


@pytest.mark.long
def test_what_a_recording_redacts_is_redacted(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import sys\nsys.exit(f'cannot log in with {sys.argv[2]}')\n")

    async def main() -> None:
        async with client(tmp_path) as (_, call):
            text, failed = await call("record", command=["train.py", "--name", "sesame-47-open"])
            assert (failed, "cannot log in" in text, "sesame" in text) == (True, True, False), text

    anyio.run(main)


@pytest.mark.long
@pytest.mark.parametrize("gone", ["request", pytest.param("client", marks=pytest.mark.slow)])
def test_a_job_ends_with_the_request_or_the_client(tmp_path: Path, gone: str) -> None:
    pytest.importorskip("torch", reason="recording needs torch")
    script = tiny(tmp_path, "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SLEEPS)
    script.write_text("import signal\n" + script.read_text())

    async def main() -> None:
        async with client(tmp_path) as (_, call), anyio.create_task_group() as beside:
            beside.start_soon(partial(call, "record", command=[str(script)], steps=1_000_000))
            with anyio.fail_after(90):
                while not list(tmp_path.glob("runs/*/ranks/*/records.jsonl")):
                    await anyio.sleep(0.2)
            assert running(script)
            beside.cancel_scope.cancel()
            if gone == "request":
                with anyio.CancelScope(shield=True):
                    assert await anyio.to_thread.run_sync(lambda: until(lambda: not running(script)))

    anyio.run(main)
    assert until(lambda: not running(script))


@pytest.mark.long
@pytest.mark.parametrize("proved", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_from_a_slow_script_to_a_proven_change(proved: bool, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="recording needs torch")
    tiny(tmp_path, SLEEPS)
    ticks: list[float] = []

    async def ticked(progress: float, total: float | None, message: str | None) -> None:
        ticks.append(progress)

    async def main() -> None:
        async with client(tmp_path) as (connected, call):
            asked = {"command": ["train.py"], "steps": 60, "minutes": 2, "keep_arguments": True}
            said = await connected.call_tool("record", asked, progress_callback=ticked)
            first, _, told = said.content[0].text.partition("\n")  # type: ignore[union-attr]
            run = first.removeprefix("recorded into ").partition(";")[0]
            assert json.loads(told)["findings"][0]["rule"] == "input_wait"
            (finding, *_) = json.loads((await call("report", run=run))[0])["findings"]
            text, _ = await call("evidence", run=run, rule=finding["rule"])
            assert "DataLoader(Slow(), batch_size=8, num_workers=0)" in text
            text, _ = await call("check_advice", run=run, advice="use 2 workers")
            assert text.startswith("loader.num_workers=2 (now 0): would help\n  predicted")
            if not proved:
                return
            settings = "loader.num_workers=2 loader.persistent_workers=True"
            text, failed = await call("try", run=run, settings=settings, minutes=2)
            assert (failed, text.startswith("Tried: loader.num_workers="), "× measured" in text) == (False, True, True)
            assert "+for batch in DataLoader(Slow(), batch_size=8, num_workers=" in text
            text, _ = await call("check_advice", run=run, advice="use 2 workers")
            assert text.startswith("loader.num_workers=2 (now 0): would help\n  measured: ")

    anyio.run(main)
    assert ticks == sorted(ticks)
    assert ticks
