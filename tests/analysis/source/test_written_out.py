"""Edits of what is written out over several statements: each gives what came before, and none takes what is needed."""

from __future__ import annotations

import math
from typing import Any

import pytest

from dlprof.analysis.source.edits import NotEditable
from dlprof.analysis.source.rewriting import rewritten

HEAD = """import math
import zipfile
import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
"""
MARK = "# here"


def after(code: str, name: str) -> str:
    """Return the code in which the edit of the line with the mark has been made."""
    source = HEAD + code
    text = source.encode()
    made = rewritten(text, "train.py", source[: source.index(MARK)].count("\n") + 1, name)
    assert [*made] == sorted(made, key=lambda one: one.begin)
    for change in reversed(made):
        text = text[: change.begin] + change.new + text[change.end :]
    return text.decode().removeprefix(HEAD)


def attention(scores: str, mask: str = "", weights: str = "", out: str = "weights @ v", head: str = "") -> str:
    """Return attention by hand, with what stands between its products."""
    lines = [
        f"scores = {scores}",
        *mask.splitlines(),
        "weights = F.softmax(scores, dim=-1)  # here",
        *weights.splitlines(),
    ]
    body = "\n        ".join([*lines, f"return {out}"])
    return f"""
class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.drop = 0.3, torch.nn.Dropout(0.0)
        self.register_buffer("bias", torch.tril(torch.ones(6, 6)).view(1, 1, 6, 6){head})

    def forward(self, q, k, v, mask):
        T, d = q.shape[-2:]
        {body}


made = Attention()(q, k, v, mask)
"""


