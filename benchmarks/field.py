"""How right the advice is on scripts that nobody here wrote: `make field FIELD=DIR`.

DIR holds checkouts of the repositories that benchmarks/field.toml names. Each script is recorded unedited, and then
every change that its report names, and the obvious ones that it does not, are tried in turn with the script as it is
(`dlprof try`). The table holds what was predicted against what was measured, and the largest gain that no
finding names.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
import msgspec

from dlprof.read.run import open_run
from dlprof.result import tried
from dlprof.result.stored import from_json
from dlprof.result.tried import Attempt
from dlprof.trial.planning import plan

SCRIPTS = Path(__file__).with_name("field.toml")
_DATA = Path(__file__).with_name("field_data.py")

# What was found so far, a file a script, and the page that is made of it.
ROWS = Path(__file__).parents[1] / "reports" / "field"
PAGE = Path(__file__).parents[1] / "docs" / "field.md"

_HEAD = """# How right the advice is on scripts that nobody here wrote

Public training scripts, unedited, on two cores without a GPU. Each was recorded for some seconds. Then `dlprof try`
ran it again with each change that its report names, and with the obvious ones that it does not, in turn with the script
as it is: A B A B. A ratio is how many times faster the mean step is with the change; in brackets is its 95 % interval.
One half of the scripts may guide a change of an estimator, the other half is only reported. Data are generated, in the
formats that the scripts expect. `--again` reports the recordings anew and keeps what was measured: predictions are of
today's estimators, measurements may be older.

To repeat it, put checkouts of the repositories that `benchmarks/field.toml` lists into a folder, and install what the
scripts need next to dlprof: `make field FIELD=folder FIELD_PYTHON=python`. It takes some minutes a script.

"""

# A gain or loss that counts: what `dlprof try` takes for one.
NOTABLE = 1.02


class Script(msgspec.Struct, frozen=True):
    """One entry of field.toml."""

    name: str
    half: str  # tuned or held_out
    kind: str
    folder: str
    command: list[str]
    data: str = ""
    path: str = ""  # what PYTHONPATH holds, from the folder
    levers: list[str] = []
    env: dict[str, str] = {}


class Change(msgspec.Struct, frozen=True):
    """One change that was tried: how many times faster it was predicted and measured to be."""

    settings: str
    findings: tuple[str, ...]
    predicted: float | None
    measured: float | None
    low: float | None
    high: float | None
    verdict: str
    why: str = ""

    @property
    def sign_is_right(self) -> bool | None:
        """Whether a named change is no loss; None: it was not measured well enough to say."""
        if self.measured is None or not self.findings or self.verdict == "unclear":
            return None
        return self.verdict != "slower"

    @property
    def error(self) -> float | None:
        """By how much the predicted step is off the measured one, of that; None: not known."""
        if self.predicted is None or self.measured is None or not self.findings:
            return None
        return self.measured / self.predicted - 1


class Row(msgspec.Struct, frozen=True):
    """What was found and tried on one script."""

    name: str
    half: str
    kind: str
    step_ns: float | None = None
    found: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()
    why: str = ""  # it could not be recorded or tried

    @property
    def largest(self) -> Change | None:
        """The single change that gained most; None: none gained."""
        gains = [c for c in self.changes if c.verdict == "gain" and c.measured]
        return max(gains, key=lambda c: c.measured or 0.0, default=None)

    @property
    def is_named(self) -> bool | None:
        """Whether a finding names the largest lever, or one like it; None: nothing gained."""
        if self.largest is None:
            return None
        group = self.largest.settings.partition("=")[0]
        return any(c.findings and c.settings.partition("=")[0] == group for c in self.changes)


def scripts(only: Iterable[str] = ()) -> list[Script]:
    """Return the scripts of field.toml, in order; `only` those of these names, if there are any."""
    chosen = set(only)
    listed = msgspec.toml.decode(SCRIPTS.read_text(), type=dict[str, list[Script]])["script"]
    return [s for s in listed if not chosen or s.name in chosen]


def environment(script: Script, folder: Path, python: Path) -> dict[str, str]:
    """Return the environment of a script: the interpreter's programs first, and no access to hubs."""
    env = {**os.environ, "PATH": f"{python.parent}:{os.environ['PATH']}", "HF_HUB_OFFLINE": "1", **script.env}
    if script.path:
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(folder / script.path), os.environ.get("PYTHONPATH"))))
    return env


