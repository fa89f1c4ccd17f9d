"""Draws a run as it is now, for a terminal or as plain lines."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from dlprof.live.follow import Now, RankNow, number
from dlprof.plain import command_line, plain
from dlprof.units import digits, duration, percent, size

# The parts of a step: each with a colour, and a sign for where there are none.
_PARTS = {
    "fetch": ("yellow", "░"),
    "forward": ("blue", "█"),
    "backward": ("magenta", "▓"),
    "optimizer": ("green", "▒"),
    "rest": ("bright_black", "·"),  # with what comes before the forward pass
}
_BAR, _NARROW_BAR, _NARROW = 36, 16, 110  # columns; a terminal below the last shows hosts and limits of memory no more

# How ranks can be sorted.
SORTS: dict[str, Callable[[RankNow], float]] = {
    "rank": lambda one: one.rank,
    "step time": lambda one: -one.step_s,
    "fetch": lambda one: -one.parts_s["fetch"],
    "own time": lambda one: -one.own_s,
}
KEYS = "q quit   s sort   p pause   r report"


def draw(now: Now, sort: str = "rank", *, rows: int = 64, width: int = 120, notes: Sequence[str] = ()) -> Group:
    """Return a run as what rich prints in so many columns; `rows` ranks at most."""
    title = Text.assemble((plain(now.run), "bold"), "  ", plain(command_line(now.command), 300))
    title.no_wrap, title.overflow = True, "ellipsis"
    lines = [title, _state(now)]
    if now.step is not None and now.step_s is not None and now.mean_s is not None:
        lines += [_progress(now), _speed(now)]
    few = sorted(now.ranks, key=SORTS[sort])[:rows]
    shown: list[Text | Table] = (
        [*lines, _ranks(now, few, wide=width >= _NARROW), _legend(now, len(few), sort)] if few else [*lines]
    )
    for one in now.hosts:
        used, free = one["memory_used_bytes"], one["memory_available_bytes"]
        if one["cpu_share"] is not None:
            memory = "" if None in (used, free) else f", memory {size(used)} of {size(used + free)}"
            shown.append(Text(f"host {plain(one['host'], 60)}: CPU {percent(one['cpu_share'])}{memory}"))
    for stall in now.stalls:
        took, step = duration(number(stall, "dur_ns", 0)), number(stall, "step", "?")
        what = plain(str(stall.get("kind")).replace("_", " "), 40)
        path = f" ({plain(stall['path'], 80)})" if stall.get("path") else ""
        shown.append(Text(f"stall of rank {stall['rank']} in step {step}: {what}, {took}{path}"))
    return Group(*shown, *(Text(plain(note), "yellow") for note in (*now.warnings, *notes)))


def _state(now: Now) -> Text:
    for_ = _clock(now.elapsed_s)
    if now.state == "ended":
        number, code = now.exit.get("signal"), now.exit.get("code")
        how = f"by signal {plain(number, 9)}" if number else f"with exit code {plain(code, 9)}"
        return Text(f"ended {how} after {for_}", "green" if code == 0 else "red")
    if now.state == "gone":
        return Text(f"ended, and its recording was killed: how it ended is not known   ({for_} since it began)", "red")
    if now.state == "still":
        text = f"stands still for {duration((now.still_s or 0) * 1e9)} → dlprof hang {plain(now.run)}"
        return Text(f"{text}   ({for_} in all)", "bold red")
    return Text(f"{now.state} for {for_}" if now.state == "running" else f"no step has ended yet, after {for_}")


def _clock(seconds: float) -> str:
    whole = round(min(seconds, 1e9))
    return f"{whole // 3600}:{whole % 3600 // 60:02}:{whole % 60:02}"


def _progress(now: Now) -> Text:
    text = f"step {now.step:,}"
    if now.epoch:
        e = now.epoch
        text += f"   epoch {e['number']}, step {e['step']:,} of {e['steps']:,}, {_clock(e['left_s'])} left of it"
    return Text(text)


def _speed(now: Now) -> Text:
    step, mean = now.step_s or 0.0, now.mean_s or 0.0
    more = step / mean - 1 if mean else 0.0
    change = "" if abs(more) < 0.01 else f", {percent(abs(more))} {'slower' if more > 0 else 'faster'}"
    rates = [
        f"{digits(rate)} {of}/s" for rate, of in ((now.samples_per_s, "samples"), (now.tokens_per_s, "tokens")) if rate
    ]
    per_rank = " of a rank" if rates and now.throughput_of == "rank" and now.rank_count > 1 else ""
    return Text.assemble(
        ("step time ", ""),
        (duration(step * 1e9), "bold red" if more > 0.1 else "bold"),
        f" now{change} than the mean of the run, {duration(mean * 1e9)}" if change else " now, as in the whole run",
        f"   {', '.join(rates)}{per_rank}" if rates else "",
    )


def _ranks(now: Now, ranks: Sequence[RankNow], *, wide: bool) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    machines = [one.machine for one in ranks]
    gpu = any(m["gpu_busy_share"] is not None for m in machines)
    several = wide and len({m["host"] for m in machines}) > 1
    for name in ("rank", *(["host"] if several else []), "step", "time", "own", "", "cores", "memory"):
        table.add_column(name, justify="left" if name in ("", "host") else "right", no_wrap=True)
    for name in ("GPU", "GPU memory") if gpu else ():
        table.add_column(name, justify="right", no_wrap=True)
    longest = max(one.step_s for one in ranks)
    for one in ranks:
        m = one.machine
        row = [f"{one.rank}{f' (life {one.restarts + 1})' if one.restarts else ''}", f"{one.step:,}"]
        row[1:1] = [plain(m["host"], 20)] if several else []
        rss = None if m["rss_bytes"] is None else m["rss_bytes"] + (m["workers_rss_bytes"] or 0)
        cells: list[str | Text] = [
            *row,
            duration(one.step_s * 1e9),
            duration(one.own_s * 1e9),
            _bar(one, longest, _BAR if wide else _NARROW_BAR),
        ]
        cells += [
            "" if m["cores"] is None else f"{m['cores']:.1f}",
            _of(rss, m["memory_limit_bytes"] if wide else None),
        ]
        if gpu:
            busy, limit = m["gpu_busy_share"], m["gpu_memory_limit_bytes"] if wide else None
            cells += ["" if busy is None else percent(busy), _of(m["gpu_memory_bytes"], limit)]
        table.add_row(*cells, style="bold" if one.rank == now.waited_for else "")
    return table


def _of(used: float | None, limit: float | None) -> str:
    return "" if used is None else size(used) + (f" of {size(limit)}" if limit else "")


def _bar(one: RankNow, longest: float, width: int) -> Text:
    """Return the parts of a rank's step as a bar, which for the longest step is as long as `width`."""
    bar, at, drawn = Text(), 0.0, 0
    parts = dict(one.parts_s) | {"rest": one.parts_s["rest"] + one.parts_s["lead"]}
    for part, (colour, sign) in _PARTS.items():
        at += parts[part]
        cells = min(round(width * at / longest), width) - drawn if longest else 0
        bar.append(sign * cells, colour)
        drawn += max(cells, 0)
    return bar


def _legend(now: Now, shown: int, sort: str) -> Text:
    text = Text()
    for part, (colour, sign) in _PARTS.items():
        text.append(f"{sign}{sign} {part}  ", colour)
    text.append(f"by {sort}")
    if shown < now.rank_count:
        text.append(f"; {shown} of {now.rank_count:,} ranks, those with the most time of their own")
    if now.waited_for is not None:
        text.append(
            f"\nthe others wait for rank {now.waited_for}: its own time (before the backward pass) is the longest"
        )
    return text
