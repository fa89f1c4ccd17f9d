"""Edits of code that cure a known idiom: what is looked for in the statement of a line, and what takes its place.

Both are written as Python. A name that begins with an underscore stands for any expression (`_x_text`: for a string,
`_x_loader`: for what is called so, `_x_graph`: for what may be a tensor with a graph), `*_x` and `**_x` for further
arguments. Names of modules are whole: `numpy.stack` finds `np.stack` where numpy was imported as np. What comes out is
parsed again and compared with the tree it should have. Whether the training stays as it is, a trial shows: each is run,
and its losses are compared.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping

from msgspec import Struct


class Rewrite(Struct, frozen=True):
    """One edit: `find` is an expression or statement, `put` is what takes its place.

    `rows`: only where each `__getitem__` of the file takes single rows of what its data set has, as it then may many.
    """

    find: str
    put: str
    rows: bool = False

    @property
    def shown(self) -> str:
        """Both in one line, with names as a user writes them: "len(list(x)) → len(x)"."""
        names = r"(?<![\w.])_([a-z]+?)(?:_text|_graph)?(?=\W|$)|(?<![\w.])_(?=[a-z])"
        return " → ".join(re.sub(names, r"\1", " ".join(code.split())) for code in (self.find, self.put))


class Written(Struct, frozen=True):
    """One edit of an expression, whichever way it is written, also over several statements: see forms.py."""

    find: str
    put: str

    @property
    def shown(self) -> str:
        """As of a Rewrite."""
        return Rewrite(self.find, self.put).shown


class Held(Struct, frozen=True):
    """One edit of an expression that makes the same of `_a` each time: it reads what is made once.

    `once` is made after the only statement that assigns `_a`, and kept under its name and `called`; `_kept` in `put` is
    that. `value`: what is assigned must be such an expression. No `called`: it takes the place of `_a`.
    """

    find: str
    once: str
    put: str = ""
    called: str = ""
    value: str = "_v"

    @property
    def shown(self) -> str:
        """As of a Rewrite."""
        if not self.called:
            return Rewrite(self.value, self.once.replace("_a", self.value)).shown
        return Rewrite(self.find, self.put).shown + Rewrite(f", kept = {self.once}", "").shown.removesuffix(" → ")


class Opened(Struct, frozen=True):
    """A file that is opened for each sample: once in each process instead, as none may share its place in it."""

    call: str  # "zipfile.ZipFile"

    @property
    def shown(self) -> str:
        """As of a Rewrite."""
        return f"with {self.call}(path) as file: … → file = opened(os.getpid(), path), where opened has a cache"


class Begun(Struct, frozen=True):
    """A statement that is put after the imports."""

    statement: str

    @property
    def shown(self) -> str:
        """As of a Rewrite."""
        return f"import … → {self.statement}"


class Wrapped(Struct, frozen=True):
    """A loop that is put into a block, unless it calls a method of these names."""

    block: str
    without: tuple[str, ...]

    @property
    def shown(self) -> str:
        """As of a Rewrite."""
        return f"for … in loader: … → {self.block} for …"


class Decorated(Struct, frozen=True):
    """A method that gets a decorator, unless it has one or other arguments than these."""

    method: str
    args: int
    decorator: str  # a function of a module that is imported where it is not

    @property
    def shown(self) -> str:
        """As of a Rewrite."""
        return f"def {self.method}(…) → @{self.decorator} def {self.method}(…)"


Edit = Rewrite | Written | Held | Opened | Begun | Wrapped | Decorated

# Each parameter in a loop, and all of them in one call; within `torch.no_grad()`, as tensors that want gradients are
# changed in place.
_PAIRS = (
    "for _e, _p in zip(_a.parameters(), _b.parameters(), **_k):\n    ",
    "for _p, _e in zip(_b.parameters(), _a.parameters(), **_k):\n    ",
)
_AVERAGED = """
with torch.no_grad():
    torch._foreach_mul_([*_a.parameters()], _d)
    torch._foreach_add_([*_a.parameters()], [*_b.parameters()], alpha=_w)