def record(script: Script, field: Path, python: Path, out: Path, seconds: float) -> None:
    """Record a script for some seconds into `out`, and end it as Ctrl-C would."""
    folder = field / script.folder
    if script.data:  # made by the interpreter that has what the scripts need
        subprocess.run([python, _DATA, script.data, folder], check=True)
    shutil.rmtree(out, ignore_errors=True)
    process = subprocess.Popen(
        [python, "-m", "dlprof", "wrap", "--keep-arguments", "-o", out, *script.command],
        cwd=folder,
        env=environment(script, folder, python),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=out.with_suffix(".log").open("w"),
        start_new_session=True,
    )
    for asks, patience in ((signal.SIGINT, seconds), (signal.SIGTERM, 30.0), (signal.SIGKILL, 60.0)):
        if not _ended(process, patience):
            os.killpg(process.pid, asks)
    process.wait()


def _ended(process: subprocess.Popen[bytes], patience: float) -> bool:
    try:
        process.wait(patience)
    except subprocess.TimeoutExpired:
        return False
    return True


def try_(script: Script, field: Path, python: Path, out: Path, minutes: float) -> None:
    """Try what the report of a recording names, and the script's levers."""
    folder = field / script.folder
    options = ["--allow-numerics", "--quiet", f"--minutes={minutes}", *(f"--set={lever}" for lever in script.levers)]
    command = [str(python), "-m", "dlprof", "try", str(out), *options]
    with out.with_suffix(".try.log").open("w") as log:
        subprocess.run(
            command,
            cwd=folder,
            env=environment(script, folder, python),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            check=False,
        )


def row(script: Script, out: Path) -> Row:
    """Return what the files of a recording say."""
    made = Row(script.name, script.half, script.kind)
    results = out / "result.json"
    if not results.is_file():
        return msgspec.structs.replace(made, why="no report: " + _last_line(out.with_suffix(".log")))
    result = from_json(json.loads(results.read_text()))
    made = msgspec.structs.replace(
        made, step_ns=result.window.step_ns if result.window else None, found=tuple(o.id for o in result.found)
    )
    if not (out / tried.FILE).is_file():
        return msgspec.structs.replace(made, why="not tried: " + _last_line(out.with_suffix(".try.log")))
    found = tried.from_json(json.loads((out / tried.FILE).read_text()))
    return msgspec.structs.replace(made, changes=tuple(map(_change, found.attempts)), why=found.why)


def _change(a: tried.Attempt) -> Change:
    gain = a.measured
    measured, low, high = (gain.ratio, gain.low, gain.high) if gain else (None, None, None)
    return Change(a.words, a.findings, a.predicted, measured, low, high, a.verdict, a.why)


def again(script: Script, python: Path, out: Path, kept: Row) -> Row:
    """Return a row with what today's report of a recording names and predicts, and what was measured before."""
    with out.with_suffix(".log").open("w") as log:
        subprocess.run([python, "-m", "dlprof", "report", out], stdout=log, stderr=log, check=False)
    made = row(script, out)
    if not (out / "result.json").is_file():
        return made
    result = from_json(json.loads((out / "result.json").read_text()))
    named = plan(result, open_run(out).ranks[0].facts, obvious=False, allow_numerics=True).candidates
    measured = {_key(c.settings): c for c in kept.changes}
    changes = []
    for one in named:
        words = Attempt(one.settings, "not_tried").words
        old = measured.pop(_key(words), Change(words, (), None, None, None, None, "not_tried", "not named before"))
        changes.append(msgspec.structs.replace(old, findings=one.findings, predicted=one.predicted))
    changes += [msgspec.structs.replace(c, findings=(), predicted=None) for c in measured.values()]
    return msgspec.structs.replace(made, changes=tuple(changes), why=kept.why)


def _key(words: str) -> frozenset[str]:
    return frozenset(words.split(", "))


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n") if log.is_file() else []
    return next((line for line in reversed(lines) if line.strip()), "nothing was printed")


def summary(rows: Iterable[Row]) -> dict[str, Any]:
    """Return the figures that the advice is judged by."""
    rows = list(rows)
    named = [c for r in rows for c in r.changes if c.findings]
    signs = [c.sign_is_right for c in named if c.sign_is_right is not None]
    errors = sorted(abs(c.error) for c in named if c.error is not None)
    levers = [r.is_named for r in rows if r.is_named is not None]
    return {
        "scripts": len(rows),
        "tried": sum(bool(r.changes) for r in rows),
        "named": len(named),
        "signs": len(signs),
        "signs_right": sum(signs),
        "predicted": len(errors),
        "median_error": statistics.median(errors) if errors else None,
        "ninth_tenth_error": errors[max(math.ceil(0.9 * len(errors)) - 1, 0)] if errors else None,
        "levers": len(levers),
        "levers_named": sum(levers),
    }


