"""Keyword arguments are set in a call's own layout, in files that are as recorded; else the reason is told."""

from __future__ import annotations

import ast
import hashlib
import os
import subprocess
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from textwrap import dedent, indent
from typing import Any

import pytest

from dlprof.analysis.source.patches import (
    Call,
    NotEditable,
    Span,
    Wanted,
    calls_of,
    edit_of,
    edited,
    kind_of,
    patch,
    sites,
    wanted_of,
)
from tests.fixtures.edits import apply

IMPORT = "from torch.utils.data import DataLoader\n"


def span_of(source: bytes, nth: int = 0) -> Span:
    """Return where the nth call that is an argument of nothing stands: `x = …` or `…` alone."""
    outer = [
        node.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, (ast.Assign, ast.Expr)) and isinstance(node.value, ast.Call)
    ]
    return Span.of(outer[nth])


def done(text: str, kind: str = "loader", columns: bool = True, **settings: Any) -> str:
    """Return a source whose first call has these settings."""
    source = dedent(text).encode()
    span = span_of(source)
    return edited(source, span if columns else Span(span.line), kind, settings or {"num_workers": 4}).decode()


# Before and after num_workers=4 is set.
LAYOUTS = [
    ("x = DataLoader(data)", "x = DataLoader(data, num_workers=4)"),
    ("x = DataLoader(data,)", "x = DataLoader(data, num_workers=4,)"),
    ("x = DataLoader(data, num_workers = 0, shuffle=True)", "x = DataLoader(data, num_workers = 4, shuffle=True)"),
    ("x = DataLoader()", "x = DataLoader(num_workers=4)"),
    ("x = DataLoader((data) )  # ü", "x = DataLoader((data), num_workers=4 )  # ü"),
    ("x = DataLoader(f(')', b'#'), shuffle=(True))", "x = DataLoader(f(')', b'#'), shuffle=(True), num_workers=4)"),
    ("'ü'; x = DataLoader('ü')", "'ü'; x = DataLoader('ü', num_workers=4)"),
    ("x = DataLoader(\n    data,\n)", "x = DataLoader(\n    data,\n    num_workers=4,\n)"),
    ("x = DataLoader(\n\tdata\n)", "x = DataLoader(\n\tdata,\n\tnum_workers=4\n)"),
    ("x = DataLoader(\n    d,  # not\n    # )\n)", "x = DataLoader(\n    d,  # not\n    num_workers=4,\n    # )\n)"),
    ("x = DataLoader(\n    data  # why\n)", "x = DataLoader(\n    data,  # why\n    num_workers=4\n)"),
    ("x = DataLoader(d,\n               s=True)", "x = DataLoader(d,\n               s=True, num_workers=4)"),
    ("x = DataLoader(data, shuffle=True\n)", "x = DataLoader(data, shuffle=True, num_workers=4\n)"),
    ("x = DataLoader(\r\n    data,\r\n)\r\n", "x = DataLoader(\r\n    data,\r\n    num_workers=4,\r\n)\r\n"),
    (
        "x = DataLoader(\n    f(\n        1,\n    ),\n)",
        "x = DataLoader(\n    f(\n        1,\n    ),\n    num_workers=4,\n)",
    ),
]


@pytest.mark.parametrize(("before", "after"), LAYOUTS)
def test_an_argument_is_set_and_all_else_stays(before: str, after: str) -> None:
    for columns in (True, False):  # the call's place is known, or its line alone
        assert done(IMPORT + before, columns=columns) == IMPORT + after


DDP, ADAM, COMPILE = "DistributedDataParallel(m", "torch.optim.AdamW(p, 0.1", "torch.compile(m, mode="
MANY: dict[str, Any] = {"num_workers": 2, "pin_memory": True, "multiprocessing_context": "forkserver"}


