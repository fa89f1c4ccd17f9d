"""Records nsys/WORKLOAD.sqlite.gz: each workload under a real nsys, 12 steps, without what describes the machine.

    PATH=/where/nsys/is:$PATH python -m tests.golden.record_nsys_workloads

Recorded with nsys 2023.4.4 on two CPU cores, where it sees NVTX ranges and calls of the operating system alone.
"""

import gzip
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
KEPT = {"StringIds", "NVTX_EVENTS", "META_DATA_EXPORT", "TARGET_INFO_SESSION_START_TIME", "ENUM_NSYS_EVENT_TYPE"}


def reduced(path: Path) -> bytes:
    """Return an export with the tables that tell its steps, packed; texts that no range names are gone."""
    with sqlite3.connect(path) as connection:
        tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        for name in tables:
            if name not in KEPT and not name.startswith("sqlite_"):
                connection.execute(f'DROP TABLE "{name}"')
        connection.execute(
            "DELETE FROM StringIds WHERE id NOT IN (SELECT textId FROM NVTX_EVENTS WHERE textId NOTNULL)"
        )
        connection.execute("DELETE FROM META_DATA_EXPORT WHERE name NOT LIKE 'EXPORT_%VERSION'")
    connection.execute("VACUUM")
    connection.close()
    return gzip.compress(path.read_bytes(), mtime=0)


def main() -> None:
    """Record each workload that runs here."""
    out = Path(__file__).parent / "nsys"
    out.mkdir(exist_ok=True)
    for script in sorted((ROOT / "workloads").glob("*.py")):
        with tempfile.TemporaryDirectory() as temporary:
            words = ["run", str(script), "-o", "run", "--nsys", "--no-report", "--no-sample", "--", "--steps", "12"]
            done = subprocess.run(
                [sys.executable, "-m", "dlprof", *words], cwd=temporary, capture_output=True, text=True, check=False
            )
            exports = list(Path(temporary).glob("run/hosts/*/nsys*.sqlite"))
            if done.returncode or not exports:
                print(f"{script.stem}: {(done.stderr.splitlines() or ['no export'])[-1]}", flush=True)
                continue
            packed = reduced(exports[0])
            (out / f"{script.stem}.sqlite.gz").write_bytes(packed)
            print(f"{script.stem}: {len(packed):,} bytes", flush=True)


if __name__ == "__main__":
    main()
