"""Files that the script opened to read, its modules and its shell lines are known by digest; nothing else is."""

from __future__ import annotations

import hashlib
import importlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dlprof.record.calls.files import Files


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def test_what_the_script_read_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outside = tmp_path / "outside.yaml"
    job = tmp_path / "job"
    (job / "conf").mkdir(parents=True)
    texts = {
        "conf/a.yaml": "a: 1\n",
        "own_module.py": "X = 1\n",
        "run.sh": "python own_module.py\n",
        "Makefile": "all:\n",
    }
    texts |= {"written.json": "{}", "later.json": "{}", "unread.yaml": "", "a.txt": "", "large.json": " " * (300 << 10)}
    for name, text in texts.items():
        (job / name).write_text(text)
    outside.write_text("")
    monkeypatch.chdir(job)
    monkeypatch.syspath_prepend(str(job))
    os.utime(job / "Makefile", (time.time() + 60,) * 2)  # written later than the job was started
    undo: list[Callable[[], object]] = []
    seen = Files(f"{job}/", time.time() + 1)
    seen.watch(undo.append)
    importlib.import_module("own_module")
    for name in ("conf/a.yaml", "conf/../conf/a.yaml", "a.txt", "large.json", "later.json", str(outside)):
        Path(name).read_text()
    Path("written.json").write_text("{}")
    Path("written.json").read_text()
    first = {row["file"]: row["digest"] for row in seen.facts()}
    Path("later.json").write_text("[]")
    known = {row["file"]: row["digest"] for row in seen.facts()}
    expected = {name: digest(texts[name]) for name in ("conf/a.yaml", "own_module.py", "run.sh")} | {"Makefile": ""}
    assert {name: known[name] for name in known if not name.startswith("tests")} == expected
    assert first == known | {"later.json": digest("{}")}
    (leave,) = undo
    leave()
    Path("unread.yaml").read_text()
    assert seen.facts() == [{"file": name, "digest": digest} for name, digest in known.items()]
    del sys.modules["own_module"]


def test_an_odd_event_costs_the_script_nothing(tmp_path: Path) -> None:
    seen = Files(f"{tmp_path}/", time.time())
    for args in ((), ("a.yaml",), (b"a.yaml", "r", 0), (3, None, 0), ("a.yaml", "r", None)):
        seen.see("open", args)
    assert seen.facts() == []
