"""The blocks of code in the docs are run as they stand; what is not run is listed here, with the reason.

Commands run in a folder that has what the pages name. Where a page shows what is printed, each shown line must be
printed, in that order, with figures of its own.
"""

from __future__ import annotations

import gzip
import json
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import click
import pytest
import yaml
from click.testing import CliRunner

from dlprof import commands
from dlprof.cli import cli
from tests.fixtures import dumps, exports, logged, traces
from tests.fixtures.jobs import COMPILES_NOTHING, DLPROF, environment, launch, tiny
from tests.fixtures.places import GOLDEN, ROOT

PROGRAMS = r"(dlprof|python|make|pip|uvx?|srun|mpirun|torchrun|nsys|nvidia-smi|export) "

# Commands that are not run, as patterns, and why. Their options of dlprof are looked at all the same.
NOT_RUN = {
    r"^(make|pip|uvx?) ": "sets up an environment, or runs all tests",
    r"^(srun|mpirun|nsys|nvidia-smi|export) |--submit": "needs SLURM (tests/robustness), or NVIDIA's tools",
    r"--dask (tcp|slurm)|--job NAME|--container|/home/me": "names what is not here",
    r"--gpus ": "needs GPUs",
    r"--ladder|--ceiling|run \w\S*.*--procs|scale ddp|loader_variants": "minutes: tests/workloads, tests/trial",
    r"^dlprof (fix|try) (?!.*(--list|classifier))|--try": "minutes: tests/trial",
    r"^dlprof sweep (?!loader.num_workers=0,1,2)": "minutes: tests/trial",
    r"^dlprof (attach|hang|window) |--window 2$": "of a job that still runs: tests/commands, tests/live",
    r"--metrics": "opens a port: tests/live/test_metrics.py",
    r"benchmarks\.figures": "reads every report that there is",
}
# Those that start jobs take tens of seconds, and run in a shell.
STARTS = r"^dlprof (wrap|run \w|fix|sweep)|^torchrun"
# Those of some seconds whose like runs elsewhere in any check.
LAST = r"^dlprof (compare (?!runs/before)|report .*--dask)"
# Blocks that are neither commands nor Python: how one begins, and the words in the code that it is printed by.
PRINTED = {
    "3 of 1,024 ranks were read by no shard": "read by no shard",
    "  Peak host memory (rank 1)": "Peak {host}memory{whose}",
    "  Where in the model (traced steps)": "Where in the model",
    "     in blocks.*.self_attn": "     in ",
    "Tried: loader.num_workers=2": "its losses are the same, bit for bit",
    "  1  input_wait    −11.6 ms": "The training loop waits",
    "dlprof: out already holds a run": "already holds a run",
    "dlprof: sbatch did not take the job": "sbatch did not take the job",
    "! SLURM job 12 (restart 1)": "before this start of it",
    "srun: Job step aborted": "was ended by signal",
    "#!/bin/bash": "# Written by dlprof slurm.",
    "runs/a  python train.py": "its own time (before the backward pass) is the longest",
    "     PID  ranks  workers": "waits for data",
    "61 % (56 %–65 %) of the time": "waits for its loader",
    "%load_ext dlprof": "load_ipython_extension",  # tests/test_magic.py runs both
    "%%dlprof -o runs/x": "%%dlprof",
}
# Python that is not run: what a block has, and why.
PYTHON = {
    "torch.cuda": "needs a GPU",
    "run.queue()": "of a job on GPUs: docs/notebook.ipynb, which a test executes, and tests/test_api.py",
    "wandb.init": "needs W&B: tests/frameworks/test_callbacks.py",
    "TrainerCallback": "needs transformers: tests/frameworks/test_callbacks.py",
    "LightningCallback": "needs lightning: tests/frameworks/test_callbacks.py",
}
PRELUDE = """
import dlprof
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.randn(256, 8), batch_size=4)
def train(batch=torch.ones(4, 8)):
    model(batch).sum().backward()
    optimizer.step()
"""
# What differs from run to run besides figures.
DIFFERS = (
    (r"[█░▓▒=·]+", "▓"),
    (r"\d[\d,.]*", "N"),
    (r"\(\S+\.py:N\)", "(FILE:N)"),
    (r"runs/[\w-]+", "runs/RUN"),
    (r"run N s: [^%]*%", "run N s"),
    (r"(Healthy: N checks)[^.]*(\. Not measured: N)[^.]*", r"\1\2"),
)