SCORES = "q @ k.transpose(-2, -1) / math.sqrt(d)"
# Name of the edit, code that leaves what it makes in `made`, and what the edited code has and the other has not.
RUN = {
    "plain": (
        "unfused_attention",
        attention(SCORES),
        "F.scaled_dot_product_attention(q, k, v, scale=1 / math.sqrt(d))",
    ),
    "einsum": (
        "unfused_attention",
        attention(
            "torch.einsum('bhqd,bhkd->bhqk', q, k) * self.scale", "", "", "torch.einsum('bhqk,bhkd->bhqd', weights, v)"
        ),
        "F.scaled_dot_product_attention(q, k, v, scale=self.scale)",
    ),
    "scaled before": (
        "unfused_attention",
        attention("torch.matmul(q * d ** -0.5, k.mT)", out="torch.matmul(weights, v)"),
        "F.scaled_dot_product_attention(q, k, v, scale=d ** (-0.5))",
    ),
    "buffer": (
        "unfused_attention",
        attention(SCORES, "scores = scores.masked_fill(self.bias[:, :, :T, :T] == 0, float('-inf'))"),
        "is_causal=True",
    ),
    "triangle": (
        "unfused_attention",
        attention(
            SCORES,
            "later = torch.ones(T, T, dtype=torch.bool).triu(1)\nscores = torch.masked_fill(scores, later, -1e9)",
        ),
        "is_causal=True",
    ),
    "perhaps a mask": (
        "unfused_attention",
        attention(SCORES, "if mask is not None:\n            scores = scores.masked_fill(mask == 0, -1e9)"),
        "attn_mask=None if mask is None else mask != 0",
    ),
    "a mask that is causal": (
        "masked_attention",
        "keep = torch.tril(torch.ones(6, 6)).bool()\n"
        "made = F.scaled_dot_product_attention(q, k, v, attn_mask=keep, dropout_p=0.0)  # here\n",
        "F.scaled_dot_product_attention(q, k, v, is_causal=True)",
    ),
    "dropout": (
        "unfused_attention",
        attention(SCORES, "scores = scores + mask.log()", "weights = self.drop(weights)"),
        "attn_mask=mask.log(), dropout_p=self.drop.p if self.drop.training else 0.0",
    ),
    "layer norm": (
        "unfused_norm",
        """
def norm(x):
    u = x.mean(-1, keepdim=True)
    s = (x - u).pow(2).mean(-1, keepdim=True)
    x = (x - u) / torch.sqrt(s + 1e-6)  # here
    return w * x + b
made = norm(q)
""",
        "F.layer_norm(x, w.shape, w, b, 1e-06)",
    ),
    "variance": (
        "unfused_norm",
        "made = (q - q.mean(-1, True)) / (q.var(-1, keepdim=True, unbiased=False) + 1e-5) ** 0.5  # here\n",
        "F.layer_norm(q, q.shape[-1:], eps=1e-05)",
    ),
    "rms norm": (
        "unfused_norm",
        """
def norm(x):
    dtype = x.dtype
    x = x.float()
    variance = x.pow(2).mean(-1, keepdim=True)  # here
    x = x * torch.rsqrt(variance + 1e-6)
    return w * x.to(dtype)
made = norm(q)
""",
        "F.rms_norm(x, w.shape, w, 1e-06)",
    ),
    "gelu": (
        "unfused_activation",
        "made = 0.5 * q * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (q + 0.044715 * torch.pow(q, 3.0))))  # here\n",
        "F.gelu(q, approximate='tanh')",
    ),
    "erf": (
        "unfused_activation",
        "half = 0.5 * (1.0 + torch.erf(q / math.sqrt(2.0)))  # here\nmade = q * half\n",
        "F.gelu(q)",
    ),
    "swish": ("unfused_activation", "made = q * torch.sigmoid(q)  # here\n", "F.silu(q)"),
    "loss": (
        "unfused_loss",
        "chances = F.softmax(z, dim=1)  # here\nlogs = torch.log(chances)\nmade = -logs.gather(1, t[:, None]).mean()\n",
        "F.cross_entropy(z, t)",
    ),
    "loss of rows": (
        "unfused_loss",
        "made = -F.log_softmax(z, -1)[torch.arange(len(t)), t].mean()  # here\n",
        "F.cross_entropy(z, t)",
    ),
    "one-hot rows": (
        "one_hot_input",
        "rows = F.one_hot(t, 5).float()  # here\nmade = rows @ w[:5, None]\n",
        "F.embedding(t, w[:5, None])",
    ),
    "one-hot rows of a layer": (
        "one_hot_input",
        "layer = torch.nn.Linear(5, 3)\nmade = layer(F.one_hot(t, 5).float())  # here\n",
        "F.embedding(t, layer.weight.t()) + (0 if layer.bias is None else layer.bias)",
    ),
    "pairs": (
        "pairs_expanded",
        "y = w[:5] * z[:3]\nmade = ((z[:, None] - y[None]) ** 2).sum(-1)  # here\n",
        "- 2 * z @",
    ),
    "expanded": (
        "pairs_expanded",
        """
def pairs(x, y):
    x = x.unsqueeze(2).expand(-1, 6, 6, 8)
    y = y.unsqueeze(1).expand(-1, 6, 6, 8)
    return torch.pow(x - y, 2).sum(3)  # here
made = pairs(q[0], k[0])
""",
        "- 2 * x @ y.mT",
    ),
    "determinant": ("log_determinant", "made = torch.logdet(q @ q.mT + 9 * torch.eye(6))  # here\n", "cholesky"),
    "ranks": (
        "all_sorted",
        "order = z.argsort(dim=1, descending=True)  # here\nmade = (order == t[:, None]).nonzero()[:, 1]\n",
        "z > z.gather(1, t[:, None])",
    ),
    "best": ("all_sorted", "made = z.argsort(1, descending=True)[:, :2]  # here\n", "z.topk(2, dim=1).indices"),
    "norm of gradients": (
        "gradients_checked",
        """
made = 0.0
for p in layer.parameters():
    if p.grad is not None:
        size = p.grad.data.norm(2)  # here
        made += size.item() ** 2
""",
        "get_total_norm(",
    ),
    "gradients cut off": (
        "gradients_checked",
        "for p in layer.parameters():\n    p.grad.data.clamp_(-0.1, 0.1)  # here\nmade = layer.weight.grad\n",
        "clip_grad_value_(layer.parameters(), 0.1)",
    ),
    "average of a state": (
        "average_of_weights",
        """
now = other.state_dict()
for name, kept in layer.state_dict().items():
    if kept.dtype.is_floating_point:
        kept *= 0.9  # here
        kept += 0.1 * now[name].detach()
made = layer.weight
""",
        "_foreach_add_",
    ),
    "a list": (
        "list_searched",
        "def f(known, x):\n    '''Text.'''\n    return [known.index(a) for a in x]  # here\nmade = f('abca', 'ca')\n",
        "known_places = {value: n for n, value in reversed([*enumerate(known)])}",
    ),
    "a table": (
        "table_searched",
        """
def split(table):
    for one in table["kind"].unique():
        yield table[table["kind"] == one]  # here
made = [part["x"].tolist() for part in split(frame)]
""",
        "dict([*table.groupby('kind')])",
    ),
    "rows of one value": (
        "array_scanned",
        """
class Data:
    def __init__(self, kinds):
        self.kinds = np.array(kinds)
    def rows(self, one):
        return np.where(self.kinds == one)[0]  # here
made = [Data([*"abcab"]).rows(one).tolist() for one in "ab"]
""",
        "self.kinds_rows[one]",
    ),
    "values of a table": (
        "dataframe_rows",
        """
class Data:
    def __init__(self, frame):
        self.frame = frame.copy()

    def __getitem__(self, n):
        other = self.frame.iloc[n, 1]
        return self.frame.iloc[n, 0], other  # here
made = Data(frame)[2]
""",
        "return self.frame_values[n, 0], other",
    ),
    "records": (
        "dataframe_rows",
        """
class Data:
    def __init__(self, frame):
        self.frame = frame

    def __getitem__(self, n):
        row = self.frame.iloc[n]  # here
        return row["x"], row["kind"]
made = Data(frame)[2]
""",
        "self.frame_records = self.frame.to_dict('records')",
    ),
    "an archive of arrays": (
        "npz_member",
        """
class Data:
    def __init__(self):
        self.arrays = np.load(path)
    def __getitem__(self, n):
        return self.arrays["x"][n]  # here
made = Data()[1]
""",
        "self.arrays = dict(self.arrays)",
    ),
    "an archive": (
        "zip_opened",
        """
def names(n):
    with zipfile.ZipFile(path) as archive:  # here
        found = archive.namelist()

        return found[n]
made = names(0), names(0)
""",
        "archive = open_zipfile(os.getpid(), path)",
    ),
    "a column": (
        "whole_column",
        "made = table['x'][1], table['y'][0]  # here\n",
        "table[1]['x'], table[0]['y']",
    ),
    "draws": (
        "drawn_with_weights",
        "g, p = np.random.default_rng(0), [0.1, 0.9]\nmade = np.array([g.choice(2, p=p) for _ in range(9)])  # here\n",
        "g.choice(2, size=9, p=p)",
    ),
}


