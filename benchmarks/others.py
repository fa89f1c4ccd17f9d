"""Holds what dlprof says of recordings that others published against what is known of them.

`python -m benchmarks.others FOLDER [--out FILE]`, with checkouts of the repositories of others.toml as
FOLDER/OWNER+NAME.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import msgspec

from dlprof.commands.report import analyse
from dlprof.errors import DlprofError
from dlprof.report import formatting
from dlprof.result import Result
from dlprof.units import percent

TABLE = Path(__file__).with_name("others.toml")

# So far may steps, their lengths and shares be off; the last one or the first of a window is at times not whole.
_STEPS, _LENGTH, _SHARE, _GAIN = 3, 0.04, 0.06, 0.15

_HEAD = """# What it says of recordings of others

Recordings of GPU jobs that their authors published, with what is known of each from elsewhere: a README, marks in the
file that were read by hand, or another tool. To repeat it, put checkouts of the repositories that
`benchmarks/others.toml` lists into a folder, as OWNER+NAME, and type `python -m benchmarks.others FOLDER`. Reports of
Nsight Systems need `nsys` on the PATH. All of these recordings were at hand when the readers and rules were written: a
new one may be told wrong.

Steps are from one start to the next. Steps that are not whole, or in which the host only gains its lead, are left out
of the mean, and the report says so: their mean is then up to 3 % off that of all.

"""


class Truth(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is known; None and (): nothing of it."""

    steps: int | None = None
    step_ms: float | None = None
    idle: float | None = None
    computation: float | None = None
    device_ms: float | None = None
    first: str | None = None
    gain: float | None = None
    words: tuple[str, ...] = ()


class Recording(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An entry of others.toml. `refused`: it is not read, and one of these is said."""

    repo: str
    path: str
    what: str
    truth: Truth = Truth()
    refused: tuple[str, ...] = ()


def recordings() -> tuple[Recording, ...]:
    """Return the entries of others.toml."""
    return msgspec.toml.decode(TABLE.read_bytes(), type=dict[str, tuple[Recording, ...]])["recording"]


def wrong(truth: Truth, said: Result) -> list[str]:
    """Return what is not as it is known to be."""
    window = said.window
    if window is None:
        return ["no step"]
    found = []
    ms, of = window.step_ns / 1e6, {"idle": 0.0, "computation": 0.0}
    for part in said.time:
        of["computation"] += part.share * (part.category == "computation")
        of["idle"] += part.share * (part.category not in ("computation", "communication", "copy"))
    if truth.steps is not None and abs(window.steps - truth.steps) > min(_STEPS, truth.steps - 1):
        found.append(f"{window.steps} steps, not {truth.steps}")
    if truth.step_ms is not None and abs(ms / truth.step_ms - 1) > _LENGTH:
        found.append(f"steps of {ms:.1f} ms, not {truth.step_ms}")
    for name, share in of.items():
        known = getattr(truth, name)
        if known is not None and abs(share - known) > _SHARE:
            found.append(f"{name} {percent(share)}, not {percent(known)}")
    if truth.device_ms is not None and abs(of["computation"] * ms / truth.device_ms - 1) > _LENGTH:
        found.append(f"{of['computation'] * ms:.2f} ms of the device, not {truth.device_ms}")
    first = said.found[0].id if said.found else ""
    if truth.first is not None and first != truth.first:
        found.append(f"{first or 'nothing'} first, not {truth.first or 'nothing'}")
    if truth.gain is not None and (not said.found or abs(said.found[0].speedup / truth.gain - 1) > _GAIN):
        found.append(f"a gain of {said.found[0].speedup:.2f} ×, not {truth.gain}" if said.found else "no gain")
    text = " ".join((*said.run.warnings, *(o.verdict for o in said.found)))
    return found + [f'not "{words}"' for words in truth.words if words not in text]


def held(recording: Recording, path: Path) -> tuple[str, list[str]]:
    """Return in words what is said of a recording, and what is wrong with that."""
    try:
        said = analyse(path, None)
    except DlprofError as e:
        if any(words in str(e) for words in recording.refused):
            return "refused, and why", []
        return f"refused: {e}", ["it is refused"]
    if recording.refused:
        return "read", ["it is read"]
    first = f"; {said.found[0].id} {formatting.speedup(said.found[0])}" if said.found else "; no finding"
    return formatting.steps(said) + first, wrong(recording.truth, said)


def table(rows: list[tuple[Recording, str, list[str]]]) -> str:
    """Return the page's table."""
    lines = ["| recording | known | said | |", "|---|---|---|---|"]
    for one, said, errors in rows:
        known = ", ".join(f"{name} {value}" for name, value in _known(one.truth).items()) or "not PyTorch's, or too new"
        name = f"{one.repo.partition('@')[0]}: `{Path(one.path).name}`. {one.what}"
        lines.append(f"| {name} | {known} | {said} | {'; '.join(errors) or 'right'} |")
    right = sum(not errors for _, _, errors in rows)
    return "\n".join([*lines, "", f"Right: {right} of {len(rows)}."]) + "\n"


def _known(truth: Truth) -> dict[str, Any]:
    whole = msgspec.to_builtins(truth)
    kept = {name: value for name, value in whole.items() if value not in (None, []) and name != "words"}
    return kept | ({"first": truth.first or "nothing"} if truth.first is not None else {})


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Write the page there.")
def main(folder: Path, out: Path | None) -> None:
    """Read the recordings that are in FOLDER, and say what is wrong."""
    rows, missing = [], []
    for one in recordings():
        path = folder / one.repo.partition("@")[0].replace("/", "+") / one.path
        if not path.is_file():
            missing.append(str(path))
            continue
        rows.append((one, *held(one, path)))
    page = _HEAD + table(rows) + "".join(f"\nNot there: `{path}`." for path in missing)
    if out is None:
        click.echo(page)
    else:
        out.write_text(page)


if __name__ == "__main__":
    main()