"""
_DRAWN_NEAR = """
with torch.no_grad():
    torch._foreach_lerp_([*_a.parameters()], [*_b.parameters()], _w)
"""
_ONE_DRAWN_NEAR = ("_e.lerp_(_p, _w)", "_e.data.lerp_(_p.data, _w)", "_e.lerp_(_p.data, _w)")
_ONE_AVERAGE = (
    "_e.data.mul_(_d).add_(_p.data, alpha=_w)",
    "_e.mul_(_d).add_(_p.data, alpha=_w)",
    "_e.mul_(_d).add_(_p.detach(), alpha=_w)",
    "_e.mul_(_d).add_(_p, alpha=_w)",
    "_e.data.mul_(_d).add_(_w * _p.data)",
    "_e.mul_(_d).add_(_w * _p)",
    "_e.data = _d * _e.data + _w * _p.data",
    "_e.data.copy_(_d * _e.data + _w * _p.data)",
    "_e.copy_(_d * _e + _w * _p)",
)

# The averages over the state dict: buffers of integers are left as they are.
_STATE = "for _k, _e in _a.state_dict().items():\n    if _e.dtype.is_floating_point:\n        {}"
_OF_STATE = """
with torch.no_grad():
    _averages = {_k: _e for _k, _e in _a.state_dict().items() if _e.dtype.is_floating_point}
    torch._foreach_mul_([*_averages.values()], _d)
    torch._foreach_add_([*_averages.values()], [_n[_k] for _k in _averages], alpha=_w)
