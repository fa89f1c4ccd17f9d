"""Who holds a lock that a thread waits for, by where the threads of a process stand in its source."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlprof.live.locks import holder
from dlprof.live.look import Frame, Thread, doing
from tests.live.test_standstill import process

SOURCE = """
def waits():
    with cache_lock:
        use()

def holds():
    with cache_lock:
        sleep(100)
    rest()

def by_hand():
    cache_lock.acquire()
    try:
        sleep(100)
    finally:
        cache_lock.release()
    rest()

def both():
    with cache_lock:
        with cache_lock:
            use()

class Cache:
    def get(self):
        with self.lock:
            return self.value

    def fill(self):
        with self.lock:
            self.value = load()

class Other:
    def fill(self):
        with self.lock:
            self.value = load()

def within():
    with cache_lock:
        def later():
            rest()
        return later

def reads(path):
    with open(path) as file:
        file.read()
"""
LINES = SOURCE.splitlines()


def at(function: str, text: str, nth: int = 0) -> int:
    """Return the number of the n-th line with a text behind the beginning of a function or class."""
    begins = next(
        n for n, line in enumerate(LINES) if line.strip().startswith((f"def {function}", f"class {function}"))
    )
    return [n for n, line in enumerate(LINES, 1) if n > begins + 1 and text in line][nth]


WAITING = at("waits", "with")


@pytest.mark.parametrize(
    ("mine", "other", "found"),
    [
        pytest.param(WAITING, [at("holds", "sleep")], (1, at("holds", "with")), id="in its with"),
        pytest.param(WAITING, [99, at("holds", "sleep")], (1, at("holds", "with")), id="further out"),
        pytest.param(WAITING, [at("holds", "rest")], (-1, WAITING), id="behind its with"),
        pytest.param(WAITING, [at("holds", "with")], (-1, WAITING), id="it waits as well"),
        pytest.param(WAITING, [at("by_hand", "sleep")], (1, at("by_hand", "acquire")), id="acquired"),
        pytest.param(WAITING, [at("by_hand", "rest")], (-1, WAITING), id="released"),
        pytest.param(WAITING, [at("within", "rest")], (-1, WAITING), id="a function made in a with runs later"),
        pytest.param(at("both", "with", 1), [], (0, at("both", "with")), id="taken twice"),
        pytest.param(at("Cache", "with"), [at("Cache", "value = load")], (1, at("fill", "with")), id="of one class"),
        pytest.param(at("Cache", "with"), [at("Other", "value = load")], (-1, at("Cache", "with")), id="of another"),
        pytest.param(at("reads", "with"), [], None, id="no lock"),
        pytest.param(at("holds", "sleep"), [], None, id="another line"),
    ],
)
def test_who_holds_a_lock(tmp_path: Path, mine: int, other: list[int], found: tuple[int, int] | None) -> None:
    file = tmp_path / "train.py"
    file.write_text(SOURCE)
    stacks = [[(str(file), mine)], [(str(file), line) for line in other]]
    seen = holder(stacks, 0)
    assert (None if seen is None else (seen.thread, seen.taken.line)) == found


@pytest.mark.parametrize("source", ["def f(:", "", "\0", "with a.b[0], c: pass"])
def test_a_source_that_says_nothing(tmp_path: Path, source: str) -> None:
    file = tmp_path / "train.py"
    file.write_text(source)
    assert holder([[(str(file), 1)], []], 0) is None
    assert holder([[(str(tmp_path / "gone.py"), 1)]], 0) is None
    assert holder([[]], 0) is None


@pytest.mark.parametrize(
    ("beside", "stack", "said"),
    [
        pytest.param("holds", "code", ", which thread Saver holds, in train.py:8: sleep(100)", id="a thread"),
        pytest.param("", "code", "", id="nobody"),
        pytest.param(
            "", "worker", ", which no thread of it holds: another process does, or a thread held it", id="fork"
        ),
    ],
)
def test_the_holder_is_named(tmp_path: Path, beside: str, stack: str, said: str) -> None:
    file = tmp_path / "train.py"
    file.write_text(SOURCE)
    one = process(stack)
    below = [frame for frame in one.threads[0].frames if "torch" in frame.file]
    main = Thread("MainThread", True, False, False, (Frame("waits", str(file), WAITING), *below))
    other = Thread("Saver", False, False, False, (Frame("holds", str(file), at("holds", "sleep")),))
    found = doing(process(stack, threads=(main, *([other] if beside else ()))))
    assert found.holder == said if beside or not said else found.holder.startswith(said)
