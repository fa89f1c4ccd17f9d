"""Keyword arguments are set in the call's own layout, and whatever is not certain is left alone, with the reason."""

from __future__ import annotations

import ast
from textwrap import dedent
from typing import Any

import pytest

from dlprof.analysis.source.patches import NotEditable, Span, edited

IMPORT = "from torch.utils.data import DataLoader\n"


def span_of(source: bytes, nth: int = 0) -> Span:
    """Return where the nth call that is an argument of nothing stands: `x = …` or `…` alone."""
    outer = [
        node.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, (ast.Assign, ast.Expr)) and isinstance(node.value, ast.Call)
    ]
    call = outer[nth]
    return Span(call.lineno, call.end_lineno or 0, call.col_offset, call.end_col_offset or 0)


def done(text: str, kind: str = "loader", columns: bool = True, **settings: Any) -> str:
    """Return a source whose first call has these settings."""
    source = dedent(text).encode()
    span = span_of(source)
    return edited(source, span if columns else Span(span.line), kind, settings or {"num_workers": 4}).decode()


@pytest.mark.parametrize("columns", [True, False], ids=["columns", "line alone"])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("x = DataLoader(data)", "x = DataLoader(data, num_workers=4)"),
        ("x = DataLoader(data,)", "x = DataLoader(data, num_workers=4,)"),
        ("x = DataLoader(data, num_workers = 0, shuffle=True)", "x = DataLoader(data, num_workers = 4, shuffle=True)"),
        ("x = DataLoader()", "x = DataLoader(num_workers=4)"),
        ("x = DataLoader((data) )  # ü", "x = DataLoader((data), num_workers=4 )  # ü"),
        ("x = DataLoader(f(')', b'#'), shuffle=(True))", "x = DataLoader(f(')', b'#'), shuffle=(True), num_workers=4)"),
        ("'ü'; x = DataLoader('ü')", "'ü'; x = DataLoader('ü', num_workers=4)"),
        ("x = DataLoader(\n    data,\n)", "x = DataLoader(\n    data,\n    num_workers=4,\n)"),
        ("x = DataLoader(\n\tdata\n)", "x = DataLoader(\n\tdata,\n\tnum_workers=4\n)"),
        (
            "x = DataLoader(\n    data,\n    shuffle=True,  # why, not\n    # )\n)",
            "x = DataLoader(\n    data,\n    shuffle=True,  # why, not\n    num_workers=4,\n    # )\n)",
        ),
        (
            "x = DataLoader(\n    data,\n    shuffle=True  # why\n)",
            "x = DataLoader(\n    data,\n    shuffle=True,  # why\n    num_workers=4\n)",
        ),
        (
            "x = DataLoader(data,\n               shuffle=True)",
            "x = DataLoader(data,\n               shuffle=True, num_workers=4)",
        ),
        ("x = DataLoader(data, shuffle=True\n)", "x = DataLoader(data, shuffle=True, num_workers=4\n)"),
        ("x = DataLoader(\r\n    data,\r\n)\r\n", "x = DataLoader(\r\n    data,\r\n    num_workers=4,\r\n)\r\n"),
        (
            "x = DataLoader(\n    f(\n        1,\n    ),\n)",
            "x = DataLoader(\n    f(\n        1,\n    ),\n    num_workers=4,\n)",
        ),
    ],
)
def test_an_argument_is_set_and_all_else_stays(before: str, after: str, columns: bool) -> None:
    assert done(IMPORT + before, columns=columns) == IMPORT + after


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("from torch.utils.data import DataLoader as DL\nx = DL(data)", "DL(data, num_workers=4)"),
        ("import torch.utils.data as tud\nx = tud.DataLoader(data)", "tud.DataLoader(data, num_workers=4)"),
        ("L = torch.utils.data.DataLoader\nx = L(data)", "L(data, num_workers=4)"),
    ],
)
def test_another_name_of_the_class_is_followed(before: str, after: str) -> None:
    assert done(before).endswith(after)


def test_several_settings_and_kinds_of_values() -> None:
    text = 'x = DataLoader(\n    data,\n    pin_memory=False,\n    worker_init_fn=None,\n)\ny = "a", "b"\n'
    settings: dict[str, Any] = {"num_workers": 2, "pin_memory": True, "multiprocessing_context": "forkserver"}
    assert done(text, **settings) == (
        "x = DataLoader(\n    data,\n    pin_memory=True,\n    worker_init_fn=None,\n    num_workers=2,\n"
        '    multiprocessing_context="forkserver",\n)\ny = "a", "b"\n'
    )
    assert (
        done("DistributedDataParallel(m)", "ddp", bucket_cap_mb=25.0) == "DistributedDataParallel(m, bucket_cap_mb=25)"
    )
    assert done("torch.optim.AdamW(p, 0.1)", "optimizer", fused=True) == "torch.optim.AdamW(p, 0.1, fused=True)"
    assert done("torch.compile(m, mode='default')", "compile", mode="reduce-overhead") == (
        "torch.compile(m, mode='reduce-overhead')"
    )
    assert done("x = b.to(device)", "copy", non_blocking=True) == "x = b.to(device, non_blocking=True)"


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