"""
_ONE_OF_STATE = (
    "_e *= _d\n        _e += _w * _n[_k].detach()",
    "_e *= _d\n        _e += _w * _n[_k]",
    "_e.mul_(_d).add_(_n[_k], alpha=_w)",
    "_e.mul_(_d).add_(_n[_k].detach(), alpha=_w)",
    "_e.copy_(_e * _d + _w * _n[_k])",
    "_e.copy_(_e * _d + _w * _n[_k].detach())",
)

# Attention: the scores, and the scale; what hides some of them; and what comes after the softmax.
_SCORES = (
    ("(torch.matmul(_q, _k.mT) / _c)", "scale=1 / _c"),
    ("(torch.matmul(_q, _k.mT) * _s)", "scale=_s"),
    ("torch.matmul(_q / _c, _k.mT)", "scale=1 / _c"),
    ("torch.matmul(_q * _s, _k.mT)", "scale=_s"),
    ("torch.matmul(_q, _k.mT)", "scale=1.0"),
)
_MASKED = (
    ("SCORES", ""),
    ("torch.masked_fill(SCORES, CAUSAL(_m), LOW)", "is_causal=True"),
    ("torch.masked_fill(SCORES, _m == 0, LOW)", "attn_mask=_m != 0"),
    ("torch.masked_fill(SCORES, ~_m, LOW)", "attn_mask=_m"),
    ("torch.masked_fill(SCORES, _m, LOW)", "attn_mask=~_m"),
    ("torch.where(CAUSAL_KEPT(_m), SCORES, LOW)", "is_causal=True"),
    ("torch.where(_m, SCORES, LOW)", "attn_mask=_m"),
    (
        "WHEN(_m is not None, torch.masked_fill(SCORES, _m == 0, LOW), SCORES)",
        "attn_mask=None if _m is None else _m != 0",
    ),
    ("WHEN(_m is not None, torch.masked_fill(SCORES, _m, LOW), SCORES)", "attn_mask=None if _m is None else ~_m"),
    ("WHEN(_m is not None, SCORES + _m, SCORES)", "attn_mask=_m"),
    ("SCORES + _m", "attn_mask=_m"),
)
_DROPPED = (
    ("WEIGHTS", ""),
    ("DROPOUT(_f, WEIGHTS)", "dropout_p=_f.p if _f.training else 0.0"),
    ("torch.dropout(WEIGHTS, _p, _t)", "dropout_p=_p if _t else 0.0"),
    ("F.dropout(WEIGHTS, p=_p, training=_t)", "dropout_p=_p if _t else 0.0"),
)


def _attentions() -> Iterator[Written]:
    for (scores, scale), (masked, mask), (dropped, dropout) in itertools.product(_SCORES, _MASKED, _DROPPED):
        more = ", ".join(filter(None, (mask, dropout, scale)))
        put = f"torch.nn.functional.scaled_dot_product_attention(_q, _k, _v, {more})"
        for dim in (-1, 3):
            weights = f"CAST(torch.softmax(CAST({masked.replace('SCORES', scores)}), {dim}))"
            yield Written(f"torch.matmul(CAST({dropped.replace('WEIGHTS', weights)}), _v)", put)


_MEAN = "torch.mean(_x, -1, keepdim=True)"
_CENTERED = f"(_x - {_MEAN})"
_LAYER_NORMS = tuple(
    f"{_CENTERED} {by}"
    for variance in (
        "torch.var(_x, -1, unbiased=False, keepdim=True)",
        f"torch.mean({_CENTERED} ** 2, -1, keepdim=True)",
    )
    for by in (f"/ torch.sqrt({variance} + _e)", f"* torch.rsqrt({variance} + _e)")
)
_MEAN_SQUARE = "torch.mean(CAST(_x) ** 2, -1, keepdim=True)"
_RMS_NORMS = tuple(
    f"CAST(_x) {by}" for by in (f"* torch.rsqrt({_MEAN_SQUARE} + _e)", f"/ torch.sqrt({_MEAN_SQUARE} + _e)")
)
_LOG_SOFTMAX = tuple(
    form.format(dim) for dim in (-1, 1) for form in ("F.log_softmax(_z, {0})", "torch.log(torch.softmax(_z, {0}))")
)
# Rounding makes of a distance of zero less than that, which has no root.
_OF_PAIRS = (
    "(torch.sum(_x ** 2, -1).unsqueeze({1}) + torch.sum(_y ** 2, -1).unsqueeze({2}) - 2 * _x @ _y.mT).clamp_min(0)"
)
_ONE_HOT = (
    *(
        Written(find.format("CAST(F.one_hot(_i, _n))"), put)
        for find, put in (
            ("torch.matmul({0}, _w)", "torch.nn.functional.embedding(_i, _w)"),
            ("F.linear({0}, _w)", "torch.nn.functional.embedding(_i, _w.t())"),
            ("F.linear({0}, _w, _b)", "torch.nn.functional.embedding(_i, _w.t()) + _b"),
            (
                "_m({0})",
                "torch.nn.functional.embedding(_i, _m.weight.t()) + (0 if _m.bias is None else _m.bias)",
            ),
        )
    ),
)
_DETACHED = (
    Rewrite("_l.append(_x_graph)", "_l.append(_x_graph.detach())"),
    Rewrite("_t += _x_graph", "_t += _x_graph.detach()"),
    Rewrite("_t = _t + _x_graph", "_t = _t + _x_graph.detach()"),
)
_OF_TABLES = (
    Held("_a.iloc[_i, _j]", "_a.to_numpy()", "_kept[_i, _j]", "values"),
    Held("_a.iloc[_i][_c_text]", "_a[_c_text].to_numpy()", "_kept[_i]", "column"),
    Held("_a[_c].iloc[_i:_j].to_numpy(*_d)", "_a[_c].to_numpy(*_d)", "_kept[_i:_j]", "values"),
    Held("_a.iloc[_i:_j][_c].to_numpy(*_d)", "_a[_c].to_numpy(*_d)", "_kept[_i:_j]", "values"),
    Held("_a.iloc[_i:_j].to_numpy(*_d)", "_a.to_numpy(*_d)", "_kept[_i:_j]", "values"),
    Held("_a.iloc[_i].to_numpy(*_d)", "_a.to_numpy(*_d)", "_kept[_i]", "values"),
    Held("_a.iloc[_i].values", "_a.to_numpy()", "_kept[_i]", "values"),
)
# A norm of all gradients, one after the other.
_EACH_NORM: tuple[str, ...] = ("_p.grad.norm()", "_p.grad.norm(2)", "_p.grad.data.norm(2)", "_p.grad.detach().norm(2)")
_EACH_NORM += ("_p.grad.detach().data.norm(2)", "_p.grad.data.norm()", "_p.grad.detach().norm()")
_TOTAL = "_t += torch.nn.utils.get_total_norm([_p.grad for _p in _ps if _p.grad is not None]).item() ** 2"

# Samples that are the same in every epoch: what the data set's method makes is kept. What the change then begins with.
KEPT, KEEP = "samples_kept", "make each sample once and keep it"


# By the name of the idiom, or of what a rule has found.
def _in_batches(*, rows: bool) -> Iterator[Rewrite]:
    """Yield the edits of a loader that takes its samples one by one: a batch with one index instead."""
    for given, sampler in (
        ("shuffle=True, ", "torch.utils.data.RandomSampler(_d)"),
        ("sampler=_s, ", "_s"),
        ("", "torch.utils.data.SequentialSampler(_d)"),
    ):
        for last, dropped in (("drop_last=_l, ", "_l"), ("", "False")):
            yield Rewrite(
                f"torch.utils.data.DataLoader(_d, batch_size=_b, {given}{last}**_k)",
                f"torch.utils.data.DataLoader(_d, sampler=torch.utils.data.BatchSampler({sampler}, _b, {dropped}),"
                " batch_size=None, **_k)",
                rows,
            )


REWRITES: Mapping[str, tuple[Edit, ...]] = {
    "anomaly_mode": (
        Rewrite("torch.autograd.set_detect_anomaly(True, *_a, **_k)", "torch.autograd.set_detect_anomaly(False)"),
        Rewrite("torch.autograd.set_detect_anomaly(mode=True, **_k)", "torch.autograd.set_detect_anomaly(False)"),
        Rewrite("torch.autograd.detect_anomaly(*_a, **_k)", "torch.autograd.set_detect_anomaly(False)"),
    ),
    "average_of_weights": (
        # One operation instead of two, where the weights add up to one: other roundings of the average alone.
        *(
            Rewrite(f"{pairs}{one.replace('_w', '(1 - _d)')}", _DRAWN_NEAR.replace("_w", "1 - _d"))
            for pairs in _PAIRS
            for one in _ONE_AVERAGE
        ),
        *(Rewrite(f"{pairs}{one}", _AVERAGED) for pairs in _PAIRS for one in _ONE_AVERAGE),
        *(Rewrite(f"{pairs}{one}", _DRAWN_NEAR) for pairs in _PAIRS for one in _ONE_DRAWN_NEAR),
        *(Rewrite(_STATE.format(one), _OF_STATE) for one in _ONE_OF_STATE),
    ),
    "all_sorted": (
        Written("torch.argsort(_x, _d, descending=True)[:, :_k]", "_x.topk(_k, dim=_d).indices"),
        Written(
            "torch.nonzero(torch.argsort(_x, 1, descending=True) == _t[:, None])[:, 1]",
            "(_x > _x.gather(1, _t[:, None])).sum(1)",
        ),
    ),
    "array_scanned": (
        *(
            Held(find, "{value: numpy.flatnonzero(_a == value) for value in numpy.unique(_a)}", "_kept[_x]", "rows")
            for find in ("numpy.where(_a == _x)[0]", "numpy.flatnonzero(_a == _x)", "(_a == _x).nonzero()[0]")
        ),
    ),
    "cache_emptied": (Rewrite("torch.cuda.empty_cache()", "pass"),),
    "collected_by_hand": (Rewrite("gc.collect(*_a)", "pass"),),
    # The whole row is made for one value of it. Tables whose types differ by column become arrays of objects.
    "dataframe_rows": (
        *_OF_TABLES,
        Rewrite("_f.iloc[_i][_c_text]", "_f[_c_text].iat[_i]"),
        Held("_a.iloc[_i]", '_a.to_dict("records")', "_kept[_i]", "records"),
    ),
    "table_sliced": _OF_TABLES,
    "denormals": (Begun("torch.set_flush_denormal(True)"),),
    "drawn_with_weights": (
        Rewrite("numpy.array([_g.choice(_n, p=_p) for _i in range(_k)])", "_g.choice(_n, size=_k, p=_p)"),
        Rewrite("[_g.choice(_n, p=_p) for _i in range(_k)]", "_g.choice(_n, size=_k, p=_p)"),
    ),
    "gradients_checked": (
        *(
            Rewrite(f"for _p in _ps:\n    {each}", _TOTAL)
            for norm in _EACH_NORM
            for each in (
                f"_t += {norm}.item() ** 2",
                f"_n = {norm}\n    _t += _n.item() ** 2",
                f"if _p.grad is not None:\n        _t += {norm}.item() ** 2",
                f"if _p.grad is not None:\n        _n = {norm}\n        _t += _n.item() ** 2",
            )
        ),
        *(
            Rewrite(f"for _p in _m.parameters():\n    {each}", "torch.nn.utils.clip_grad_value_(_m.parameters(), _c)")
            for each in (
                "_p.grad.data.clamp_(-_c, _c)",
                "_p.grad.clamp_(-_c, _c)",
                "_p.grad.data.clamp_(min=-_c, max=_c)",
            )
        ),
    ),
    "list_searched": (
        Held("_a.index(_x)", "{value: n for n, value in reversed([*enumerate(_a)])}", "_kept[_x]", "places"),
        Held("_x in _a", "{*_a}", "_x in _kept", "set"),
        Held("_x not in _a", "{*_a}", "_x not in _kept", "set"),
    ),
    # Only with the type: NumPy's and PyTorch's of numbers of Python are others.
    "list_of_arrays": (Rewrite("torch.tensor(_x, dtype=_d)", "torch.from_numpy(numpy.array(_x)).to(_d)"),),
    # Each worker keeps those that it made, as long as it lives.
    KEPT: (Decorated("__getitem__", 2, "functools.cache"),),
    "log_determinant": (
        *(
            Written(find, "2 * torch.linalg.cholesky(_a).diagonal(dim1=-2, dim2=-1).log().sum(-1)")
            for find in ("torch.logdet(_a)", "torch.log(torch.det(_a))", "torch.slogdet(_a)[1]")
        ),
    ),
    "loader_counted": (
        Rewrite("len(list(_x_loader))", "len(_x_loader)"),
        Rewrite("sum(1 for _e in _x_loader)", "len(_x_loader)"),
    ),
    "masked_attention": (
        *(
            Written(
                f"F.scaled_dot_product_attention(_q, _k, _v, attn_mask=CAUSAL_KEPT(_m){more})",
                f"torch.nn.functional.scaled_dot_product_attention(_q, _k, _v, is_causal=True{more})",
            )
            for more in ("", ", dropout_p=_p", ", scale=_s", ", dropout_p=_p, scale=_s")
        ),
    ),
    # A file of arrays, of which each is read and unpacked anew whenever it is named.
    "npz_member": (Held("_a[_k]", "dict(_a)", value="numpy.load(*_x, **_k)"),),
    "pairs_expanded": (
        *(
            Written(f"torch.sum(({x} - {y}) ** 2, {dim})", _OF_PAIRS.format(0, a, b))
            for a, b, dims in ((1, 0, (-1, 2)), (2, 1, (-1, 3)), (-2, -3, (-1,)))
            for dim in dims
            for x, y in (
                (f"_x.unsqueeze({a})", f"_y.unsqueeze({b})"),
                (f"_x.unsqueeze({a}).expand(_1, _2, _3, _4)", f"_y.unsqueeze({b}).expand(_5, _6, _7, _8)"),
            )
        ),
    ),
    "rows_of_tensors": (*_in_batches(rows=False),),
    "rows_by_index": (*_in_batches(rows=True),),
    "table_searched": (Held("_a[_a[_c_text] == _x]", "dict([*_a.groupby(_c_text)])", "_kept[_x]", "groups"),),
    # What a worker hands on is then no part of a larger storage, all of which is copied.
    "copied_storages": (
        Rewrite("_x[_a:_b]", "_x[_a:_b].clone()"),
        Rewrite("_x[:_b]", "_x[:_b].clone()"),
        Rewrite("_x[_a:]", "_x[_a:].clone()"),
        Rewrite("_x.narrow(*_a)", "_x.narrow(*_a).clone()"),
        Rewrite("return _x[_i]", "return _x[_i].clone()"),
    ),
    "growing_steps": _DETACHED,
    "one_hot_input": _ONE_HOT,
    "unfused_activation": (
        *(
            Written(f"0.5 * {x} * (1 + torch.tanh({inner}))", 'torch.nn.functional.gelu(_x, approximate="tanh")')
            for x in ("_x",)
            for inner in (
                "_c * (_x + 0.044715 * torch.pow(_x, 3))",
                "_c * _x * (1 + 0.044715 * _x ** 2)",
                "_c * _x * (1 + 0.044715 * _x * _x)",
            )
        ),
        *(
            Written(f"0.5 * _x * (1 + torch.erf({inner}))", "torch.nn.functional.gelu(_x)")
            for inner in ("_x / math.sqrt(2)", "_x * _c", "_x / _c")
        ),
        Written("_x * torch.sigmoid(_x)", "torch.nn.functional.silu(_x)"),
        Written("_x * torch.tanh(F.softplus(_x))", "torch.nn.functional.mish(_x)"),
    ),
    "unfused_attention": (*_attentions(),),
    "unfused_loss": (
        *(
            Written(form.format(logs), "torch.nn.functional.cross_entropy(_z, _t)")
            for logs in _LOG_SOFTMAX
            for form in (
                "F.nll_loss({0}, _t)",
                "-torch.mean({0}.gather(1, _t.unsqueeze(1)))",
                "-torch.mean({0}.gather(-1, _t.unsqueeze(-1)))",
                "torch.mean(-{0}.gather(1, _t.unsqueeze(1)))",
                "-torch.mean({0}[torch.arange(_n), _t])",
                "-torch.mean({0}[range(_n), _t])",
                "-torch.mean(torch.sum(F.one_hot(_t, _n) * {0}, 1))",
                "-torch.mean(torch.sum(CAST(F.one_hot(_t, _n)) * {0}, -1))",
            )
        ),
    ),
    "unfused_norm": (
        *(
            Written(f"_w * ({norm}) + _b", "torch.nn.functional.layer_norm(_x, _w.shape, _w, _b, _e)")
            for norm in _LAYER_NORMS
        ),
        *(Written(norm, "torch.nn.functional.layer_norm(_x, _x.shape[-1:], eps=_e)") for norm in _LAYER_NORMS),
        *(
            Written(f"_w * {norm}", "torch.nn.functional.rms_norm(_x, _w.shape, _w, _e)")
            for one in _RMS_NORMS
            for norm in (one, f"CAST({one})")
        ),
        *(Written(norm, "torch.nn.functional.rms_norm(_x, _x.shape[-1:], eps=_e)") for norm in _RMS_NORMS),
    ),
    # One sample of a column, of which all would be converted.
    "whole_column": (Rewrite("_t[_c_text][_i]", "_t[_i][_c_text]"),),
    "hdf5_opened": (Opened("h5py.File"),),
    "zip_opened": (Opened("zipfile.ZipFile"),),
    # A tensor that was made in inference mode is refused in training, as one that a module keeps: so not that.
    "validation_share": (Wrapped("with torch.no_grad():", ("backward", "step")),),
}