@pytest.mark.parametrize(
    ("before", "kind", "settings", "after"),
    [
        # Another name of the class is followed.
        ("from torch.utils.data import DataLoader as DL\nx = DL(d)", "loader", {}, "\nx = DL(d, num_workers=4)"),
        ("import torch.utils.data as tud\nx = tud.DataLoader(d)", "loader", {}, "tud.DataLoader(d, num_workers=4)"),
        ("L = torch.utils.data.DataLoader\nx = L(data)", "loader", {}, "\nx = L(data, num_workers=4)"),
        (f"{DDP})", "ddp", {"bucket_cap_mb": 25.0}, f"{DDP}, bucket_cap_mb=25)"),
        (f"{ADAM})", "optimizer", {"fused": True}, f"{ADAM}, fused=True)"),
        (f"{COMPILE}'default')", "compile", {"mode": "reduce-overhead"}, f"{COMPILE}'reduce-overhead')"),
        ("x = b.to(device)", "copy", {"non_blocking": True}, "x = b.to(device, non_blocking=True)"),
        (
            'x = DataLoader(\n    data,\n    pin_memory=False,\n    f=None,\n)\ny = "a", "b"\n',
            "loader",
            MANY,
            "x = DataLoader(\n    data,\n    pin_memory=True,\n    f=None,\n    num_workers=2,\n"
            '    multiprocessing_context="forkserver",\n)\ny = "a", "b"\n',
        ),
    ],
)
def test_names_of_calls_and_kinds_of_values(before: str, kind: str, settings: dict[str, Any], after: str) -> None:
    assert done(before, kind, **settings).endswith(after)


@pytest.mark.parametrize(
    ("torch", "given", "made"),
    [
        ("2.12.1", "m", "(m, broadcast_buffers=False)"),
        ("2.13.0+cpu", "m", "(m, forward_sync_buffers=False)"),
        # Both at once make torch warn, and ignore the older one.
        ("2.13.0+cpu", "m, broadcast_buffers=True", ""),
        ("2.12.1", "m, broadcast_buffers=True", "(m, broadcast_buffers=False)"),
    ],
)
def test_ddps_buffers_are_set_by_the_name_that_the_jobs_torch_has(
    torch: str, given: str, made: str, tmp_path: Path
) -> None:
    text = f"model = DistributedDataParallel({given})\n"
    (tmp_path / "train.py").write_text(text)
    row = {"kind": "ddp", "file": "train.py", "line": 1, "digest": hashlib.sha256(text.encode()).hexdigest()}
    told = {"directory": str(tmp_path), "files": [row], "calls": [row], "versions": {"torch": torch}}
    edit = edit_of([told], {"ddp.broadcast_buffers": False})
    assert edit.endswith(f"+model = DistributedDataParallel{made}\n") if made else edit == ""


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("x = DataLoader(data, num_workers=args.workers)", "num_workers is `args.workers` there"),
        ("x = DataLoader(data, num_workers=4)", "num_workers is 4 there already"),
        ("x = DataLoader(data, **options)", "num_workers may be among the arguments that `*` or `**` passes there"),
        ("x = DataLoader(*given)", "num_workers may be among the arguments that `*` or `**` passes there"),
        ("x = DataLoader(d, 4, True, None, None, 2)", "num_workers may be one of the positional arguments there"),
        ("x = list(map(DataLoader, sets))", "there is no such call on that line"),
        ("x = loader_class(data)", "there is no such call on that line"),
        ("x = DataLoader(n for n in data)", "the call is written in a way that is not edited"),
    ],
)
def test_what_is_not_certain_is_left_alone(text: str, why: str) -> None:
    with pytest.raises(NotEditable) as reason:
        done(text)
    assert str(reason.value) == why


def test_two_calls_in_one_line_are_told_apart_by_their_columns_alone() -> None:
    text = "a = DataLoader(x); b = DataLoader(y)\n"
    second = edited(text.encode(), span_of(text.encode(), 1), "loader", {"num_workers": 4})
    assert second == b"a = DataLoader(x); b = DataLoader(y, num_workers=4)\n"
    with pytest.raises(NotEditable, match="several such calls"):
        edited(text.encode(), Span(1), "loader", {"num_workers": 4})


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (b"x = DataLoader(data\n", "parsed"),
        (b"\0\x80\xff" * 99, "UTF-8"),
        (b"x = DataLoader(data)\0", "parsed"),
        ("# coding: latin-1\nx = 'ü'; DataLoader(data)\n".encode("latin-1"), "UTF-8"),
        ("\ufeffx = DataLoader(data)\n".encode(), "UTF-8"),
        (b"a = 1\rx = DataLoader(data)\r", "carriage returns"),
        (b"(" * 5000 + b")" * 5000, "parsed"),
        (b"", "no such call"),
    ],
)
def test_a_hostile_file_is_left_alone(source: bytes, why: str) -> None:
    with pytest.raises(NotEditable, match=why):
        edited(source, Span(1, 1, 4, 20), "loader", {"num_workers": 4})


# -- what an edit makes of a script runs: each returns an object that has the setting then

