"""What is installed: the wheel holds all that the package reads and works without torch; a shell completes words."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.fixtures import traces
from tests.fixtures.jobs import DLPROF, environment, launch
from tests.fixtures.places import ROOT


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from a copy of the sources, without network."""
    setuptools = pytest.importorskip("setuptools")
    if int(setuptools.__version__.partition(".")[0]) < 77:
        pytest.skip("setuptools is older than 77, which pyproject.toml asks for")
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "dlprof", folder / "dlprof", ignore=shutil.ignore_patterns("__pycache__"))
    words = ["wheel", "--no-build-isolation", "--no-deps", "--no-index", "--quiet", "--wheel-dir", "dist", "."]
    done = launch([sys.executable, "-m", "pip", *words], folder)
    assert done.returncode == 0, done.stderr
    (built,) = (folder / "dist").glob("dlprof-*.whl")
    return built


@pytest.mark.long
def test_the_wheel_holds_every_file_of_the_package(wheel: Path) -> None:
    there = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "dlprof").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("dlprof/")}
    assert packed == there


@pytest.mark.long
def test_the_wheel_alone_reports_on_a_trace_without_torch(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    traces.write(tmp_path / "traces/rank0.json", traces.training())
    # None in sys.modules is how Python says that a module cannot be imported.
    code = (
        "import sys; sys.modules['torch'] = None; sys.path.insert(0, 'installed'); import dlprof.cli;"
        "assert 'installed' in dlprof.cli.__file__; dlprof.cli.main()"
    )
    done = launch([sys.executable, "-I", "-c", code, "report", "traces", "-o", "out", "--jobs", "1"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "steps of" in done.stdout
    assert launch([*DLPROF, "report", "traces", "-o", "ours", "--jobs", "1"], tmp_path).returncode == 0
    assert (tmp_path / "out/report.html").read_text() == (tmp_path / "ours/report.html").read_text()


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@pytest.mark.parametrize(
    ("line", "completed"),
    [("dlprof wr", {"wrap"}), ("dlprof report --sh", {"--shard"}), ("dlprof check --max", {"--max", "--max-slowdown"})],
)
def test_bash_completes_commands_and_options(line: str, completed: set[str], tmp_path: Path) -> None:
    (command := tmp_path / "dlprof").write_text(f'#!/bin/sh\nexec {sys.executable} -m dlprof "$@"\n')
    command.chmod(0o755)
    words = line.split()
    script = (
        'eval "$(_DLPROF_COMPLETE=bash_source dlprof)"; complete -p dlprof >/dev/null || exit 9;'
        f"COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; COMP_LINE='{line}';"
        f"_dlprof_completion dlprof {words[-1]} {words[-2]}; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    )
    env = environment(PATH=f"{tmp_path}:/usr/bin:/bin", PYTHONPATH=str(ROOT))
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=env, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert set(done.stdout.split()) == completed