@dataclass(frozen=True)
class Block:
    """A block of code: its page, its first line, its language and its lines."""

    page: str
    line: int
    language: str
    lines: tuple[str, ...]

    @property
    def id(self) -> str:
        """Where it stands: README.md:10."""
        return f"{self.page}:{self.line}"


def blocks() -> Iterator[Block]:
    """Yield the blocks of all pages."""
    for path in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))):
        text = path.read_text()
        for found in re.finditer(r"^```(\w*)\n(.*?)\n```$", text, re.MULTILINE | re.DOTALL):
            line = text[: found.start()].count("\n") + 2
            yield Block(path.relative_to(ROOT).as_posix(), line, found[1], tuple(found[2].split("\n")))


def commands_of(block: Block) -> Iterator[Block]:
    """Yield the commands of a block, without comments: each in a line, or behind a prompt with what it prints."""
    if block.lines[0].startswith("#!"):
        return
    asked = [n for n, line in enumerate(block.lines) if line.startswith("$ ")]
    starts = asked or [n for n, line in enumerate(block.lines) if re.match(PROGRAMS, line)]
    for start, end in pairwise([*starts, len(block.lines)]):
        words = re.sub(r"\s{2,}#.*", "", block.lines[start].removeprefix("$ "))
        shown = [line for line in block.lines[start + 1 : end] if line.strip()] if asked else ()
        yield Block(block.page, block.line + start, "", (words, *shown))


BLOCKS = [*blocks()]
PLAIN = [block for block in BLOCKS if block.language in ("", "bash")]
COMMANDS = [command for block in PLAIN for command in commands_of(block)]
ONCE = [*{command.lines: command for command in reversed(COMMANDS)}.values()][::-1]


def listed(patterns: Mapping[str, str], text: str) -> list[str]:
    """Return the patterns that a text has."""
    return [pattern for pattern in patterns if re.search(pattern, text)]


def plain(text: str) -> str:
    """Return a text without what differs from run to run, and without its layout."""
    text = " ".join(text.split())
    for pattern, by in DIFFERS:
        text = re.sub(pattern, by, text)
    return text