LOADED: dict[str, Any] = {"drop_last": True}
PERSISTENT: dict[str, Any] = {"num_workers": 1, "persistent_workers": True}
FUSED_ADAM: dict[str, Any] = {"fused": True}
WITHOUT: dict[str, Any] = {"num_workers": 0}
PLACES = [
    ("return DataLoader(data)", "loader", LOADED),
    ("return [DataLoader(d) for d in [data]][0]", "loader", LOADED),
    ("def make(d, of=DataLoader(data)): return of\nreturn make(1)", "loader", LOADED),
    ("class Job:\n    loader = DataLoader(data, 2)\nreturn Job.loader", "loader", PERSISTENT),
    ("loader = DataLoader(data, \\\n    batch_size=2)\nreturn loader", "loader", LOADED),
    ("return DataLoader(\n    data,\n    batch_size=2,  # (\n)", "loader", LOADED),
    ("return DataLoader(data,\n                  shuffle=(True if len(data) else\n  False))", "loader", LOADED),
    ("return (loader := DataLoader(data))", "loader", LOADED),
    ("return DataLoader(data, num_workers=1, prefetch_factor=3)", "loader", {"persistent_workers": True}),
    ("return DataLoader(data, num_workers=1, prefetch_factor=2)", "loader", WITHOUT),
    ("return DataLoader(data, num_workers=1, persistent_workers=True, timeout=9)", "loader", WITHOUT),
    ("return DataLoader(data, num_workers=1, multiprocessing_context='fork')", "loader", WITHOUT),
    ("return Adam(net.parameters(), lr=0.1)", "optimizer", FUSED_ADAM),
    ("return Adam([{'params': p} for p in net.parameters()], foreach=False)", "optimizer", FUSED_ADAM),
    ("return Adam(\n    (p for p in net.parameters())\n)", "optimizer", FUSED_ADAM),
]
REFUSED = [
    ("return DataLoader(data)", {"persistent_workers": True}, "persistent_workers needs num_workers above 0"),
    ("return DataLoader(data, num_workers=0)", {"prefetch_factor": 2}, "prefetch_factor needs num_workers above 0"),
    (
        "n = 2\nreturn DataLoader(data, num_workers=1, prefetch_factor=n)",
        WITHOUT,
        "num_workers cannot be set beside pre",
    ),
    ("is_so = True\nreturn DataLoader(data, num_workers=1, persistent_workers=is_so)", WITHOUT, "beside persistent_wo"),
    ("return DataLoader(data, batch_sampler=[[0], [1]])", LOADED, "drop_last cannot be set beside batch_sampler"),
    ("return Adam(net.parameters(), foreach=True)", FUSED_ADAM, "fused cannot be set beside foreach"),
    ("return Adam(net.parameters(), differentiable=True)", FUSED_ADAM, "fused cannot be set beside differentiable"),
    (
        "return torch.compile(net, options={'max_autotune': True})",
        {"mode": "default"},
        "mode cannot be set beside opti",
    ),
]
TORCH = """import torch
from torch.optim import Adam
from torch.utils.data import DataLoader
net, data = torch.nn.Linear(4, 2), torch.randn(8, 4)
def main():
"""


def kind_in(text: str) -> tuple[str, Span]:
    """Return the kind of the call that a script makes, and where it stands."""
    kinds = {"DataLoader": "loader", "Adam": "optimizer", "torch.compile": "compile"}
    nodes = (n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Call) and ast.unparse(n.func) in kinds)
    node = next(nodes)
    return kinds[ast.unparse(node.func)], Span.of(node)


def returned(source: bytes) -> Any:
    """Run a script, and return what it makes, used once."""
    space: dict[str, Any] = {}
    exec(compile(source, "train.py", "exec"), space)
    made = space["main"]()
    if hasattr(made, "step"):
        space["net"](space["data"]).sum().backward()
        made.step()
    elif hasattr(made, "num_workers"):
        assert iter(made) is not None
    return made


@pytest.mark.parametrize(("text", "kind", "settings"), PLACES)
def test_an_edit_runs_wherever_the_call_stands(text: str, kind: str, settings: dict[str, Any]) -> None:
    pytest.importorskip("torch")
    source = TORCH + indent(text, "    ")
    found, span = kind_in(source)
    made = returned(edited(source.encode(), span, found, settings))
    of = made.param_groups[0] if kind == "optimizer" else vars(made)
    assert {name: of[name] for name in settings} == settings


