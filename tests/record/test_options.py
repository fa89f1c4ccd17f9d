"""The options of a script are known by name; no value of any is kept, and whatever fails costs the script nothing."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import pytest

from dlprof.record import options
from dlprof.record.observed import Observed


def parser(**more: Any) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(**more)
    made.add_argument("folder")
    made.add_argument("-j", "--workers", type=int, default=2)
    made.add_argument("--amp", action="store_true")
    made.add_argument("--pin-mem", action=argparse.BooleanOptionalAction, default=True)
    made.add_argument("--no-prefetch", dest="prefetch", action="store_false")
    made.add_argument("--compile", type=lambda text: text == "yes")
    made.add_argument("--api-token")
    made.add_argument("-v", action="count")
    return made


def seen(monkeypatch: pytest.MonkeyPatch, line: str, parse: Any) -> dict[str, tuple[str, bool, bool]]:
    """Return the options that are seen where a script of that command line parses: dest, switch, on."""
    observed = Observed()
    with monkeypatch.context() as patched:
        options.watch(observed, patched.setattr)
        patched.setattr(sys, "argv", ["train.py", *line.split()])
        parse()
    rows = [*observed.options.values()]
    assert "hunter2" not in json.dumps(rows)
    return {row["name"]: (row["dest"], row["switch"], row["on"]) for row in rows}


ALL = {
    "--workers": ("workers", False, False),
    "--amp": ("amp", True, False),
    "--pin-mem": ("pin_mem", True, True),
    "--no-prefetch": ("prefetch", True, True),
    "--compile": ("compile", False, False),
    "-v": ("v", True, False),
}


def subcommand() -> None:
    made = argparse.ArgumentParser()
    train = made.add_subparsers().add_parser("train", parents=[parser(add_help=False)])
    assert train
    made.parse_args()


@pytest.mark.parametrize(
    ("line", "parse", "on"),
    [
        ("hunter2", lambda: parser().parse_args(), {}),
        ("hunter2 --am --workers 4 --api-token hunter2", lambda: parser().parse_args(), {"--amp": True}),
        ("hunter2 --compile yes -vv", lambda: parser().parse_args(), {"--compile": True, "-v": True}),
        ("hunter2 --no-pin-mem", lambda: parser().parse_args(sys.argv[1:]), {"--pin-mem": False}),
        ("hunter2 --other", lambda: parser().parse_known_args(), {}),
        ("train hunter2 --amp", subcommand, {"--amp": True}),
    ],
)
def test_options_are_seen_by_name(monkeypatch: pytest.MonkeyPatch, line: str, parse: Any, on: dict[str, bool]) -> None:
    expected = {name: (dest, switch, on.get(name, by_default)) for name, (dest, switch, by_default) in ALL.items()}
    assert seen(monkeypatch, line, parse) == expected


def test_what_is_no_command_line_is_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert seen(monkeypatch, "--amp", lambda: parser().parse_args(["data"])) == {}
    assert seen(monkeypatch, "--amp", lambda: argparse.ArgumentParser().parse_known_args([])) == {}


def test_a_script_that_cannot_be_asked_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    class Odd(argparse.ArgumentParser):
        """One whose namespace answers nothing."""

    class Broken(argparse.Namespace):
        def __getattribute__(self, name: str) -> Any:
            if name == "amp" and sys._getframe(1).f_code.co_name == "_options":
                raise ValueError(name)
            return super().__getattribute__(name)

    def parse() -> None:
        made = Odd()
        made.add_argument("--amp", action="store_true")
        assert vars(made.parse_args(namespace=Broken())) == {"amp": True}

    assert seen(monkeypatch, "--amp", parse) == {}
    with pytest.raises(SystemExit):
        seen(monkeypatch, "", lambda: parser().parse_args())
