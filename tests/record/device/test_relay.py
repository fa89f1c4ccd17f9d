"""What passes the relay and what stays, packet by packet, and the process as a rank starts it."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading

import pytest

from dlprof.record.device import relay

HEAD = b"%s:2026-01-02 03:04:05 17:18 init.cpp:178] "
WARNING, STAGE, ERROR = (HEAD % level for level in (b"WARNING", b"STAGE", b"ERROR"))


def relayed(*packets: bytes, everything: bool = False) -> tuple[bytes, bytes]:
    """Return what is passed on and what is kept of packets that are written one after the other."""
    read, write = os.pipe2(os.O_DIRECT)
    passed, stderr = os.pipe()
    kept, keep = os.pipe()

    def speak() -> None:
        for packet in packets:
            os.write(write, packet)
        os.close(write)

    speaker = threading.Thread(target=speak)
    speaker.start()
    relay.relay(read, stderr, keep, everything)
    speaker.join()
    for fd in (read, stderr, keep):
        os.close(fd)
    with open(passed, "rb") as told, open(kept, "rb") as held:  # noqa: PTH123 - they are descriptors
        return told.read(), held.read()


@pytest.mark.parametrize(
    ("packets", "passed", "kept"),
    [
        ([STAGE + b"Completed Stage: Warm Up", b"\n"], b"", b""),
        ([ERROR + b"no", b"\n"], b"", ERROR + b"no\n"),
        ([b"loss 0.1\n", ERROR + b"no", b"\n", b"loss 0.2\n"], b"loss 0.1\nloss 0.2\n", ERROR + b"no\n"),
        # Another thread writes between a message and the end of its line.
        ([WARNING + b"no", b"loss 0.1\n", b"\n"], b"loss 0.1\n\n", WARNING + b"no\n"),
        ([WARNING + b"one\ntwo\n", b"\n"], b"\n", WARNING + b"one two\n"),
        # A progress bar, and words that only look like Kineto's.
        ([b"\r 10 %", b"\r 20 %"], b"\r 10 %\r 20 %", b""),
        ([b"ERROR:root:no\n", b"WARNING: slow\n"], b"ERROR:root:no\nWARNING: slow\n", b""),
        ([b"\xff\x00\n", b"\n"], b"\xff\x00\n\n", b""),
        ([], b"", b""),
    ],
)
def test_kinetos_messages_stay_and_all_else_passes_in_order(packets: list[bytes], passed: bytes, kept: bytes) -> None:
    assert relayed(*packets) == (passed, kept)


def test_a_message_longer_than_a_packet_stays_whole_and_is_kept_in_part() -> None:
    long = STAGE + b"x" * 10_000
    assert relayed(long, b"\n", b"loss 0.1\n") == (b"loss 0.1\n", b"")
    passed, kept = relayed(ERROR + b"y" * 10_000, b"loss 0.2\n")
    assert (passed, kept) == (b"loss 0.2\n", ERROR + b"y" * (1000 - len(ERROR)) + b"\n")


def test_what_is_kept_ends_where_nobody_would_read_it_any_more() -> None:
    # A pipe that is full would hold up the words of others.
    passed, kept = relayed(*([ERROR + b"z" * 950, b"\n"] * 60), b"after\n")
    assert passed == b"after\n"
    assert 30_000 < len(kept) < 35_000


def test_a_user_who_asked_for_kinetos_words_gets_them() -> None:
    words = (STAGE + b"Warm Up", b"\n", b"loss 0.1\n", ERROR + b"no", b"\n")
    assert relayed(*words, everything=True) == (b"".join(words), ERROR + b"no\n")


def test_stderr_that_nobody_reads_stops_nothing() -> None:
    read, write = os.pipe2(os.O_DIRECT)
    passed, stderr = os.pipe()
    os.close(passed)
    kept, keep = os.pipe()
    os.write(write, b"loss 0.1\n")
    os.write(write, ERROR + b"no")
    os.close(write)
    relay.relay(read, stderr, keep, everything=False)
    assert os.read(kept, 100) == ERROR + b"no\n"
    for fd in (read, stderr, kept, keep):
        os.close(fd)


def test_the_process_is_nobodys_child_and_ends_with_the_pipe() -> None:
    read, write = os.pipe2(os.O_DIRECT | os.O_CLOEXEC)
    passed, stderr = os.pipe2(os.O_CLOEXEC)
    command = [sys.executable, "-I", "-S", relay.__file__]
    first = subprocess.Popen(command, stdin=read, stdout=subprocess.DEVNULL, stderr=stderr)
    # It has ended, and what relays is no child of this process, which os.wait() would tell.
    assert first.wait(timeout=60) == 0
    os.close(read)
    os.close(stderr)
    os.write(write, b"loss 0.1\n")
    assert select.select([passed], [], [], 60)[0]
    assert os.read(passed, 100) == b"loss 0.1\n"
    os.close(write)
    assert select.select([passed], [], [], 60)[0]
    assert os.read(passed, 100) == b""
    os.close(passed)
