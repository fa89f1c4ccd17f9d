"""A job's secrets are nowhere in its run folder, nor in its report."""

from __future__ import annotations

import stat
import sys
import zlib
from pathlib import Path

import pytest

from tests.fixtures.jobs import DLPROF, environment, launch, wrapped

pytest.importorskip("torch", reason="recording needs torch")

SCRIPT = """
import time, torch
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
until = time.monotonic() + 6
while time.monotonic() < until:
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    time.sleep(0.01)
"""
SECRETS = [f"hunter{n}" for n in range(6)]


def held(folder: Path) -> bytes:
    """Return all that the files of a folder hold, unpacked."""
    found = b""
    for path in folder.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            while data[:2] == b"\x1f\x8b":
                member = zlib.decompressobj(wbits=31)
                found += member.decompress(data)
                data = member.unused_data
            found += data
    return found


@pytest.mark.long
def test_secrets_of_the_command_and_the_environment_reach_nothing(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [
        *(sys.executable, str(script), "--password", SECRETS[0], f"--api-key={SECRETS[1]}"),
        *("--data", f"https://me:{SECRETS[2]}@host/data", "--lr", "0.125"),
    ]
    env = environment(NCCL_PSK=SECRETS[3], TORCHX_PAT=SECRETS[4], TORCH_PROXY=SECRETS[5], NCCL_ALGO="Ring")
    run = tmp_path / "run"
    done = launch(wrapped(run, command, "--stacks", "50"), tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    assert stat.S_IMODE(run.stat().st_mode) == 0o700
    launch([*DLPROF, "report", str(run), "--quiet"], tmp_path)
    said = held(run)
    assert [secret for secret in SECRETS if secret.encode() in said] == []
    # What is no secret is there: the test looks where it should.
    for word in (b"0.125", b"NCCL_ALGO", b"[redacted]"):
        assert word in said
    if (run / "ranks/00000/stacks.txt.gz").exists():
        told = held(run / "ranks/00000")
        assert b"process " in told
        assert b"--password [redacted]" in told