@pytest.mark.parametrize("case", RUN)
def test_the_edited_code_makes_the_same(case: str, tmp_path: Any) -> None:
    torch, pandas = pytest.importorskip("torch", reason="the edited code is run"), pytest.importorskip("pandas")
    numpy = pytest.importorskip("numpy")
    name, code, has = RUN[case]
    edited = after(code, name)
    assert has in edited, edited
    assert has not in code

    class Table:
        def __getitem__(self, key: Any) -> Any:
            return {"x": [1, 2], "y": [3, 4]}[key] if isinstance(key, str) else {"x": key + 1, "y": key + 3}

    numpy.savez(tmp_path / "a.npz", x=numpy.arange(3))
    made = []
    for text in (code, edited):
        torch.manual_seed(0)
        layer, other = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)
        layer(torch.rand(2, 4)).sum().backward()
        space: dict[str, Any] = {
            **{name: torch.rand(2, 3, 6, 8) for name in "qkv"},
            "mask": torch.ones(6, 6).tril(1),
            "w": torch.rand(8),
            "b": torch.rand(8),
            "z": torch.rand(7, 5),
            "t": torch.arange(7) % 5,
            "frame": pandas.DataFrame({"x": [1.5, 2.5, 3.5], "kind": ["a", "b", "a"]}),
            "path": tmp_path / "a.npz",
            "layer": layer,
            "other": other,
            "table": Table(),
        }
        with torch.no_grad():
            exec(HEAD + text, space)
        made.append(space["made"])
    if isinstance(made[0], (torch.Tensor, numpy.ndarray, float)):
        torch.testing.assert_close(torch.as_tensor(made[1]), torch.as_tensor(made[0]), rtol=1e-4, atol=1e-5)
    else:
        assert made[1] == made[0]


