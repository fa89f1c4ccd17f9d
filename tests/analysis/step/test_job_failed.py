"""How jobs end: what an error or a signal is said to mean, whose line is named, and which ends are no failure."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.endings import ENDINGS, of_error
from dlprof.analysis.step.rules.job_failed import RULE
from dlprof.read.run import open_run
from tests.fixtures import runs
from tests.fixtures.asking import ask
from tests.fixtures.jobs import COMPILES_NOTHING, launch, wrapped
from tests.fixtures.runs import MS

# What ends a process, and words of what the report says of it; "": no failure.
ERRORS = [
    ("RuntimeError", "DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that…", "/dev/shm"),
    ("RuntimeError", "DataLoader worker (pid 7) is killed by signal: Killed. ", "killed from outside"),
    ("RuntimeError", "DataLoader worker (pid 7) is killed by signal: Segmentation fault. ", "(Segmentation fault)"),
    ("RuntimeError", "DataLoader worker (pid(s) 7) exited unexpectedly: is killed by signal: Killed.", "from outside"),
    ("RuntimeError", "DataLoader worker (pid(s) 7) exited unexpectedly", "died (without a signal)"),
    ("ConnectionResetError", "[Errno 104] Connection reset by peer", "is gone"),
    ("RuntimeError", "DataLoader timed out after 20 seconds", "no batch came for 20 s"),
    ("KeyError", "Caught KeyError in DataLoader worker process 3.", "raised KeyError"),
    ("RuntimeError", "unable to write to file </torch_1_2_3>: No space left on device: shm_open", "/dev/shm is full"),
    ("OSError", "[Errno 24] Too many open files: 'x'", "as many files open"),
    ("OSError", "[Errno 28] No space left on device", "a disk is full"),
    ("DistBackendError", "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(…)", "did not come"),
    ("RuntimeError", "[/pytorch/gloo/transport/tcp/pair.cc:534] Connection closed by peer", "ended first"),
    ("RuntimeError", "CUDA error: device-side assert triggered", "an index outside"),
    ("RuntimeError", "CUDA error: an illegal memory access was encountered", "may not"),
    ("RuntimeError", "Function 'MulBackward0' returned nan values in its 0th output.", "not finite"),
    ("RuntimeError", "Trying to backward through the graph a second time (or …)", "a graph was used twice"),
    ("RuntimeError", "Expected all tensors to be on the same device, but found", "different devices"),
    ("RuntimeError", "CUDA error: no kernel image is available for execution on the device", "does not fit the GPU"),
    ("ValueError", "", "ValueError was raised"),
    ("KeyboardInterrupt", "", ""),
    ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 1 GiB", ""),
    ("RuntimeError", "[enforce fail] DefaultCPUAllocator: can't allocate memory", ""),
]


@pytest.mark.parametrize(("kind", "text", "words"), ERRORS, ids=[text or kind for kind, text, _ in ERRORS])
def test_an_error_is_known_by_what_the_library_says(kind: str, text: str, words: str) -> None:
    found = of_error({"type": kind, "text": text})
    assert (found is None) if not words else (found is not None and words in found.what and bool(found.changes))


def test_every_ending_has_an_error_that_shows_it() -> None:
    shown = [
        found.changes for kind, text, words in ERRORS if words and (found := of_error({"type": kind, "text": text}))
    ]
    assert all(one.changes in shown for one in ENDINGS.values())


PEER = {"type": "RuntimeError", "text": "Connection closed by peer", "site": "main (/w/train.py:9)"}
OWN = {"type": "ValueError", "text": "", "site": "load (/w/data.py:4)"}


@pytest.mark.parametrize(
    ("ended", "errors", "told"),
    [
        pytest.param({"code": 1, "signal": None}, [OWN], ("found", 0, "data.py", "ValueError"), id="an error"),
        pytest.param(
            {"code": 1, "signal": None}, [PEER, OWN], ("found", 1, "data.py", "ValueError"), id="the first cause"
        ),
        pytest.param({"code": 0, "signal": None}, [OWN], ("clear", 0, "", ""), id="an error that cost nothing"),
        pytest.param({"code": 0, "signal": None}, [None], ("clear", 0, "", ""), id="a good end"),
        pytest.param({"code": 3, "signal": None}, [None], ("clear", 0, "", ""), id="sys.exit(3)"),
        pytest.param({"code": None, "signal": 15}, [None], ("clear", 0, "", ""), id="a time limit"),
        pytest.param({"code": None, "signal": 9}, [None], ("found", 0, "", "SIGKILL"), id="a signal"),
        pytest.param({"code": 139, "signal": None}, [None], ("found", 0, "", "SIGSEGV"), id="a signal by a shell"),
        pytest.param({"code": None, "signal": None}, [None], ("not_measured", 0, "", ""), id="not known"),
    ],
)
def test_the_rank_that_failed_first_is_named_with_its_line(
    tmp_path: Path, ended: dict[str, Any], errors: list[Any], told: tuple[str, int, str, str]
) -> None:
    steps = [runs.light(n, 100 * MS) for n in range(8)]
    ranks = [(None, steps, {**runs.CPU, "directory": "/w/", "error": error}) for error in errors]
    found = ask(RULE, runs.recorded(tmp_path / "run", *ranks, exit=ended))
    state, rank, file, words = told
    assert found.state == state
    if state == "found":
        assert found.ranks == (rank,)
        assert [place.file for place in found.where] == ([file] if file else [])
        assert words in found.title + found.summary


KILLED = """
import os, signal, torch
from torch.utils.data import DataLoader, Dataset
class Rows(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        if index == 40:
            {fault}
        return torch.ones(4)
{head}
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x in DataLoader(Rows(), batch_size=4, num_workers=1):
    signal.signal(signal.SIGCHLD, {handler})
    model(x).sum().backward()
    optimizer.step()
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "handler", "words", "line"),
    [
        # torch's handler of SIGCHLD, or what asks for the batch, is first to see that a worker is gone.
        ("os.kill(os.getpid(), signal.SIGKILL)", "signal.getsignal(signal.SIGCHLD)", "killed", 0),
        ("os.kill(os.getpid(), signal.SIGKILL)", "signal.SIG_DFL", "killed", 0),
        ('raise KeyError("of the user: secret")', "signal.SIG_DFL", "raised KeyError", 9),
    ],
)
def test_a_worker_that_dies_is_told_of_with_the_exit_status_kept(
    tmp_path: Path, fault: str, handler: str, words: str, line: int
) -> None:
    script = tmp_path / "train.py"
    script.write_text(KILLED.format(head=COMPILES_NOTHING, fault=fault, handler=handler))
    done = launch(wrapped(tmp_path / "run", [sys.executable, str(script)], "--no-trace"), tmp_path)
    assert done.returncode == 1
    found = ask(RULE, tmp_path / "run")
    assert found.state == "found"
    assert words in found.title
    assert [place.line for place in found.where] == ([line] if line else [])
    assert "secret" not in str(open_run(tmp_path / "run").ranks[0].facts)