@pytest.mark.parametrize(("text", "settings", "why"), REFUSED)
def test_what_the_call_would_refuse_is_no_edit(text: str, settings: dict[str, Any], why: str) -> None:
    """Without the check the script fails."""
    pytest.importorskip("torch")
    source = TORCH + indent(text, "    ")
    kind, span = kind_in(source)
    with pytest.raises(NotEditable, match=why):
        edited(source.encode(), span, kind, settings)
    ((name, value),) = settings.items()
    with pytest.raises((ValueError, RuntimeError, AssertionError)):
        returned(f"{source[:-1]}, **{{{name!r}: {value!r}}})".replace("num_workers=1, ", "").encode())


# -- patches of several calls and files

SCRIPT = """\
from torch import optim
from torch.utils.data import DataLoader

def main(data, model):
    train = DataLoader(
        data,
        batch_size=4,
    )
    a = optim.AdamW(model.a.parameters(), 1e-3)
    b = optim.AdamW(model.b.parameters(), 1e-3, fused=False)
"""
WORKERS = Wanted("loader", {"num_workers": 4})
FUSED = Wanted("optimizer", {"fused": True})


def calls(folder: Path, name: str = "train.py", text: str = SCRIPT) -> list[Call]:
    """Write a script, and return its calls of loaders and optimizers as they would have been recorded."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode())
    digest = hashlib.sha256(text.encode()).hexdigest()
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            call = node.value
            kind = "loader" if "DataLoader" in ast.unparse(call.func) else "optimizer"
            roles = ("train",) if kind == "loader" else ()
            found.append(
                Call(kind, name, call.lineno, digest=digest, roles=roles, span=Span.of(call), directory=str(folder))
            )
    return found


def whys(calls: Iterable[Call], *asked: Wanted) -> list[str]:
    """Return why calls could not be edited."""
    made = patch([*calls], asked)
    assert made.text == ""
    return [why for _, _, why in made.left_out]


def test_git_applies_the_edits_of_several_calls(tmp_path: Path) -> None:
    made = patch(calls(tmp_path), [WORKERS, FUSED, Wanted("loader", {"num_workers": 9, "pin_memory": True})])
    assert made.left_out == ()
    apply(tmp_path, made.text)
    edited = SCRIPT.replace("batch_size=4,\n", "batch_size=4,\n        num_workers=4,\n        pin_memory=True,\n")
    edited = edited.replace("model.a.parameters(), 1e-3)", "model.a.parameters(), 1e-3, fused=True)")
    assert (tmp_path / "train.py").read_text() == edited.replace("fused=False", "fused=True")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("train.py", SCRIPT.replace("\n", "\r\n")),
        ("sub folder/trän.py", SCRIPT.replace("    ", "\t")),
        ("train.py", SCRIPT.rstrip("\n")),
        ("sub folder/trän.py", "'ü→'\n" + SCRIPT),
    ],
    ids=["carriage returns", "tabs", "no last newline", "not ASCII"],
)
def test_git_applies_it_to_files_of_all_kinds_below_the_root_of_a_repository(
    tmp_path: Path, name: str, text: str
) -> None:
    subprocess.run(["git", "init", "-q", "."], cwd=tmp_path, check=True, capture_output=True)
    folder = tmp_path / "examples"
    apply(folder, patch(calls(folder, name, text), [FUSED]).text, init=False)
    expected = text.replace("a.parameters(), 1e-3)", "a.parameters(), 1e-3, fused=True)")
    assert (folder / name).read_bytes().decode() == expected.replace("fused=False", "fused=True")


def test_a_file_that_is_not_as_it_was_recorded_is_left_alone(tmp_path: Path) -> None:
    known = calls(tmp_path)[:1]
    (tmp_path / "train.py").write_text(SCRIPT + "\n")
    assert whys(known, WORKERS) == ["the file has changed since it was recorded"]
    for make in (lambda _: None, os.mkfifo, os.mkdir):  # none, one that nobody writes into, a folder
        (tmp_path / "train.py").unlink(missing_ok=True)
        make(tmp_path / "train.py")
        assert whys(known, WORKERS) == ["the file is not here"]
    assert whys([replace(known[0], digest="")], WORKERS) == ["what the file held was not recorded"]
    assert whys([replace(known[0], via="fit (fancy/trainer.py:3)")], WORKERS) == [
        "fit (fancy/trainer.py:3) makes the call"
    ]


@pytest.mark.parametrize("name", ["/etc/passwd", "../train.py", "a/../../b.py", 'a"b.py', "a\nb.py", "a\\b.py"])
def test_a_name_that_leads_elsewhere_is_in_no_patch(tmp_path: Path, name: str) -> None:
    known = calls(tmp_path)[0]
    (why,) = whys([replace(known, file=name)], WORKERS)
    assert why in ("the file is not below the folder that the job was started in", "a patch cannot name the file")


def test_which_call_takes_a_setting() -> None:
    train, held = Call("loader", "a.py", 1, roles=("train",)), Call("loader", "a.py", 2, roles=("validation",))
    through = Call("loader", "a.py", 3, roles=("train",), via="prepare (accelerate/accelerator.py:9)")
    assert sites([through, held, train], WORKERS) == [train]
    assert sites([held, train], Wanted("loader", {}, role="validation")) == [held]
    assert sites([held, Call("loader", "a.py", 4)], WORKERS) == [Call("loader", "a.py", 4)]
    assert sites([held], WORKERS) == []
    two = [Call("optimizer", "a.py", 5), Call("optimizer", "a.py", 6)]
    assert sites(two, FUSED) == two
    set_twice = [Call("threads", "a.py", 5), Call("threads", "a.py", 6)]
    assert sites(set_twice, Wanted("threads", {"num_threads": 2})) == set_twice[1:]
    assert whys([held], WORKERS) == ["no call that takes it was recorded (loader)"]


def test_the_number_of_threads_is_edited() -> None:
    source = b"import torch\ntorch.set_num_threads(1)\n"
    assert edited(source, span_of(source), "threads", {"num_threads": 2}) == source.replace(b"1", b"2")


def test_the_kind_of_call_of_each_setting() -> None:
    names = "num_workers drop_last bucket_cap_mb fused mode non_blocking OMP_NUM_THREADS num_threads lr"
    kinds = ["loader", "loader", "ddp", "optimizer", "compile", "copy", "", "threads", ""]
    assert [kind_of(name) for name in names.split()] == kinds
    overrides = {"loader.num_workers": 2, "loader.pin_memory": True, "optimizer.fused": True}
    assert [*wanted_of(overrides)] == [Wanted("loader", {"num_workers": 2, "pin_memory": True}), FUSED]


def test_calls_of_ranks_are_taken_once_and_what_is_no_call_is_not() -> None:
    row = {"kind": "loader", "file": "a.py", "line": 3, "column": 4, "end_line": 5, "end_column": 6, "roles": ["train"]}
    told = {"calls": [row, {"kind": "loader"}, 7, {**row, "file": None}], "directory": "/x/"}
    (call,) = calls_of([told, told, {}, {"calls": None}])
    assert call == Call("loader", "a.py", 3, roles=("train",), span=Span(3, 5, 4, 6), directory="/x/")
    (by_line,) = calls_of([{"calls": [{"kind": "loader", "file": "a.py", "line": 3}]}])
    assert by_line.span == Span(3)


def test_overrides_are_an_edit_where_each_of_them_is_one(tmp_path: Path) -> None:
    loader = calls(tmp_path)[0]
    span = loader.span
    row = {"kind": "loader", "file": "train.py", "line": span.line, "end_line": span.end_line, "column": span.column}
    row |= {"end_column": span.end_column, "digest": loader.digest, "roles": ["train"]}
    told = {"calls": [row], "directory": str(tmp_path)}
    apply(tmp_path, edit_of([told], {"loader.num_workers": 4, "loader.persistent_workers": True}))
    after = SCRIPT.replace("_size=4,\n", "_size=4,\n        num_workers=4,\n        persistent_workers=True,\n")
    assert (tmp_path / "train.py").read_text() == after
    (tmp_path / "train.py").write_text(SCRIPT)
    assert edit_of([told], {"loader.num_workers": 4, "env.OMP_NUM_THREADS": "1"}) == ""


def test_a_report_shows_the_edit_without_the_text_around_it(tmp_path: Path) -> None:
    secret = SCRIPT.replace("    a = optim", "    login('hunter2')  # hunter2\n    a = optim")
    made = patch(calls(tmp_path, text=secret), [WORKERS])
    assert "login('hunter2')  # hunter2" in made.text
    assert "+        num_workers=4," in made.shown
    assert "login('…')" in made.shown
    assert "hunter2" not in made.shown
    told = calls(tmp_path, text=secret)[0]
    row = {"kind": "loader", "file": told.file, "line": told.line, "digest": told.digest, "roles": ["train"]}
    assert "hunter2" not in edit_of([{"calls": [row], "directory": str(tmp_path)}], {"loader.num_workers": 4})