def render(rows: Iterable[Row]) -> str:
    """Return the page: a table of the figures by half, and a table of each change."""
    rows = list(rows)
    lines = [
        "| | scripts tried | changes named | sign right | predicted step off by: median | nine of ten |"
        " largest gain named |",
        "|---|---|---|---|---|---|---|",
    ]
    for label, chosen in (
        ("tuned on", [r for r in rows if r.half == "tuned"]),
        ("only reported", [r for r in rows if r.half == "held_out"]),
        ("all", rows),
    ):
        s = summary(chosen)
        lines.append(
            f"| {label} | {s['tried']} of {s['scripts']} | {s['named']} | {s['signs_right']} of {s['signs']} |"
            f" {_percent(s['median_error'])} | {_percent(s['ninth_tenth_error'])} |"
            f" {s['levers_named']} of {s['levers']} |"
        )
    lines += ["", "| script | change | named by | predicted | measured | |", "|---|---|---|---|---|---|"]
    for r in rows:
        title = f"**{r.name}** ({'tuned on' if r.half == 'tuned' else 'only reported'}): {r.kind}"
        lines.append(f"| {title} | {r.why or ''} | {', '.join(r.found) or 'nothing found'} | | | |")
        for c in sorted(r.changes, key=lambda c: (not c.findings, -(c.measured or 0.0))):
            missed = " **missed**" if c is r.largest and not r.is_named else ""
            lines.append(
                f"| | `{c.settings}` | {', '.join(c.findings)} | {_times(c.predicted)} | {_measured(c)} |"
                f" {c.verdict.replace('_', ' ')}{missed}{f': {c.why}' if c.why else ''} |"
            )
    return "\n".join(lines) + "\n"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f} %"


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f} ×"


def _measured(c: Change) -> str:
    interval = "" if c.low is None or c.high is None else f" ({c.low:.2f} to {c.high:.2f})"
    return _times(c.measured) + interval


def load(kept: Path) -> list[Row]:
    """Return the rows that earlier rounds left in a folder, in the order of field.toml."""
    rows = {p.stem: msgspec.json.decode(p.read_bytes(), type=Row) for p in kept.glob("*.json")}
    return [rows[s.name] for s in scripts() if s.name in rows]


def page(kept: Path) -> str:
    """Return docs/field.md."""
    rows = load(kept)
    return f"{_HEAD}{len(rows)} of the {len(scripts())} scripts of the list have been run so far.\n\n{render(rows)}"


@click.command()
@click.argument("field", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--python", type=click.Path(path_type=Path), default=Path(sys.executable), help="With the scripts' needs."
)
@click.option("--only", multiple=True, help="The names of scripts.")
@click.option("--seconds", default=30.0, show_default=True, help="How long each is recorded.")
@click.option("--minutes", default=4.0, show_default=True, help="How long changes of each are tried.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("runs/field"), show_default=True)
@click.option("--again", "rejudge", is_flag=True, help="Measure nothing: report what --out holds again.")
def main(
    field: Path, python: Path, only: tuple[str, ...], seconds: float, minutes: float, out: Path, rejudge: bool
) -> None:
    """Record and try each script of benchmarks/field.toml whose checkout is in FIELD; write docs/field.md."""
    out, python, field = out.absolute(), python.absolute(), field.absolute()
    out.mkdir(parents=True, exist_ok=True)
    ROWS.mkdir(parents=True, exist_ok=True)
    for script in scripts(only):
        if not (field / script.folder).is_dir():
            print(f"{script.name}: no {field / script.folder}", flush=True)
            continue
        if rejudge:
            before = [r for r in load(ROWS) if r.name == script.name]
            if not before:
                continue
            made = again(script, python, out / script.name, before[0])
        else:
            record(script, field, python, out / script.name, seconds)
            try_(script, field, python, out / script.name, minutes)
            made = row(script, out / script.name)
        ROWS.joinpath(f"{script.name}.json").write_bytes(msgspec.json.format(msgspec.json.encode(made), indent=1))
        print(render([made]), flush=True)
    PAGE.write_text(page(ROWS))


if __name__ == "__main__":
    main()