@pytest.mark.parametrize(
    ("name", "code"),
    [
        # The weights are handed on, or were changed in place, or what they are made of is something else by then.
        ("unfused_attention", attention(SCORES, out="weights @ v, weights")),
        ("unfused_attention", attention(SCORES, weights="self.seen.append(weights)")),
        ("unfused_attention", attention(SCORES, "scores.mul_(2)")),
        ("unfused_attention", attention(SCORES, weights="k = k + 1")),
        ("unfused_attention", attention(SCORES, "scores = scores.clamp(-5, 5)")),
        ("unfused_attention", attention(SCORES, weights="weights = weights ** 2")),
        ("unfused_attention", attention(SCORES, "scores = scores.masked_fill(mask == 0, -1)")),
        ("unfused_attention", attention(SCORES).replace("dim=-1)  # here", "dim=1)  # here")),
        ("masked_attention", "made = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)  # here\n"),
        # Another norm, and a loss that is not the mean.
        ("unfused_norm", "made = (q - q.mean(-1, True)) / (q.std(-1, keepdim=True) + 1e-5)  # here\n"),
        ("unfused_norm", "made = (q - q.mean(-1, True)) / (q.var(-1, keepdim=True) + 1e-5) ** 0.5  # here\n"),
        ("unfused_loss", "made = -F.log_softmax(z, 1).gather(1, t[:, None]).sum()  # here\n"),
        (
            "unfused_loss",
            "made = -F.log_softmax(z, 1)[torch.arange(len(t)), u].mean() - z.mean()  # here\n".replace("-F", "F"),
        ),
        ("unfused_activation", "made = 0.5 * q * (1 + torch.tanh(q + 0.05 * q ** 3))  # here\n"),
        ("one_hot_input", "made = F.one_hot(t, 5) + w  # here\n"),
        ("pairs_expanded", "made = ((z[:, None] - w[None]) ** 2).sum(0)  # here\n"),
        # What is searched changes, is an argument that is searched once, or is not known.
        ("list_searched", "known = []\nknown.append(1)\nmade = [known.index(one) for one in x]  # here\n"),
        ("list_searched", "def f(known, one):\n    return known.index(one)  # here\n"),
        ("list_searched", "made = [f().index(one) for one in x]  # here\n"),
        (
            "table_searched",
            "def f(t, kinds):\n    for k in kinds:\n        t = g(t)\n        h(t[t['k'] == k])  # here\n",
        ),
        (
            "npz_member",
            "class A:\n  def __init__(self):\n    self.a = f()\n  def g(self):\n    return self.a['x'][0]  # here\n",
        ),
        ("zip_opened", "with zipfile.ZipFile(path, 'w') as archive:  # here\n    archive.write(x)\n"),
        ("zip_opened", "with zipfile.ZipFile(path, mode) as archive:  # here\n    archive.read(x)\n"),
        (
            "unfused_loss",
            "for z in rows:\n    f(logs)\n    logs = F.log_softmax(z, 1)  # here\n    F.nll_loss(logs, t)\n",
        ),
        ("zip_opened", "with zipfile.ZipFile(path) as archive, other:  # here\n    archive.read(x)\n"),
        ("growing_steps", "total += loss.item()  # here\n"),
        ("growing_steps", "count += 1  # here\n"),
    ],
)
def test_what_is_needed_or_is_something_else_stays(name: str, code: str) -> None:
    with pytest.raises(NotEditable):
        after(code, name)


