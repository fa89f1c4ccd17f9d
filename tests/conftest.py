"""What holds for all tests: what they start can be interrupted, and which of them may run a second time."""

import signal
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

# Tests in these folders start real jobs, of several processes that wait for each other, on the two cores that all tests
# share: a machine that starves one of them can make it fail. Such a test may run once more, and is listed. Tests of
# pure functions never run again.
STARTS_JOBS = ("benchmarks", "browser", "commands", "frameworks", "record", "robustness", "workloads")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Allow one more run of those that start jobs, unless they say themselves how many."""
    tests = Path(__file__).parent
    for item in items:
        folder = item.path.relative_to(tests).parts[0]
        if folder in STARTS_JOBS and item.get_closest_marker("flaky") is None:
            item.add_marker(pytest.mark.flaky(reruns=1))
