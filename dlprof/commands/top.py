"""`dlprof top`: a run while it trains, or after it, in the terminal."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dlprof.commands import PATH, form

if TYPE_CHECKING:
    from rich.console import Console

    from dlprof.live.follow import Follower

_LOOK_S = 1.0  # between two looks, and five times as long as the last look took


@click.command(short_help="Watch a run in the terminal while it trains.")
@click.argument("run", required=False, type=PATH)
@click.option("--once", is_flag=True, help="Print one frame and end, as where stdout is no terminal.")
@form
def top(run: Path | None, once: bool, form: str) -> None:
    """Watch a run in the terminal while it trains, or look at one that is over.

    RUN is the folder of a run, on this host or a shared disk, or a folder of runs: then the newest. Without it: that in
    ./runs. Keys: q quits, s sorts ranks by another figure, p pauses, r writes the report so far.
    """
    from dlprof.live.follow import Follower, find

    follower = Follower(find(run))
    follower.read()
    if form == "json":
        import dataclasses
        import json

        click.echo(json.dumps(dataclasses.asdict(follower.now())))
        return
    from rich.console import Console

    # No markup: names in a recording may look like it. What is no terminal has no width.
    width = None if sys.stdout.isatty() else 120
    console = Console(markup=False, emoji=False, highlight=False, width=width)
    if once or not (sys.stdin.isatty() and sys.stdout.isatty()):
        from dlprof.live.screen import draw

        console.print(draw(follower.now(), width=console.width))
        return
    _watch(follower, console)


def _watch(follower: Follower, console: Console) -> None:
    """Draw again and again until `q` or Ctrl-C."""
    import select
    import termios
    import tty

    from rich.live import Live

    from dlprof.live.screen import KEYS, SORTS, draw

    sorts, paused, note, report = list(SORTS), False, "", None
    now, next_s = follower.now(), 0.0
    terminal, before = sys.stdin.fileno(), termios.tcgetattr(sys.stdin.fileno())
    try:
        tty.setcbreak(terminal)
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                if time.monotonic() >= next_s and not paused:
                    began_s = time.monotonic()
                    follower.read()
                    now = follower.now()
                    next_s = time.monotonic() + max(_LOOK_S, 5 * (time.monotonic() - began_s))
                if report is not None and report.poll() is not None:
                    said = report.communicate()[1].decode(errors="replace").strip().splitlines()
                    where = follower.run / "report.html"
                    note = (
                        f"no report: {said[-1] if said else report.returncode}"
                        if report.returncode
                        else f"report: {where}"
                    )
                    report = None
                notes = (*filter(None, [note]), KEYS + ("   paused" if paused else ""))
                rows, width = max(console.height - 14, 1), console.width
                live.update(draw(now, sorts[0], rows=rows, width=width, notes=notes), refresh=True)
                if not select.select([terminal], [], [], 0.5)[0]:
                    continue
                key = os.read(terminal, 1)
                if key in (b"q", b""):
                    return
                if key == b"s":
                    sorts.append(sorts.pop(0))
                elif key == b"p":
                    paused = not paused
                elif key == b"r" and report is None:
                    note = "report: is being made"
                    words = [sys.executable, "-m", "dlprof", "report", "--quiet", str(follower.run)]
                    report = subprocess.Popen(
                        words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
                    )
    except KeyboardInterrupt:
        return
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)
        if report is not None:
            report.kill()
