"""Whether a recorded job is the job that it is without dlprof: pairs of scripts, signals and full disks at random.

    python -m benchmarks.torture.jobs --number 20 --seed 1

Pairs: each script of PAIRS runs plainly and recorded; output, exit status, and the files that it leaves are the same.
Deaths: a job gets a random signal at a random moment, itself, its dlprof or both; it ends as it would without dlprof,
no process is left, and what was recorded is reported or refused in one line. Disks: a job is recorded onto a file
system of random size, that fills before, while or after it trains; its output and exit status stay its own. Exits with
1 where one of them does not hold.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_TRAIN = """
import os, signal, sys, torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
def step():
    optimizer.zero_grad()
    loss = model(torch.randn(16, 8)).square().mean()
    loss.backward()
    optimizer.step()
    return loss
"""
_DIGEST = "print(sum(p.double().sum().item() for p in model.parameters()))\n"
_MANY = "for _ in range(60): step()\n"

# Each trains and ends in a way of its own.
PAIRS: Mapping[str, str] = {
    "trains": _TRAIN + _MANY + _DIGEST,
    "exit code": _TRAIN + _MANY + _DIGEST + "sys.exit(7)\n",
    "exit text": _TRAIN + _MANY + "sys.exit('no more')\n",
    "exception": _TRAIN + _MANY + "raise ValueError('end')\n",
    "os._exit": _TRAIN + _MANY + "print('end', flush=True); os._exit(9)\n",
    "killed": _TRAIN + _MANY + "print('end', flush=True); os.kill(os.getpid(), signal.SIGKILL)\n",
    "aborts": _TRAIN + _MANY + "os.abort()\n",
    "stdin": _TRAIN + "for line in sys.stdin: print(line.strip(), step().item())\n" + _DIGEST,
    "atexit": _TRAIN + "import atexit; atexit.register(lambda: print('at exit'))\n" + _MANY + _DIGEST,
    "workers": _TRAIN
    + "from torch.utils.data import DataLoader, TensorDataset\n"
    + "data = DataLoader(TensorDataset(torch.randn(640, 8)), 16, num_workers=2)\n"
    + "for (x,) in data:\n    optimizer.zero_grad(); model(x).mean().backward(); optimizer.step()\n"
    + _DIGEST,
    "threads": _TRAIN
    + "import threading\n"
    + "t = threading.Thread(target=lambda: [step() for _ in range(60)]); t.start(); t.join()\n"
    + _DIGEST,
    "forks": _TRAIN + _MANY + "pid = os.fork()\nif not pid: os._exit(3)\nprint(os.waitpid(pid, 0)[1])\n" + _DIGEST,
    "child process": _TRAIN
    + _MANY
    + "import subprocess; print(subprocess.run([sys.executable, '-c', 'print(41 + 1)'], capture_output=True).stdout)\n",
    "own profiler": _TRAIN
    + "from torch.profiler import profile\nwith profile() as p:\n    step()\n"
    + _MANY
    + "print(len(p.key_averages()) > 0)\n"
    + _DIGEST,
    "saves": _TRAIN + _MANY + "torch.save(model.state_dict(), 'model.pt'); open('log.txt', 'w').write('done')\n",
    "own handler": _TRAIN
    + "signal.signal(signal.SIGUSR1, lambda *_: print('usr1'))\n"
    + _MANY
    + "os.kill(os.getpid(), signal.SIGUSR1)\nprint(signal.getsignal(signal.SIGINT) is signal.default_int_handler)\n",
    "hooks": _TRAIN
    + "seen = []\nmodel[0].register_forward_hook(lambda *_: seen.append(1))\n"
    + "model[0].weight.register_hook(lambda g: g * 2)\n"
    + _MANY
    + "print(len(seen))\n"
    + _DIGEST,
    "closure": _TRAIN
    + "best = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)\nx = torch.randn(16, 8)\n"
    + "def closure():\n    best.zero_grad(); loss = model(x).square().mean(); loss.backward(); return loss\n"
    + "for _ in range(20): best.step(closure)\n"
    + _DIGEST,
    "no training": "import sys\nprint(sys.argv[1:], __name__)\n",
    "warns": _TRAIN + "import warnings; warnings.simplefilter('error')\n" + _MANY + _DIGEST,
}

# Signals, who gets them ("script", "dlprof" or "both"), and whether dlprof passes on what it gets alone.
_SENT = (
    *((number, "script") for number in (signal.SIGTERM, signal.SIGINT, signal.SIGKILL, signal.SIGHUP, signal.SIGQUIT)),
    *((number, "dlprof") for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGKILL)),
    *((number, "both") for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)),
)
_REPORTED = ("-m", "dlprof", "wrap", "--quiet")
_WRAP = (*_REPORTED, "--no-report")
_MARK = "DLPROF_TORTURE"
_GONE_WITHIN = 30.0  # seconds, on a busy machine


class Held(NamedTuple):
    """One case: what was tried, and what did not hold ("": all did)."""

    kind: str
    name: str
    wrong: str = ""


def pairs(root: Path) -> Iterator[Held]:
    """Run each script plainly and recorded, and compare what is seen of it."""
    for n, (name, text) in enumerate(PAIRS.items()):
        seen = []
        for words in ((), (*_WRAP, "-o", str(root / f"pair{n}"))):
            folder = root / f"{n}-{bool(words)}"
            folder.mkdir()
            (folder / "script.py").write_text(text)
            command = [sys.executable, *words, "script.py"]
            done = subprocess.run(command, cwd=folder, input="a\nb\n", capture_output=True, text=True)
            shutil.rmtree(folder / "__pycache__", ignore_errors=True)
            left = {str(path.relative_to(folder)): path.stat().st_size for path in sorted(folder.rglob("*"))}
            seen.append((done.returncode, done.stdout, _errors(done.stderr).replace(str(folder), ""), left))
        parts = ("exit status", "stdout", "stderr", "files")
        wrong = [f"{part}: {a!r} and {b!r}" for part, a, b in zip(parts, *seen, strict=True) if a != b]
        yield Held("pairs", name, "; ".join(wrong))


def deaths(root: Path, number: int, dice: random.Random) -> Iterator[Held]:
    """Send random signals at random moments."""
    script = root / "endless.py"
    script.write_text(_TRAIN + "print('ready', os.getpid(), flush=True)\nwhile True: step()\n")
    for n in range(number):
        what, to = _SENT[n % len(_SENT)]
        after, folder = dice.uniform(0, 3), root / f"death{n}"
        yield Held("deaths", f"{what.name} to {to} after {after:.2f} s", _died(script, folder, what, to, after))


def _died(script: Path, folder: Path, what: signal.Signals, to: str, after: float) -> str:
    mark = uuid.uuid4().hex
    words = [sys.executable, *_WRAP, "-o", str(folder), str(script)]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    job = subprocess.Popen(words, env={**os.environ, _MARK: mark}, **streams)  # type: ignore[call-overload]
    ready = job.stdout.readline().split()
    time.sleep(after)
    if to in ("script", "both"):
        os.kill(int(ready[1]), what)
    if to in ("dlprof", "both"):
        job.send_signal(what)
    try:
        _, said = job.communicate(timeout=_GONE_WITHIN)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        job.communicate()
        return "it did not end"
    wrong = [] if job.returncode == -what else [f"ended with {job.returncode}"]
    # Ctrl-C ends Python with a traceback of its own.
    wrong += ["a traceback of dlprof's"] if "/dlprof/" in _errors(said) else []
    since = time.monotonic()
    while (left := _marked(mark)) and time.monotonic() - since < _GONE_WITHIN:
        time.sleep(0.2)
    wrong += [f"processes are left: {left}"] if left else []
    return "; ".join([*wrong, *_reported(folder)])


def disks(root: Path, number: int, dice: random.Random) -> Iterator[Held]:
    """Record onto file systems of random size; nothing where none can be mounted."""
    script = root / "ends.py"
    script.write_text(_TRAIN + "for _ in range(300): step()\n" + _DIGEST + "sys.exit(3)\n")
    plain = subprocess.run([sys.executable, script], capture_output=True, text=True)
    for n in range(number):
        kilobytes = int(2 ** dice.uniform(3, 12))
        at = root / f"disk{n}"
        at.mkdir()
        mounted = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(at)]
        if subprocess.run(mounted, capture_output=True).returncode:
            return
        try:
            words = [sys.executable, *_REPORTED, "-o", str(at / "run"), str(script)]
            env = {**os.environ, "TMPDIR": str(at)} if dice.random() < 0.3 else dict(os.environ)
            done = subprocess.run(words, env=env, capture_output=True, text=True)
            wrong = [] if (done.returncode, done.stdout) == (3, plain.stdout) else [f"ended with {done.returncode}"]
            wrong += ["a traceback"] if "Traceback" in done.stderr else []
            yield Held("disks", f"{kilobytes} kB", "; ".join(wrong))
        finally:
            subprocess.run(["umount", "-l", str(at)], capture_output=True)


def _errors(text: str) -> str:
    """Return what is not dlprof's, nor Kineto's lines about sessions of a profiler, which have the time."""
    return "\n".join(line for line in text.splitlines() if not line.startswith(("dlprof: ", "USDT:")))


def _marked(mark: str) -> list[int]:
    """Return the processes that were started with a mark in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it has ended, or is another user's
            found += [int(path.parent.name)] if mark.encode() in path.read_bytes() else []
    return found


def _reported(folder: Path) -> list[str]:
    if not folder.exists():
        return []
    words = [sys.executable, "-m", "dlprof", "report", str(folder), "--quiet"]
    done = subprocess.run(words, capture_output=True, text=True)
    if "Traceback" in done.stderr:
        return ["the report has a traceback"]
    refused = done.returncode and len(done.stderr.splitlines()) != 1
    return [f"the report says {done.stderr!r}"] if refused else []


def cases(number: int, seed: int) -> Iterator[Held]:
    """Yield what became of all pairs, and of so many deaths and disks."""
    dice = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        yield from pairs(root)
        yield from deaths(root, number, dice)
        yield from disks(root, number, dice)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cases, print what does not hold and a line for each kind; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=33, help="deaths, and disks (default: 33)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    held: dict[str, list[bool]] = {"pairs": [], "deaths": [], "disks": []}
    for case in cases(args.number, args.seed):
        held[case.kind].append(not case.wrong)
        if case.wrong:
            print(f"{case.kind}, {case.name}: {case.wrong}", flush=True)
    for kind, good in held.items():
        print(f"{kind}: {sum(good)} of {len(good)} hold")
    return int(not all(all(good) for good in held.values()))


if __name__ == "__main__":
    sys.exit(main())
