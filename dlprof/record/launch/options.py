"""The options of a recording, from the command line or `dlprof.record`, and how collectors and samplers read them.

Each check returns the value in its canonical form, or raises ValueError with the values that are allowed.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping
from urllib.parse import urlsplit

# Enough for shares of a few per cent after one burst. A round number would be in phase with steps of 5, 10 or 20 ms.
STACKS_A_SECOND = "47"

_RANKS = re.compile(r"all|last|per-host|per-stage|([0-9]{1,9})(?:-([0-9]{1,9}))?")

_STOP = re.compile(r"([1-9][0-9]{0,6}) ?(steps?|[smh]|)( of training)?")
_LISTEN = re.compile(r"(?:(\[[0-9A-Fa-f:]+\]|[\w.-]+)?:)?([0-9]{1,5})")
_SECONDS = {"s": 1, "m": 60, "h": 3600}


def window(text: str) -> str:
    """Check the steps to skip, to warm up and to trace; "" lets the recorder choose."""
    if not text:
        return ""
    try:
        skip, warmup, active = (int(part) for part in text.split(","))
    except ValueError:
        raise ValueError("three whole numbers: steps to skip, to warm up, to trace, e.g. 10,2,5") from None
    if min(skip, warmup) < 0 or active < 1:
        raise ValueError("at least one step to trace, and no negative numbers")
    return f"{skip},{warmup},{active}"


def ranks(text: str) -> str:
    """Check which ranks record a trace: all; or numbers, ranges and words, separated by commas."""
    for part in text.split(","):
        found = _RANKS.fullmatch(part)
        if found is None or (found[2] and int(found[1]) > int(found[2])):
            raise ValueError("all, or with commas between: ranks as 0 or 0-7, last, per-host, per-stage")
    return text


def function(text: str) -> str:
    """Check which function is timed line by line."""
    where, _, name = text.rpartition(":")
    if text != "auto" and not (where and all(part.isidentifier() for part in name.split("."))):
        raise ValueError(f"{text!r} is neither MODULE:FUNCTION nor auto")
    return text


def flops(text: str) -> str:
    """Check whether operations are counted."""
    if text not in ("auto", "on", "off"):
        raise ValueError("auto, on or off")
    return text


def stacks(text: str) -> str:
    """Check how many stacks per second are read."""
    if text in ("on", "off"):
        return STACKS_A_SECOND if text == "on" else text
    if not text.isdigit() or not 1 <= int(text) <= 1000:
        raise ValueError("on, off, or how many stacks a second, 1 to 1000")
    return str(int(text))


def sample(text: str) -> str:
    """Check the seconds between two readings of the host and its GPUs."""
    if text in ("auto", "off"):
        return text
    with contextlib.suppress(ValueError):
        if 0.1 <= float(text) <= 3600:
            return f"{float(text):g}"
    raise ValueError("auto, off, or the seconds between two readings, 0.1 to 3600")


def stop_after(text: str) -> str:
    """Check after what the job is ended: steps, or a time; "" lets it go on to its own end."""
    found = _STOP.fullmatch(text)
    if found is None or (found[3] and found[2] not in _SECONDS):
        if text:
            raise ValueError("how many steps, or a time: 40, '40 steps', 90s, 5m, '60s of training'")
        return ""
    number = int(found[1])
    if found[2] in _SECONDS:
        return f"{number * _SECONDS[found[2]]} s{found[3] or ''}"
    return f"{number} step{'s' * (number > 1)}"


def folder(text: str) -> str:
    """Check where each node records: an absolute path, which may begin with a variable that the node has set."""
    if text and not text.startswith(("/", "$")):
        raise ValueError("an absolute path, or a variable as '$TMPDIR', in quotes")
    return text


def hang(text: str) -> str:
    """Check after how many seconds without a step a job stands still."""
    if text in ("auto", "off"):
        return text
    with contextlib.suppress(ValueError):
        if 1 <= float(text) <= 1e6:
            return f"{float(text):g}"
    raise ValueError("auto, off, or seconds from 1 on")


def metrics(text: str) -> str:
    """Check where metrics go: HOST:PORT to be asked at, by this host alone unless it is named; or a URL of OTLP."""
    asked, scheme = _LISTEN.fullmatch(text), text.partition("://")[0]
    if not text or (asked and 0 < int(asked[2]) < 1 << 16):
        return f"{asked[1] or '127.0.0.1'}:{asked[2]}" if asked else ""
    with contextlib.suppress(ValueError):
        url = urlsplit(text)
        if scheme in ("otlp", "otlp+http", "otlp+https") and url.hostname and "@" not in url.netloc:
            host = url.netloc if url.port else f"{url.netloc}:4318"
            return f"{scheme.partition('+')[2] or 'http'}://{host}{url.path or '/v1/metrics'}"
    raise ValueError("HOST:PORT, :PORT (of this host alone), or otlp://HOST[:PORT]")


def losses(text: str) -> str:
    """Check the seed of a job whose losses are recorded, or "on" for the job's own; "": they are not."""
    if text in ("", "on"):
        return text
    if not (text.isascii() and text.isdigit()) or int(text) >= 2**32:
        raise ValueError("a seed from 0 to 4294967295, or on")
    return str(int(text))


def asked(**values: str | bool | Iterable[str]) -> dict[str, str]:
    """Return options by name as in run.json: switches are on or off, and several values are separate lines."""
    written = {True: "on", False: "off"}
    return {
        name: written[value] if isinstance(value, bool) else value if isinstance(value, str) else "\n".join(value)
        for name, value in values.items()
    }


def variables(asked: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables from which collectors and samplers read the options."""
    return {f"DLPROF_{name.upper()}": value for name, value in asked.items()}
