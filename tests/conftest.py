"""What holds for all tests: what they start can be interrupted, which may run a second time, and which come first."""

import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

# A shell's background jobs, nohup and some runners of CI ignore these, and so would every process that a test starts.
for _number, _usual in (
    (signal.SIGHUP, signal.SIG_DFL),
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGQUIT, signal.SIG_DFL),
):
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, _usual)

# Every process that a test starts would compile all of dlprof anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Tests in these folders, and those with a mark, start real jobs, of several processes that wait for each other, on the
# two cores that all tests share: a machine that starves one of them can make it fail. Such a test may run once more,
# and is listed. Tests of pure functions never run again.
STARTS_JOBS = ("benchmarks", "browser", "commands", "frameworks", "record", "robustness", "workloads")

# How many times as long as the others tests with these marks take, roughly.
LASTS = (("slow", 300), ("long", 60))


@pytest.fixture(autouse=True)
def _no_configuration() -> Iterator[None]:
    """Let no command that a test runs in this process keep the next ones from reading their own pyproject.toml."""
    yield
    os.environ.pop("DLPROF_CONFIG", None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Allow one more run of those that start jobs, unless they say themselves how many; the longest files come first.

    Of two workers that take file after file, neither then is left with a long one while the other has none.
    """
    tests = Path(__file__).parent
    lasts: Counter[Path] = Counter()
    for item in items:
        folder = item.path.relative_to(tests).parts[0]
        starts_jobs = folder in STARTS_JOBS or any(item.get_closest_marker(name) for name, _ in LASTS)
        if starts_jobs and item.get_closest_marker("flaky") is None:
            item.add_marker(pytest.mark.flaky(reruns=1))
        lasts[item.path] += next((s for name, s in LASTS if item.get_closest_marker(name)), 1)
    items.sort(key=lambda item: -lasts[item.path])  # stable: the tests of a file stay as they are
