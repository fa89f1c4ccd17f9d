"""`dlprof report` and `dlprof export`: what they print, and the files that they write where they say."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dlprof.cli import cli
from dlprof.commands.report import linked
from dlprof.result.stored import from_json
from tests.fixtures import traces
from tests.fixtures.jobs import COMPILES_NOTHING, record


def run(*words: str | Path) -> Result:
    alone = [] if "--dask" in words else ["--jobs", "1"]
    return CliRunner().invoke(cli, ["report", *alone, *map(str, words)])


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder of two ranks' traces, and stand beside it."""
    monkeypatch.chdir(tmp_path)
    for r in range(2):
        traces.write(tmp_path / "traces" / f"rank{r}.json", traces.training(rank=r))
    return tmp_path / "traces"


def recorded(folder: Path) -> Path:
    traces.write(folder / "ranks" / "00000" / "trace.json.gz", traces.training(world_size=1))
    (folder / "run.json").write_text('{"format": 1}')
    return folder


def test_json_is_the_result_and_nothing_else(job: Path) -> None:
    done = run(job, "--format", "json", "-o", "out")
    assert done.exit_code == 0
    assert from_json(json.loads(done.stdout)).run.ranks == (0, 1)
    assert (job.parent / "out" / "result.json").read_text() == done.stdout.rstrip("\n")


def test_text_ends_with_where_the_report_is(job: Path) -> None:
    done = run(job, "-o", "deep/out")
    assert done.exit_code == 0
    assert done.stdout.splitlines()[-1] == "report: deep/out/report.html"
    assert sorted(p.name for p in (job.parent / "deep" / "out").iterdir()) == ["report.html", "result.json"]


@pytest.mark.parametrize(("words", "named"), [((), True), (("--redact",), False)])
def test_the_page_names_the_run_in_its_commands_but_not_the_folders_of_a_redacted_one(
    job: Path, words: tuple[str, ...], named: bool
) -> None:
    folder = recorded(job.parent / "secret" / "my run")
    (folder / "run.json").write_text('{"format": 1, "command": ["python", "train.py"]}')
    assert run(folder, "-o", "out", *words).exit_code == 0
    page = (job.parent / "out" / "report.html").read_text()
    assert "my run" in page
    assert ("secret/my run" in page) == named


@pytest.mark.long
def test_a_report_of_foreign_traces_takes_a_new_folder_each_time(job: Path) -> None:
    for n in ("", "-2", "-3"):
        assert run(job).stdout.splitlines()[-1] == f"report: dlprof-report{n}/report.html"
    assert sorted(p.name for p in job.iterdir()) == ["rank0.json", "rank1.json"]


def test_progress_is_on_stderr_and_quiet_is_quiet(job: Path) -> None:
    done = run(job)
    assert ("read 2 of 2 ranks" in done.stderr, "read 2" in done.stdout) == (True, False)
    assert run(job, "--quiet").stderr == ""


def test_what_was_found_is_said_though_it_cannot_be_written(tmp_path: Path) -> None:
    folder = recorded(tmp_path / "run")
    (tmp_path / "file").touch()
    done = run(folder, "-o", tmp_path / "file")
    assert done.exit_code == 1
    assert "steady steps" in done.stdout
    assert "report:" not in done.stdout


