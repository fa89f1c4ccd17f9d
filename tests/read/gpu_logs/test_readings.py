"""Numbers with units, and times of every kind."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path

import pytest

from dlprof.errors import DlprofError
from dlprof.read.gpu_logs.readings import DAY, LOCAL, SECOND, ZONE, Readings, number, time_of

AT = int(datetime(2026, 3, 4, 5, 6, 7, tzinfo=timezone.utc).timestamp()) * SECOND


@pytest.mark.parametrize(
    ("text", "value"),
    [("87 %", 87), ("612.34 W", 612.34), ("0x04", 4), ("(800Mhz)", 800), ("-", None), ("[N/A]", None), ("", None)],
)
def test_numbers(text: str, value: float | None) -> None:
    assert number(text) == value


@pytest.mark.parametrize("text", ["nan", "inf", "1e999", "0xzz", "0x"])
def test_what_is_no_number_is_none(text: str) -> None:
    assert number(text) is None


@pytest.mark.parametrize(
    ("text", "at", "kind"),
    [
        ("2026/03/04 05:06:07.250", AT + SECOND // 4, LOCAL),
        ("2026/03/04 05:06:07", AT, LOCAL),
        ("20260304 05:06:07", AT, LOCAL),
        ("Wed Mar  4 05:06:07 2026", AT, LOCAL),
        ("2026-03-04T05:06:07+00:00", AT, ZONE),
        ("2026-03-04T07:06:07.000000000+02:00", AT, ZONE),
        ("2026-03-04T05:06:07Z", AT, ZONE),
        (str(AT // SECOND), AT, ZONE),
        (str(AT // 1_000_000), AT, ZONE),
        (str(AT), AT, ZONE),
        ("05:06:07", (5 * 3600 + 6 * 60 + 7) * SECOND, DAY),
    ],
)
def test_times(text: str, at: int, kind: str) -> None:
    assert time_of(text) == (at, kind)


@pytest.mark.parametrize("text", ["", "yesterday", "99/99/99", "12", "1" * 40])
def test_what_is_no_time_is_none(text: str) -> None:
    assert time_of(text) is None


def test_a_log_of_times_of_day_passes_midnight() -> None:
    log = Readings(Path("x"), "nvidia-smi", timed=True)
    for at in ("23:59:59", "00:00:00"):
        log.add("0", at, [("power_w", 1.0)])
    times = log.reading().tables["samples"]["at_ns"].tolist()
    assert times[1] - times[0] == SECOND


def test_without_a_reading_it_is_no_log() -> None:
    log = Readings(Path("x"), "nvidia-smi", timed=True)
    log.add("0", "never", [("power_w", 1.0)])
    with pytest.raises(DlprofError):
        log.reading()
