"""Edits of code that cure an idiom: what becomes of a line, what is refused, and that nothing else changes."""

from __future__ import annotations

import ast
import sys
from typing import Any

import pytest

from dlprof.analysis.idioms import BY_NAME
from dlprof.analysis.rules import RULES
from dlprof.analysis.source.edits import NotEditable
from dlprof.analysis.source.rewrites import KEPT, REWRITES
from dlprof.analysis.source.rewriting import rewritten
from dlprof.analysis.source.where import EDITED

HEAD = "import gc\nimport numpy as np\nimport torch\nfrom torch import tensor\n"
AVERAGE = """
def average(ema, model, decay):
    for old, new in zip(ema.parameters(), model.parameters()):
        {}  # slowly
"""
AVERAGED = """
def average(ema, model, decay):
    with torch.no_grad():
        torch._foreach_lerp_([*ema.parameters()], [*model.parameters()], 1 - decay)  # slowly
"""
TWICE = """
def average(ema, model, decay):
    with torch.no_grad():
        torch._foreach_mul_([*ema.parameters()], decay)
        torch._foreach_add_([*ema.parameters()], [*model.parameters()], alpha=rate)  # slowly
"""


def after(code: str, mark: str, name: str, head: str = HEAD) -> str:
    """Return the code in which the edit of the line with a mark has been made."""
    source = head + code
    line = source[: source.index(mark)].count("\n") + 1
    text = source.encode()
    for change in rewritten(text, "train.py", line, name):
        text = text[: change.begin] + change.new + text[change.end :]
    made = text.decode()
    ast.parse(made)
    assert made.startswith(head)
    return made.removeprefix(head)


@pytest.mark.parametrize(
    ("name", "code", "expected"),
    [
        ("anomaly_mode", "torch.autograd.set_detect_anomaly(True)", "torch.autograd.set_detect_anomaly(False)"),
        ("anomaly_mode", "with torch.autograd.detect_anomaly():\n    f()", None),
        ("collected_by_hand", "if a:\n    gc.collect()  # each step", "if a:\n    pass  # each step"),
        ("collected_by_hand", "if a:\n\tgc.collect(0)", "if a:\n\tpass"),
        ("cache_emptied", "torch.cuda.empty_cache()", "pass"),
        ("dataframe_rows", "y = int(self.df.iloc[n]['label'])", "y = int(self.df['label'].iat[n])"),
        ("loader_counted", "n = sum(1 for _ in self.loader)", "n = len(self.loader)"),
        (
            "list_of_arrays",
            "x = torch.tensor([r.f for r in rows], dtype=torch.float32)",
            "x = torch.from_numpy(np.array([r.f for r in rows])).to(torch.float32)",
        ),
        ("list_of_arrays", "x = tensor(a, dtype=torch.int64)", "x = torch.from_numpy(np.array(a)).to(torch.int64)"),
        ("loader_counted", "n = len(list(loader))", "n = len(loader)"),
        (
            "validation_share",
            "def check():\n    for x in held:  # each\n        y = f(x)\n\n        all.append(y)\n    return y",
            "def check():\n    with torch.no_grad():\n        for x in held:  # each\n            y = f(x)\n\n"
            "            all.append(y)\n    return y",
        ),
        *(
            ("average_of_weights", AVERAGE.format(one), AVERAGED)
            for one in (
                "old.data.mul_(decay).add_(new.data, alpha=1 - decay)",
                "old.mul_(decay).add_((1 - decay) * new)",
                "old.data = decay * old.data + (1 - decay) * new.data",
            )
        ),
        ("average_of_weights", AVERAGE.format("old.data.mul_(decay).add_(new.data, alpha=rate)"), TWICE),
        (
            "average_of_weights",
            "for new, old in zip(net.parameters(), self.ema.parameters(), strict=True):\n    old.lerp_(new, 0.1)",
            "with torch.no_grad():\n    torch._foreach_lerp_([*self.ema.parameters()], [*net.parameters()], 0.1)",
        ),
    ],
)
def test_an_edit_changes_its_statement_alone(name: str, code: str, expected: str | None) -> None:
    mark = next((row for row in code.split("\n") if "for x" in row), "")
    mark = mark or code.strip().splitlines()[-1 if "old" in code or code.startswith("if") else 0]
    if expected is None:
        expected = code.replace("detect_anomaly()", "set_detect_anomaly(False)")
    assert after(code, mark, name) == expected