def test_open_gives_the_page_to_the_browser(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []

    def browse(page: str) -> bool:
        opened.append(page)
        return True

    monkeypatch.setattr("webbrowser.open", browse)
    assert run(job, "-o", "out", "--open").exit_code == 0
    assert opened == [(job.parent / "out" / "report.html").resolve().as_uri()]


SCRIPT = f"""\
import time
import torch
from torch.utils.data import DataLoader

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 160
    def __getitem__(self, n):
        time.sleep(0.004)
        return torch.ones(8)

def main(model, optimizer):
    held = DataLoader(Slow(), batch_size=80)
    train = DataLoader(
        Slow(),
        batch_size=4,
    )
    for _ in range(2):
        for batch in train:
            model(batch).sum().backward()
            optimizer.step()
    with torch.no_grad():
        for batch in held:
            model(batch)

{COMPILES_NOTHING}
model = torch.nn.Linear(8, 1)
main(model, torch.optim.SGD(model.parameters(), lr=0.01))
"""


@pytest.mark.long
def test_a_patch_of_a_real_run_is_what_git_applies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="recording needs torch")
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    record(script, folder=tmp_path / "run", options=["--no-trace"])
    monkeypatch.chdir(tmp_path)
    done = run("run", "--patch", "fix.diff")
    assert done.exit_code == 0, done.output
    result = from_json(json.loads((tmp_path / "run/result.json").read_text()))
    (wait,) = (o for o in result.outcomes if o.id == "input_wait")
    # Where other programs need the cores, the line that sleeps stands before the loader.
    loader, loop = [place for place in wait.where if place.function == "main"][:2]
    assert [(p.file, p.line, p.function) for p in (loader, loop)] == [
        ("train.py", 14, "main"),
        ("train.py", 19, "main"),
    ]
    first = next(change for change in wait.changes if change.settings)
    assert first.at == loader
    subprocess.run(["git", "init", "-q", "."], check=True, capture_output=True)
    subprocess.run(["git", "apply", "fix.diff"], check=True, capture_output=True)
    to = {setting.name: setting.to for setting in first.settings}
    added = "".join(f"        {name}={value},\n" for name, value in to.items())
    assert "num_workers" in to
    assert script.read_text() == SCRIPT.replace("        batch_size=4,\n", f"        batch_size=4,\n{added}")
    # The file is now another one: what was recorded of it holds no more.
    again = run("run", "--patch", "second.diff")
    assert again.exit_code == 1
    assert "has changed since it was recorded" in again.output
    assert not (tmp_path / "second.diff").exists()


@pytest.mark.long
def test_a_report_by_dask_keeps_what_it_reads(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On stdout and stderr there is nothing of Dask's own."""
    pytest.importorskip("distributed", reason="needs the extra dask")
    monkeypatch.setenv("XDG_CACHE_HOME", str(job.parent / "cache"))
    plain = run(job, "--format", "json", "-o", "a")
    command = [sys.executable, "-P", "-m", "dlprof", "report", str(job), "--format", "json", "-o", "b"]
    command += ["--dask", "local:2"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=job.parent)
    assert done.stdout == plain.stdout
    assert [line.partition(" · ")[0] for line in done.stderr.splitlines()] == ["read 1 of 2 ranks", "read 2 of 2 ranks"]
    assert len(list((job.parent / "cache").rglob("*.npz"))) == 2


def export(*words: str | Path) -> Result:
    return CliRunner().invoke(cli, ["export", "--jobs", "1", *map(str, words)])


def test_a_trace_and_tables(job: Path) -> None:
    done = export(job, "--perfetto", "out.json.gz", "--csv", "tables", "--quiet")
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.startswith("out.json.gz: ")
    assert "tables: 4 tables, " in done.stdout
    assert json.loads(gzip.decompress(Path("out.json.gz").read_bytes()))["traceEvents"]
    assert Path("tables/tables/00001/spans.csv").is_file()
    assert sorted(p.name for p in job.parent.iterdir()) == ["out.json.gz", "tables", "traces"]


def test_what_fails_is_one_line_and_costs_nothing_else(job: Path) -> None:
    done = export(job, "--perfetto", "out.json", "--speedscope", "stacks.json")
    assert done.exit_code == 1
    assert done.stderr.splitlines()[-1].startswith("dlprof: ")
    assert "no Python stacks were seen" in done.stderr
    assert json.loads(Path("out.json").read_text())["traceEvents"]
    assert not Path("stacks.json").exists()


def test_it_must_be_told_what_to_write(job: Path) -> None:
    done = export(job)
    assert done.exit_code == 2
    assert "--perfetto FILE" in done.stderr


def test_lines_of_files_that_are_here_are_links_in_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("print(1)\n")
    monkeypatch.chdir(tmp_path)
    text = linked("train.py:17 in main; gone.py:3")
    uri = (tmp_path / "train.py").as_uri()
    assert text == f"\x1b]8;;{uri}#17\x1b\\train.py:17\x1b]8;;\x1b\\ in main; gone.py:3"