def test_statements_of_attention_go_with_it() -> None:
    made = after(RUN["perhaps a mask"][1], "unfused_attention")
    assert "scores" not in made
    assert "weights" not in made
    assert "T, d = q.shape[-2:]" in made
    made = after(attention(SCORES, weights="y = weights @ v", out="y.transpose(1, 2)"), "unfused_attention")
    assert (
        "y = F.scaled_dot_product_attention(q, k, v, scale=1 / math.sqrt(d))\n        return y.transpose(1, 2)" in made
    )


@pytest.mark.parametrize(
    ("name", "code", "expected"),
    [
        ("growing_steps", "losses.append(loss)  # here\n", "losses.append(loss.detach())  # here\n"),
        ("growing_steps", "total = total + f(loss)  # here\n", "total = total + f(loss).detach()  # here\n"),
        ("denormals", "x = 1  # here\n", "torch.set_flush_denormal(True)\nx = 1  # here\n"),
        ("copied_storages", "clip = frames[a:b]  # here\n", "clip = frames[a:b].clone()  # here\n"),
        (
            "rows_of_tensors",
            "loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True, pin_memory=True)  # here\n",
            "loader = torch.utils.data.DataLoader(data, sampler=torch.utils.data.BatchSampler("
            "torch.utils.data.RandomSampler(data), 8, False), batch_size=None, pin_memory=True)  # here\n",
        ),
    ],
)
def test_an_edit_is_as_a_user_would_write_it(name: str, code: str, expected: str) -> None:
    assert after(code, name) == expected


ROWS = """
class Table(Dataset):
    def __getitem__(self, {index}):
        {body}
loader = torch.utils.data.DataLoader(data, batch_size=8, sampler=order, drop_last=True)  # here
"""
LOADER = "DataLoader(data, sampler=torch.utils.data.BatchSampler(order, 8, True), batch_size=None)"


@pytest.mark.parametrize(
    ("body", "fits"),
    [
        ('return {"x": (self.x[i] - self.mean) / self.scale, "y": self.y[i]}', True),
        ("x = self.x[i].float() / 255\n        return x, self.y[i]", True),
        ("return augment(self.x[i]), self.y[i]", False),
        ("return self.x[i].view(28, 28), self.y[i]", False),
        ("return self.x[i][0], self.y[i]", False),
        ("return self.x[i], self.y[self.order[i]]", False),
        ("return self.x[i], i", False),
        ("if self.flips:\n            return self.x[i].float()\n        return self.x[i]", False),
    ],
)
def test_rows_are_taken_together_where_a_row_is_all_that_is_taken(body: str, fits: bool) -> None:
    code = ROWS.format(index="i", body=body)
    if fits:
        assert LOADER in after(code, "rows_by_index")
        return
    with pytest.raises(NotEditable, match="more than to take a row"):
        after(code, "rows_by_index")


def test_batches_of_rows_are_those_that_came_before() -> None:
    torch = pytest.importorskip("torch", reason="a loader is run")
    code = "loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True, drop_last=True)  # here\n"
    made = []
    for text in (code, after(code, "rows_of_tensors")):
        space: dict[str, Any] = {"data": torch.utils.data.TensorDataset(torch.arange(10))}
        torch.manual_seed(0)
        exec(HEAD + text, space)
        made.append([batch.tolist() for _ in range(2) for (batch,) in space["loader"]])
    assert made[0] == made[1]
    assert math.prod(len(batch) for batch in made[0]) == 4**4