@pytest.mark.parametrize(
    "loop", ["old.data.mul_(decay).add_(new.data, alpha=1 - decay)", "old.mul_(decay).add_(new, alpha=rate)"]
)
def test_what_comes_after_an_edit_is_what_came_before(loop: str) -> None:
    torch = pytest.importorskip("torch", reason="the edited code is run")
    made = []
    code = AVERAGE.format(loop)
    for text in (code, after(code, "old", "average_of_weights")):
        space: dict[str, Any] = {"torch": torch, "rate": 0.1}
        exec(text, space)
        torch.manual_seed(0)
        one, other = torch.nn.Linear(5, 3), torch.nn.Linear(5, 3)
        with torch.no_grad():
            space["average"](one, other, 0.9)
        made.append([*one.parameters()])
    assert all(torch.allclose(a, b, rtol=1e-6) for a, b in zip(*made, strict=True))


@pytest.mark.parametrize(
    ("name", "code", "why"),
    [
        ("collected_by_hand", "freed = gc.collect()", "its value is used"),
        ("collected_by_hand", "x = 1; gc.collect()", "not alone in its line"),
        ("collected_by_hand", "f(x)", "no edit of code is known"),
        ("average_of_weights", AVERAGE.format("old.mul_(decay).add_(new + 1, beta=1)"), "no edit of code is known"),
        ("validation_share", "for x in train: f(x).backward()", "backward is called in it"),
        ("validation_share", "y = [f(x) for x in held]", "no loop begins in that line"),
        ("validation_share", "for x in held: y = '''a\nb'''", "is not edited"),  # a string would be another
        ("list_of_arrays", "x = torch.tensor(rows)", "no edit of code is known"),  # of a type that is not known
        ("list_of_arrays", "x = torch.tensor(rows, dtype=d, device=g)", "no edit of code is known"),
        ("loader_counted", "n = len(list(lines))", "no edit of code is known"),  # which may have no length
        ("dataframe_rows", "y = df.iloc[a:b]['label']", "no edit of code is known"),
        ("printed", "print(x)", "no edit of code is known"),
    ],
)
def test_what_is_not_written_so_is_left_as_it_is(name: str, code: str, why: str) -> None:
    with pytest.raises(NotEditable, match=why):
        after(code, code.strip().splitlines()[0 if "held" in code else -1], name)


def test_a_line_that_is_nested_too_deeply_is_left_as_it_is() -> None:
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)  # libraries may have raised it
    try:
        with pytest.raises(NotEditable, match=r"nested too deeply|cannot be parsed"):
            after(f"x = {'1 + ' * 3000}1; gc.collect()", "x =", "collected_by_hand")
    finally:
        sys.setrecursionlimit(limit)


def test_a_module_that_is_not_imported_is_not_named() -> None:
    with pytest.raises(NotEditable, match="numpy is not imported"):
        after("x = torch.tensor(a, dtype=d)", "x =", "list_of_arrays", "import torch\n")


KEEPS = """
class Data:
    def __init__(self):
        self.made = []

    def __getitem__(self, index):
        self.made.append(index)
        return index * 2
"""


def test_samples_are_kept_by_a_decorator() -> None:
    made = after(KEEPS, "self.made.append", KEPT, "import functools\n")
    assert made == KEEPS.replace("    def __getitem__", "    @functools.cache\n    def __getitem__")
    space: dict[str, Any] = {}
    head = "from __future__ import annotations\nimport gc\n"
    exec(after(head + KEEPS, "self.made.append", KEPT, ""), space)
    data = space["Data"]()
    assert [data[n] for n in (1, 2, 1)] == [2, 4, 2]
    assert data.made == [1, 2]


@pytest.mark.parametrize(
    ("code", "why"),
    [
        (KEEPS.replace("__getitem__", "get"), "in no __getitem__"),
        (KEEPS.replace("index):", "index, more=1):"), "other arguments"),
        (KEEPS.replace("    def __getitem__", "    @staticmethod\n    def __getitem__"), "it is decorated"),
    ],
)
def test_other_methods_are_not_decorated(code: str, why: str) -> None:
    with pytest.raises(NotEditable, match=why):
        after(code, "self.made.append", KEPT)


def test_every_edit_is_of_an_idiom_or_a_rule() -> None:
    of_findings = {KEPT, *(name for _, _, name in EDITED)}
    assert REWRITES.keys() <= BY_NAME.keys() | of_findings
    assert of_findings <= REWRITES.keys()
    assert {rule for rules, _, _ in EDITED for rule in rules.split()} <= {rule.id for rule in RULES}
