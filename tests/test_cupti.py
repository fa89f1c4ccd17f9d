"""What Kineto's messages are cut down to, and what is advised."""

from __future__ import annotations

from dlprof.cupti import loss, remedy, short

HEAD = "WARNING:2025-02-26 09:43:38 68350:68350 init.cpp:178] "
# As a job printed them whose driver did not fit.
SAID = [
    HEAD + "function cbapi->getCuptiStatus() failed with error CUPTI_ERROR_NOT_INITIALIZED (15)",
    "WARNING:2025-02-26 09:43:38 68350:68350 init.cpp:179] CUPTI initialization failed - CUDA profiler activities will "
    "be missing",
]


def test_messages_lose_their_heads_and_repetitions_and_what_is_too_much() -> None:
    assert short([*SAID, SAID[0], "", "  "]) == [
        "function cbapi->getCuptiStatus() failed with error CUPTI_ERROR_NOT_INITIALIZED (15)",
        "CUPTI initialization failed - CUDA profiler activities will be missing",
    ]
    assert [len(line) for line in short(f"{n} {'x' * 500}" for n in range(20))] == [240] * 8
    assert short(["no head at all"]) == ["no head at all"]


def test_only_what_costs_events_is_a_loss() -> None:
    harmless = "Adding duplicate callback -- domain = 3 callback id = 1"
    assert loss([harmless]) is None
    assert loss([]) is None
    assert loss([harmless, *short(SAID)]) == short(SAID)[0]
    assert loss(["Exceeded max GPU buffer count (33 >= 33) - terminating tracing"]) is not None


def test_each_error_has_its_own_remedy() -> None:
    assert "RestrictProfilingToAdminUsers" in remedy(["failed with error CUPTI_ERROR_INSUFFICIENT_PRIVILEGES (35)"])
    assert "nsys" in remedy(["failed with error CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED (39)"])
    assert "virtual GPU" in remedy(["… error CUPTI_ERROR_VIRTUALIZED_DEVICE_INSUFFICIENT_PRIVILEGES (40)"])
    # The first of several is the cause of the others.
    assert remedy(short(SAID)) == remedy(short(SAID)[:1]) != ""
    assert remedy(["something new"]) == remedy([]) == ""
