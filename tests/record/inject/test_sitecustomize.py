"""The hook comes first on PYTHONPATH, and costs nobody the sitecustomize that was there."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from dlprof.record.launch.supervisor import recorded
from tests.fixtures.jobs import environment, launch, noted, wrapped

FINDERS = "import sys; print([type(f).__name__ for f in sys.meta_path if type(f).__name__ == '_TorchFinder'])"


def hello(run: Path) -> list[dict[str, object]]:
    return noted(run / "hosts" / os.uname().nodename, "hello")


def watched(run: Path, code: str, **changes: str) -> str:
    """Return what Python code prints in an interpreter that the hook gets into."""
    done = launch([sys.executable, "-c", code], run.parent, env=recorded(environment(**changes), run))
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


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


# How agents of tracing services see to it that the sitecustomize behind theirs runs too, after they have run.
COUNTS = """
import os, sys
with open(os.environ["DL_COUNT"], "a") as file:
    file.write(f"{os.getpid()}\\n")
here = os.path.dirname(__file__)
"""
NEXT = {
    "found on the path": """
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
spec = PathFinder.find_spec("sitecustomize", [p for p in sys.path if p != here])
if spec is not None:
    module = sys.modules["sitecustomize"] = module_from_spec(spec)
    spec.loader.exec_module(module)
""",
    "imported anew": """
at = sys.path.index(here)
del sys.path[at]
ours = sys.modules.pop("sitecustomize")
try:
    import sitecustomize
except ImportError:
    sys.modules["sitecustomize"] = ours
