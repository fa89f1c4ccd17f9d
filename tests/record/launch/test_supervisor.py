"""The hook comes first on PYTHONPATH, and costs nobody the sitecustomize that was there."""

from __future__ import annotations

import sys
from pathlib import Path

from dlprof.record.launch.supervisor import recorded
from tests.fixtures.jobs import environment, launch, wrapped


def test_the_shadowed_sitecustomize_still_runs_and_its_errors_show(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "sitecustomize.py").write_text("import sys\nsys.theirs = __file__\n")
    code = "import sys, sitecustomize; print(sys.theirs, sitecustomize.__file__)"
    env = environment(PYTHONPATH=str(theirs))
    plain = launch([sys.executable, "-c", code], tmp_path, env=env)
    ours = launch(wrapped(tmp_path / "a", [sys.executable, "-c", code]), tmp_path, env=env)
    assert plain.stdout == ours.stdout
    (theirs / "sitecustomize.py").write_text("raise RuntimeError('theirs')\n")
    broken = launch(wrapped(tmp_path / "b", [sys.executable, "-c", "pass"]), tmp_path, env=env)
    assert "theirs" in broken.stderr
    assert broken.returncode == 0


def test_the_hook_is_silent_without_a_run(tmp_path: Path) -> None:
    env = recorded(environment(), tmp_path / "run")
    del env["DLPROF_RUN"]
    done = launch(
        [sys.executable, "-c", "import sys; print([type(f).__name__ for f in sys.meta_path])"], tmp_path, env=env
    )
    assert "_TorchFinder" not in done.stdout
    assert not (tmp_path / "run").exists()