def missing(shown: tuple[str, ...], printed: str) -> list[str]:
    """Return the shown lines that are not printed in their order."""
    rest = plain(printed)
    lost: list[str] = []
    for line in map(plain, shown):
        _, found, after = rest.partition(line)
        rest = after if found else rest
        lost += [] if found else [line]
    return lost


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with all that the pages name: scripts, runs of one of them, traces and files of other tools."""
    folder = tmp_path_factory.mktemp("docs")
    # Long enough that py-spy sees it.
    body = "for epoch in range(8):\n    for batch in DataLoader(data, batch_size=4):\n        train(batch)\n"
    body += "        time.sleep(0.03)\n"
    (folder / "package").mkdir()
    shutil.copy(script := tiny(folder, body), folder / "package")
    shutil.copy(ROOT / "examples/classifier.py", folder)
    (folder / "workloads").symlink_to(ROOT / "workloads")
    (folder / "bin").mkdir()
    (folder / "bin/dlprof").write_text(f'#!/bin/sh\nexec {shlex.join(DLPROF)} "$@"\n')
    (folder / "bin/dlprof").chmod(0o755)
    assert launch([*DLPROF, "wrap", "-o", "runs/a", "--window", "5,1,3", script], folder).returncode == 0
    named = {name for command in COMMANDS for name in re.findall(r"(?<!-o )\bruns/([\w-]+)", command.lines[0])}
    for name in named - {"a", "classifier", "8", "16", "32"}:
        shutil.copytree(folder / "runs/a", folder / "runs" / name)
    shutil.copytree(folder / "runs/a", folder / "main")
    for name, ranks in (("runs/8", 1), ("runs/16", 2), ("runs/32", 4), ("traces", 2), ("logdir", 2), ("job", 2)):
        exports.traced(folder / name, ranks)
    for name in (
        "profiles/iteration_0/rank0.json",
        "profiles/iteration_1/rank0.json",
        "timeline.json",
        "trace.json.gz",
    ):
        traces.write(folder / name, traces.training())
    exports.exported(folder / "profile.sqlite")
    exports.traced(folder / "fixed")
    dumps.write(folder / "rank0.pickle", dumps.training().snapshot())
    shutil.copytree(GOLDEN / "flight_recorder", folder / "fr_dumps")
    (folder / "gpus.csv").write_text(logged.smi(datetime(2026, 1, 1), 20, 1980))
    (folder / "stacks.json").write_bytes(gzip.decompress((GOLDEN / "profiles/pyspy.speedscope.json.gz").read_bytes()))
    return folder


def bash(words: str, place: Path) -> tuple[int, str]:
    """Run words in a shell that finds dlprof; return the exit code, and what was printed."""
    path = f"{place}/bin:{Path(sys.executable).parent}:/usr/bin:/bin"
    env = environment(PATH=path, PYTHONPATH=f"{ROOT}:{place}")
    done = launch(["bash", "-ec", words], place, env=env, timeout=280)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.long
@pytest.mark.parametrize(
    "command",
    [
        pytest.param(one, id=one.id, marks=pytest.mark.slow if re.search(f"{STARTS}|{LAST}", one.lines[0]) else ())
        for one in ONCE
        if not listed(NOT_RUN, one.lines[0])
    ],
)
def test_a_command_runs_and_prints_what_is_shown(command: Block, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words, *shown = command.lines
    words = words.replace("/tmp/", f"{place}/")
    if words.endswith("runs/classifier") and not (place / "runs/classifier").exists():
        bash("dlprof wrap -o runs/classifier classifier.py", place)  # as the page does before
    for name in re.findall(r"--out (\S+)", words):
        shutil.rmtree(name, ignore_errors=True)
    if words.startswith("dlprof") and not re.search(STARTS, words):
        monkeypatch.chdir(place)
        monkeypatch.setenv("BROWSER", "true")
        done = CliRunner().invoke(cli, shlex.split(words)[1:], input="")
        code, printed = done.exit_code, done.output
    else:
        code, printed = bash(words, place)
    assert code in ((0, 3) if words.startswith("dlprof check ") else (0,)), printed
    assert missing(tuple(shown), printed) == [], printed


def read(words: list[str]) -> None:
    """Read the options of a command of dlprof, as it does; raise what it would print."""
    name, *args = words
    command = commands.command(name)
    with suppress(click.exceptions.Exit):  # an option that prints something
        command.make_context(name, [*args])
    known = {option for parameter in command.params for option in parameter.opts}
    mine = args[: args.index("--")] if "--" in args else args
    if name == "run" and (strange := {word for word in mine if word.startswith("-")} - known):
        raise click.UsageError(f"a workload's own options come after --: {strange}")  # as all pages have them


@pytest.mark.parametrize("command", ONCE, ids=lambda command: command.id)
def test_the_options_of_a_command_are_there(command: Block) -> None:
    words = shlex.split(command.lines[0])
    if "dlprof" in words[:-1]:
        read(words[words.index("dlprof") + 1 :])


@pytest.mark.parametrize("words", ["report --nope x", "run ddp_resnet --proc 2", "report"])
def test_a_command_with_an_option_that_is_not_there_is_found(words: str) -> None:
    with pytest.raises(click.UsageError):
        read(words.split())


@pytest.mark.long
@pytest.mark.parametrize(
    "block",
    [one for one in BLOCKS if one.language == "python" and not listed(PYTHON, "\n".join(one.lines))],
    ids=lambda block: block.id,
)
def test_python_runs(block: Block, place: Path) -> None:
    code, printed = bash(
        shlex.join([sys.executable, "-c", "\n".join((COMPILES_NOTHING, PRELUDE, *block.lines))]), place
    )
    assert code == 0, printed


def test_what_is_not_run_is_listed_and_what_is_listed_is_there() -> None:
    source = "\n".join(path.read_text() for path in ROOT.glob("dlprof/**/*.py"))
    begins = {block.id: "\n".join(block.lines) for block in PLAIN if not any(commands_of(block))}
    known = {start for start in PRINTED for text in begins.values() if text.startswith(start)}
    assert [place for place, text in begins.items() if not text.startswith(tuple(PRINTED))] == []
    assert {start for start, words in PRINTED.items() if words not in source} | PRINTED.keys() - known == set()
    words = "\n".join(command.lines[0] for command in COMMANDS)
    assert [pattern for pattern in NOT_RUN if not re.search(pattern, words, re.MULTILINE)] == []
    python = "\n".join(line for block in BLOCKS if block.language == "python" for line in block.lines)
    assert [pattern for pattern in PYTHON if pattern not in python] == []
    assert {block.language for block in BLOCKS} == {"", "bash", "json", "python", "toml", "yaml"}


@pytest.mark.long
@pytest.mark.parametrize(
    "block",
    [
        pytest.param(one, id=one.id, marks=pytest.mark.slow if one.lines[0] == "speed:" else ())
        for one in BLOCKS
        if one.language in ("json", "toml", "yaml")
    ],
)
def test_files_are_read_and_what_they_call_is_there(block: Block, place: Path) -> None:
    text = "\n".join(block.lines)
    if block.language == "json":
        (servers,) = json.loads(text).values()
        assert (servers["dlprof"]["command"], servers["dlprof"]["args"][0]) == ("dlprof", "mcp")
    elif block.language == "toml":
        (place / "set").mkdir(exist_ok=True)
        (place / "set/pyproject.toml").write_text(text)
        code, printed = bash(
            "cd set && dlprof check ../runs/a || test $? = 3; dlprof wrap -o run --no-report true", place
        )
        assert (code, "left out" in printed) == (0, False), printed
    elif "jobs" in (said := yaml.safe_load(text)):
        (given,) = (step["with"] for step in said["jobs"]["speed"]["steps"] if "OWNER" in step.get("uses", ""))
        assert given.keys() <= yaml.safe_load((ROOT / "action.yml").read_text())["inputs"].keys()
    else:
        install, *script = said["speed"]["script"]
        assert install.startswith("pip install ")
        code, printed = bash("CI_DEFAULT_BRANCH=main\nCI_COMMIT_BRANCH=main\n" + "\n".join(script), place)
        assert code == 0 or (code == 3 and "input_wait" in printed), printed
        assert "dlprof" in (place / "speed.xml").read_text()


@pytest.mark.parametrize(
    ("shown", "printed", "lost"),
    [
        (("a step of 1.2 ms", "  2 rules"), "x\n a step\nof 3 ms\n\n11 rules y", []),
        (("a step of 1.2 ms", "2 rules"), "11 rules, a step of 3 ms", ["N rules"]),
        (("run  3 s: training 65, start 3 %",), "run 9 s: start 40, training 2 %", []),
        (("its losses are equal",), "its losses differ", ["its losses are equal"]),
    ],
)
def test_shown_lines_are_compared(shown: tuple[str, ...], printed: str, lost: list[str]) -> None:
    assert missing(shown, printed) == lost