sys.path.insert(at, here)
""",
}


@pytest.mark.parametrize("runs_next", NEXT.values(), ids=NEXT)
def test_the_users_sitecustomize_runs_once_in_each_process_of_his_and_in_none_of_ours(
    runs_next: str, tmp_path: Path
) -> None:
    for name in ("first", "behind"):
        (tmp_path / name).mkdir()
    (tmp_path / "first/sitecustomize.py").write_text(COUNTS + runs_next)
    (tmp_path / "behind/sitecustomize.py").write_text("import sys; sys.behind = getattr(sys, 'behind', 0) + 1\n")
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").touch()
    code = "import os, sys, torch; print(os.getpid(), getattr(sys, 'behind', 0), sys.path)"
    path = os.pathsep.join((str(tmp_path / "first"), str(tmp_path / "behind")))
    env = environment(PYTHONPATH=path, DL_COUNT=str(tmp_path / "count"))
    plain = launch([sys.executable, "-c", code], tmp_path, env=env)
    (tmp_path / "count").unlink()
    # Beside it are the supervisor, a Python of the user's own, and the samplers.
    done = launch(
        wrapped(tmp_path / "run", ["sh", "-c", 'sleep 1; "$@"', "sh", sys.executable, "-c", code]), tmp_path, env=env
    )
    assert done.returncode == 0, done.stderr
    pid, behind, there = done.stdout.split(maxsplit=2)
    assert behind == plain.stdout.split()[1] == "1"
    assert [p for p in eval(there) if not p.endswith("inject")] == eval(plain.stdout.split(maxsplit=2)[2])
    assert list((tmp_path / "run").glob("hosts/*/samples.jsonl"))
    ran = (tmp_path / "count").read_text().split()
    assert (len(ran), ran.count(pid), len(set(ran))) == (2, 1, 2)


@pytest.mark.parametrize(
    ("code", "finders", "hellos"),
    [
        (FINDERS, 1, 1),
        # Who imports sitecustomize again gets no second hook.
        ("import sys; del sys.modules['sitecustomize']; import sitecustomize; " + FINDERS, 1, 1),
        # Interpreters that never train are left alone.
        (f"{FINDERS}  # multiprocessing.resource_tracker", 0, 0),
        (f"{FINDERS}  # torch._inductor.compile_worker", 0, 0),
    ],
)
def test_an_interpreter_leaves_word_and_waits_for_torch(code: str, finders: int, hellos: int, tmp_path: Path) -> None:
    assert eval(watched(tmp_path / "run", code)) == ["_TorchFinder"] * finders
    assert [line["python"] for line in hello(tmp_path / "run")] == [sys.version.split()[0]] * hellos


def test_the_hook_is_silent_without_a_run(tmp_path: Path) -> None:
    env = recorded(environment(), tmp_path / "run")
    del env["DLPROF_RUN"]
    assert launch([sys.executable, "-c", FINDERS], tmp_path, env=env).stdout == "[]\n"
    assert not (tmp_path / "run").exists()


FAKE_TORCH = """
import importlib, sys
import torch
loader = torch.__spec__.loader
print(torch.ready, "exec_module" in vars(loader), [f for f in sys.meta_path if type(f).__name__ == "_TorchFinder"])
"""


def test_the_recorder_is_loaded_once_torch_is_and_what_fails_in_it_is_one_line(tmp_path: Path) -> None:
    """The torch here is not PyTorch: the recorder finds nothing that it knows, and the script goes on."""
    (tmp_path / "site/torch").mkdir(parents=True)
    (tmp_path / "site/torch/__init__.py").write_text("import sys\nready = 'dlprof' not in sys.modules\n")
    run = tmp_path / "run"
    env = recorded(environment(PYTHONPATH=str(tmp_path / "site")), run)
    done = launch([sys.executable, "-c", FAKE_TORCH], tmp_path, env=env)
    assert done.stdout == "True False []\n"
    (said,) = [line for line in done.stderr.splitlines() if line.endswith("the job goes on without it")][-1:]
    assert said.startswith("dlprof: ")
    assert [line.get("torch") for line in hello(run)] == [None, True]


def test_a_process_that_replaces_itself_leaves_word_of_that(tmp_path: Path) -> None:
    code = "import os, sys; os.execv(sys.executable, [sys.executable, '-c', 'print(1)'])"
    assert watched(tmp_path / "run", code) == "1\n"
    kinds = [next(key for key in ("python", "exec") if key in line) for line in hello(tmp_path / "run")]
    assert kinds == ["python", "exec", "python"]
    assert len({line["pid"] for line in hello(tmp_path / "run")}) == 1


@pytest.mark.parametrize(("run", "sets"), [("a file", ""), (None, "{")])
def test_a_run_that_cannot_be_written_and_settings_that_are_no_json_cost_one_line(
    run: str | None, sets: str, tmp_path: Path
) -> None:
    if run is not None:
        (tmp_path / "run").write_text(run)
    env = recorded(environment(DLPROF_SET=sets), tmp_path / "run")
    done = launch([sys.executable, "-c", "print(1)"], tmp_path, env=env)
    assert (done.returncode, done.stdout) == (0, "1\n")
    (line,) = done.stderr.splitlines()
    assert line.startswith("dlprof: ")
    assert line.endswith("; the job goes on without it") or sets


SETS = json.dumps({"set": {"env.DL_KEPT": "1", "loader.num_workers": 2}, "environment": {"DL_KEPT": None}})


def test_variables_that_are_overridden_stay_as_asked_for(tmp_path: Path) -> None:
    (tmp_path / "child.py").write_text("import os; print(os.environ['DL_KEPT'])")
    (tmp_path / "child.sh").write_text(f"export DL_KEPT=6; exec {sys.executable} {tmp_path / 'child.py'}")
    code = f"""if True:
    import json, os, subprocess
    os.environ["DL_KEPT"] = "2"
    os.environ.update(DL_KEPT="3", DL_OTHER="4")
    os.environ.setdefault("DL_KEPT", "5")
    child = subprocess.run(["sh", {str(tmp_path / "child.sh")!r}], capture_output=True, text=True).stdout
    changed = [(value, line) for _, value, _, line, _ in type(os.environ).__setitem__.changed]
    print(json.dumps([os.environ["DL_KEPT"], os.environ["DL_OTHER"], child, changed]))
    """
    said = json.loads(watched(tmp_path / "run", code, DLPROF_SET=SETS, DL_KEPT="0"))
    assert said == ["1", "4", "1\n", [["0", 0], ["2", 3], ["3", 4]]]


def test_without_overridden_variables_the_environment_is_pythons_own(tmp_path: Path) -> None:
    code = "import os; print(hasattr(type(os.environ).__setitem__, 'changed'))"
    sets = json.dumps({"set": {"loader.num_workers": 2}, "environment": {}})
    assert watched(tmp_path / "run", code, DLPROF_SET=sets) == "False\n"
