"""Which lines and modules a finding names, what its change and the options look like, and which lines count."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Sequence
from dataclasses import replace as with_fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pandas as pd
import pytest
from msgspec.structs import replace

from dlprof.analysis.chains.written_out import norms
from dlprof.analysis.engine import Maybe
from dlprof.analysis.idioms import BY_NAME
from dlprof.analysis.modules.work import OUTSIDE
from dlprof.analysis.rules import RULES
from dlprof.analysis.source.insertions import call_of
from dlprof.analysis.source.line_shares import busiest, call_sites, line_shares, over_ranks
from dlprof.analysis.source.patches import Call, Recorded, Span
from dlprof.analysis.source.statements import Trees
from dlprof.analysis.source.where import (
    CONCERNED,
    CONCERNS,
    MOST_NAMED,
    Option,
    Source,
    changes_numbers,
    concerned_rows,
    found_in_modules,
    in_modules,
    options,
    placed,
    wanted,
    with_option,
)
from dlprof.errors import NotMeasured
from dlprof.result import CATEGORIES, Change, Outcome, Place, Setting, change
from dlprof.result.figures import InModule
from tests.fixtures import layers, operators, runs, traces
from tests.fixtures.runs import CPU, MS, light, measured, recorded
from tests.fixtures.sampled_stacks import LOADER as FETCHING
from tests.fixtures.sampled_stacks import MAIN, WORKER, stacked

TEXT = "train = DataLoader(data)\n"
LOADER = Call("loader", "train.py", 1, "main", TEXT.strip(), roles=("train",), span=Span(1, 1, 8, 24))
HELD = Call("loader", "train.py", 2, "main", "held", roles=("validation",))
LOOP = Call("iteration", "train.py", 5, "main", "for x in train:", roles=("train",))
CHECK = Call("iteration", "train.py", 9, "check", "for x in held:", roles=("validation",))
SAVE = Call("save", "train.py", 7, "main", "torch.save(m)")
CALLS = [CHECK, HELD, LOOP, LOADER, SAVE]


def source(
    calls: Sequence[Call],
    *lines: tuple[str, bool, str, int, str, str, int, int],
    modules: Sequence[tuple[str, str, str, float]] = (),
    options: Sequence[Option] = (),
    trees: Trees = MappingProxyType({}),
) -> Source:
    """Return what is known of calls, of lines and of modules: none where there is no line, or no module."""

    def of_modules() -> Any:
        if not modules:
            raise NotMeasured("no module")
        return pd.DataFrame(modules, columns=["about", "path", "kind", "ns"]).assign(total_ns=10.0, rank=0)

    def known() -> Any:
        if not lines:
            raise NotMeasured("no stack")
        columns = ["doing", "own", "file", "line", "function", "library", "samples", "of"]
        return pd.DataFrame(lines, columns=columns).assign(rank=0)

    def costly() -> Any:
        columns = ["doing", "file", "line", "callers", "samples"]
        return pd.DataFrame([("rest", "metric.py", 5, (("update", "train.py", 12),), 9)], columns=columns)

    def own() -> Any:
        rows = [("forward", "net.py", 8, (("fit", "train.py", 30), ("main", "train.py", 40)))]
        return pd.DataFrame(rows, columns=["doing", "file", "line", "callers"])

    seen = Maybe(known), Maybe(costly), Maybe(own), Maybe(of_modules)
    return Source(Maybe(lambda: [*calls]), *seen, Maybe(lambda: [*options]), trees)


def found(rule: str, *changes: Change) -> Outcome:
    return Outcome(rule, "found", "Found", changes=changes)


def test_a_finding_names_the_modules_that_it_is_in() -> None:
    known = source(CALLS, modules=[("float32", "head", "Linear", 8.0), ("late", "body", "Body", 10.0)])
    assert placed(found("fp32_matmul"), (), known).modules == (InModule("head", "Linear", 0.8),)
    assert placed(found("input_wait"), (), known).modules == ()
    assert placed(found("fp32_matmul"), (), source(CALLS)).modules == ()


def test_calls_come_first_and_lines_seen_in_the_phases_then() -> None:
    lines = (
        ("worker", True, "data.py", 7, "decode", "open (PIL/Image.py)", 80, 100),
        ("worker", True, "data.py", 8, "decode", "", 4, 100),
        ("worker", False, "x/y.py", 0, "f", "", 16, 100),
        ("fetch", False, "torch/z.py", 0, "wait", "", 30, 30),
        ("rest", True, "train.py", 6, "main", "", 90, 90),
    )
    where = placed(found("input_wait"), ("input_wait",), source(CALLS, *lines)).where
    assert [(w.file, w.line, w.function, w.share) for w in where] == [
        ("train.py", 1, "main", None),
        ("train.py", 5, "main", None),
        ("data.py", 7, "decode", 0.8),
        ("torch/z.py", 0, "wait", 1.0),
    ]
    assert where[2].what == "loader worker, in open (PIL/Image.py)"


def test_the_call_of_a_model_is_not_where_embeddings_are_looked_up() -> None:
    tables = Call("forward", "model.py", 3, "look_up", "bag(ids)", count=30)
    same, model = with_fields(tables, kind="embedding"), Call("forward", "train.py", 8, "main", "model(x)", count=7)
    for calls, places in (([tables, same, model], [8]), ([tables, same], [3]), ([tables, model], [3, 8])):
        assert [w.line for w in placed(found("fp32_matmul"), (), source(calls)).where] == places


def test_a_line_that_the_rule_names_is_not_named_again_for_its_call() -> None:
    named = replace(found("input_wait"), where=(Place("train.py", 1, "main", what="as the rule says"),))
    where = placed(named, ("input_wait",), source(CALLS)).where
    assert [(w.line, w.what) for w in where] == [(1, "as the rule says"), (5, LOOP.source)]


@pytest.mark.parametrize(
    ("idiom", "line"),
    [("nested_records", 1), ("saved", 3), ("environments_in_processes", 4), ("average_of_weights", 9)],
)
def test_where_a_script_tells_a_library_to_do_it_comes_first(idiom: str, line: int) -> None:
    script = "data = data.map(pixels)\nfit(\n    ModelCheckpoint(),\n    make_env(vec_env_cls=Processes))\n"
    named = found("gc_pauses", change(f"{BY_NAME[idiom].remedy}: main (train.py:9)"))
    named = replace(named, where=(Place("train.py", 9, "main"),))
    where = placed(named, (), source([], trees={"train.py": ast.parse(script)})).where
    assert [place.line for place in where] == [*{line: 0, 9: 0}]


def test_a_line_is_named_with_what_calls_it() -> None:
    hot = Place("metric.py", 5, "distance", share=0.9)
    call = Place("net.py", 8, "score", what="self.model(x)")
    for rule_named, lines, what in (
        (hot, [5, 12], "called by update (train.py:12)"),
        (replace(hot, line=6), [6], ""),
        (replace(hot, share=None), [5], ""),
        (call, [8, 30, 40], "self.model(x), called by fit (train.py:30)"),
    ):
        where = placed(replace(found("gc_pauses"), where=(rule_named,)), (), source([])).where
        assert [place.line for place in where] == lines
        assert where[0].what == what


def test_of_several_calls_of_a_kind_those_made_most_often_come_first_and_a_librarys_last() -> None:
    calls = [
        Call("save", "train.py", 1, count=1),
        Call("save", "train.py", 2, count=9, via="save (fancy/x.py:1)"),
        Call("save", "train.py", 3, count=5),
        Call("save", "train.py", 4, count=3),
    ]
    assert [w.line for w in placed(found("checkpoint_stall"), (), source(calls)).where] == [3, 4, 1]
    assert [w.line for w in placed(found("checkpoint_stall"), (), source(calls[:3])).where] == [3, 1, 2]


@pytest.mark.parametrize(
    ("rule", "saves_from", "expected"),
    [
        ("validation_share", (), [9]),
        ("checkpoint_stall", (), [7]),
        ("gc_pauses", ("garbage_collection",), []),
        ("some_new_rule", ("checkpoint",), [7]),
        ("some_new_rule", (), []),
    ],
)
def test_a_rule_names_the_calls_that_concern_it(rule: str, saves_from: tuple[str, ...], expected: list[int]) -> None:
    assert [w.line for w in placed(found(rule), saves_from, source(CALLS)).where] == expected


def test_few_stacks_name_no_line() -> None:
    few = source([], ("rest", True, "train.py", 6, "main", "", 20, 20))
    assert placed(found("host_bound"), (), few).where == ()


def test_a_change_has_the_place_of_its_argument_and_its_diff(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TEXT)
    digest = hashlib.sha256(TEXT.encode()).hexdigest()
    known = Call(
        "loader", "train.py", 1, "main", "…", digest, roles=("train",), span=LOADER.span, directory=str(tmp_path)
    )
    asked = (change("more", num_workers=(0, 4)), change("less work"), change("env", OMP_NUM_THREADS=(None, 1)))
    first, *others = placed(found("input_wait", *asked), (), source([HELD, known])).changes
    assert first.at is not None
    assert (first.at.file, first.at.line, first.no_diff) == ("train.py", 1, "")
    assert "+train = DataLoader(data, num_workers=4)\n" in first.diff
    assert [c.at for c in others] == [None, None]
    (asked_for,) = placed(
        found("input_wait", asked[0]), (), source([known], options=[Option("--workers", "w")])
    ).changes
    assert asked_for.text == "the script has an option that looks like it: `--workers 4`; else more"
    assert asked_for.diff == first.diff
    (stale,) = placed(found("input_wait", asked[0]), (), source([LOADER])).changes
    assert stale.at is not None
    assert (stale.at.line, stale.diff) == (1, "")
    assert stale.no_diff == "train.py:1: what the file held was not recorded"


def test_a_change_of_code_has_its_edit_where_its_line_is_written_so(tmp_path: Path) -> None:
    text = "import gc\nloader = f()\nfor batch in loader:\n    gc.collect()\n    train(batch)\n"
    (tmp_path / "train.py").write_text(text)
    job = Recorded(str(tmp_path), files={"train.py": hashlib.sha256(text.encode()).hexdigest()})
    by_line = {n: Place("train.py", n, "main") for n in (4, 5)}
    remedy = f"{BY_NAME['collected_by_hand'].remedy}: main (train.py:4)"

    def changed(line: int, calls: Sequence[Call], **more: Any) -> Change:
        one = replace(found("host_bound", change(remedy, **more)), where=(by_line[line],))
        return placed(one, (), source(calls)).changes[0]

    known = Call("loader", "train.py", 2, job=job)
    made = changed(4, [known])
    assert made.settings == (Setting("train.py:4", to="collected_by_hand"),)
    assert (made.at and made.at.line, made.no_diff) == (4, "")
    assert "-    gc.collect()\n+    pass\n" in made.diff
    # It stands elsewhere; the file was not recorded; nothing was; it changes the training.
    for other in (changed(5, [known]), changed(4, [HELD]), changed(4, []), changed(4, [known], training=True)):
        assert (other.settings, other.diff) == ((), "")


def test_an_edit_of_a_rule_is_that_of_the_change_which_says_so(tmp_path: Path) -> None:
    text = "import torch\nfor batch in held:\n    look(batch)\n"
    (tmp_path / "train.py").write_text(text)
    job = Recorded(str(tmp_path), files={"train.py": hashlib.sha256(text.encode()).hexdigest()})
    loop = Call("iteration", "train.py", 2, roles=("validation",), job=job)
    asked = change("a larger batch in validation"), change("`with torch.no_grad():` around validation")
    larger, without = placed(found("validation_share", *asked), (), source([loop])).changes
    assert (larger.diff, without.settings) == ("", (Setting("train.py:2", to="validation_share"),))
    assert "+with torch.no_grad():\n+    for batch in held:\n+        look(batch)\n" in without.diff


def test_what_changes_numbers_is_known_by_the_change_or_its_setting() -> None:
    assert changes_numbers(change("x", broadcast_buffers=(True, False)))
    assert changes_numbers(change("x", numerics=True, batch_size=(1, 2)))
    assert not changes_numbers(change("x", num_workers=(0, 2), persistent_workers=(False, True)))


def test_a_change_wants_its_keywords_by_kind_of_call() -> None:
    both = change("x", num_workers=(0, 2), fused=(None, True), OMP_NUM_THREADS=(None, 1), pin_memory=(False, None))
    assert [(w.kind, dict(w.settings)) for w in wanted(both)] == [
        ("loader", {"num_workers": 2}),
        ("optimizer", {"fused": True}),
    ]


def test_each_rule_that_is_listed_is_there() -> None:
    assert CONCERNS.keys() | set(CONCERNED) <= {rule.id for rule in RULES}
    for rule in RULES:
        assert rule.id in CONCERNS or set(rule.saves_from) <= set(CATEGORIES)


# -- the smallest modules that hold most of a finding


def inside(*rows: tuple[str, str, float], total: float = 100.0, rank: int = 0) -> pd.DataFrame:
    """Return what a finding has in modules with what is inside them: path, class, ns."""
    frame = pd.DataFrame(rows, columns=["path", "kind", "ns"])
    return frame.assign(about="float32", total_ns=total, rank=rank)


BERT = inside(
    ("", "Bert", 100.0),
    ("layer.*", "Layer", 90.0),
    ("layer.*.attention", "Attention", 50.0),
    ("layer.*.mlp", "MLP", 35.0),
    ("layer.*.norm", "LayerNorm", 5.0),
    ("head", "Linear", 10.0),
)
SMALL = inside(("", "Net", 100.0), *[(f"block{n}", "Block", 5.0) for n in range(20)])
RANKS = pd.concat([inside(("a", "A", 10.0), total=10.0), inside(("b", "B", 30.0), total=30.0, rank=1)])

SMALLEST: dict[str, tuple[str, pd.DataFrame | None, list[InModule]]] = {
    "what is inside is named where it has most of it": (
        "fp32_matmul", BERT,
        [
            InModule("layer.*.attention", "Attention", 0.5), InModule("layer.*.mlp", "MLP", 0.35),
            InModule("head", "Linear", 0.1),
        ],
    ),
    "many small ones are named by what is around them": ("fp32_matmul", SMALL, [InModule("", "Net", 1.0)]),
    "what is in no module is said beside others": (
        "fp32_matmul", inside(("a", "Linear", 60.0), (OUTSIDE, "", 40.0)),
        [InModule("a", "Linear", 0.6), InModule("", "", 0.4)],
    ),
    "and not alone": ("fp32_matmul", inside((OUTSIDE, "", 100.0)), []),
    "ranks count by what they have": ("fp32_matmul", RANKS, [InModule("b", "B", 0.75), InModule("a", "A", 0.25)]),
    "of other spans": ("host_sync", inside(("a", "Linear", 60.0)), []),
    "of no spans": ("input_wait", inside(("a", "Linear", 60.0)), []),
    "not known": ("fp32_matmul", None, []),
}  # fmt: skip


@pytest.mark.parametrize("name", SMALLEST)
def test_a_finding_names_the_smallest_modules(name: str) -> None:
    rule, frame, named = SMALLEST[name]
    assert [*in_modules(rule, frame)] == named
    many = inside(*[(f"m{n}", "Linear", 10.0) for n in range(10)])
    assert len(in_modules("fp32_matmul", many)) == MOST_NAMED


# -- what findings are about, in a step of a device whose every gap, product and copy is made by hand

US = 1_000
ODD = {"Input Dims": [[64, 1001], [1001, 50257]], "Input type": ["c10::BFloat16", "c10::BFloat16"]}
SGEMM, HALF, SHORT = "ampere_sgemm_128x64_tn", "ampere_bf16_s16816gemm_bf16_128x64", "vectorized_elementwise_kernel"


def job() -> list[traces.Event | list[traces.Event]]:
    """Return two alike steps of 1 ms on a device, whose modules differ in what is wrong with them.

    a multiplies in float32 for 200 µs. b multiplies odd sizes in 16 bits for 100 µs. c waits with a kernel of 5 µs for
    its launch, 286 µs long. d copies from pageable memory for 50 µs, and its gradients are exchanged for 80 µs. e waits
    for the device for 150 µs.
    """
    events: list[traces.Event | list[traces.Event]] = []
    for n in range(2):
        at, ids = n * 1000 * US, 10 * n
        events += [
            traces.step(n, at, 1000 * US), layers.called("", "Net", at, 990 * US),
            layers.called("a", "Linear", at, 100 * US), traces.op("aten::mm", at + 5 * US, 60 * US),
            traces.launched(SGEMM, at + 10 * US, at + 20 * US, 200 * US, ids + 1),
            layers.called("b", "Linear", at + 100 * US, 100 * US),
            traces.op("aten::mm", at + 105 * US, 60 * US, **ODD),
            traces.launched(HALF, at + 110 * US, at + 220 * US, 100 * US, ids + 2),
            layers.called("c", "Act", at + 500 * US, 150 * US), traces.op("aten::gelu", at + 600 * US, 20 * US),
            traces.launched(SHORT, at + 601 * US, at + 610 * US, 5 * US, ids + 3),
            layers.called("d", "Linear", at + 660 * US, 100 * US), traces.op("aten::copy_", at + 660 * US, 20 * US),
            traces.call("cudaMemcpyAsync", at + 661 * US, 5 * US, ids + 4),
            traces.copy(at + 670 * US, 50 * US, 1_000_000, correlation=ids + 4),
            traces.call("cudaLaunchKernel", at + 700 * US, 5 * US, ids + 5),
            traces.collective(at + 720 * US, 80 * US, 1_000_000, correlation=ids + 5),
            layers.called("e", "Loss", at + 800 * US, 180 * US), traces.op("aten::item", at + 810 * US, 160 * US),
            traces.call("cudaStreamSynchronize", at + 815 * US, 150 * US, ids + 6),
        ]  # fmt: skip
    return events


def test_each_kind_of_finding_has_its_spans_and_their_modules(tmp_path: Path) -> None:
    made = traces.trace(*job(), world_size=2)
    rank = runs.rank_of(tmp_path, made)
    names = rank.table("spans")["name"].astype(str).to_numpy()
    each = {
        about: pd.Series(ns / 2 / US).groupby(names[rows]).sum().to_dict()
        for about, (rows, ns) in rank.once(concerned_rows).items()
    }
    assert each["float32"] == {SGEMM: 200.0}
    assert each["misaligned"] == {HALF: 100.0}
    assert each["late"][SHORT] == 286.0
    assert each["copies pageable"] == {"Memcpy HtoD (Pageable -> Device)": 50.0}
    assert list(each["exchanges"].values()) == [80.0]
    assert each["waits"] == {"cudaStreamSynchronize": 150.0}
    assert each["queued"] == each["copies"] == each["attention"] == {}

    found = runs.measured(traces.write(tmp_path / "of_modules.json", made), found_in_modules).frame(found_in_modules)
    of = found[found["path"] != ""].groupby("about")["path"].agg("".join).to_dict()
    told = {"float32": "a", "misaligned": "b", "copies pageable": "d", "exchanges": "d", "waits": "e"}
    assert {about: of[about] for about in told} == told
    assert found.loc[(found["about"] == "late") & (found["path"] == "c"), "ns"].tolist() == [2 * 286.0 * US]


def test_products_on_a_cpu(tmp_path: Path) -> None:
    rank = runs.rank_of(tmp_path, layers.on_cpu(*layers.two_layers()))
    names = rank.table("spans")["name"].astype(str).to_numpy()
    rows, ns = rank.once(concerned_rows)["float32"]
    assert dict(zip(names[rows], ns, strict=True)) == {"aten::addmm": 160.0, "aten::mm": 80.0}


@pytest.mark.long
def test_what_is_written_out_has_the_operators_of_its_chains(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    x = torch.randn(512, 256, requires_grad=True)
    w = torch.randn(256, 256, requires_grad=True)

    def run() -> None:
        y = x @ w
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6) * w[0]
        (y @ w).sum().backward()

    rank = operators.profiled(torch, tmp_path, run)
    rows, ns = rank.once(concerned_rows)["norms"]
    names = rank.table("spans")["name"].astype(str).to_numpy()
    assert {"aten::pow", "aten::mean", "aten::rsqrt", "aten::mul"} <= set(names[rows])
    assert not any("mm" in name for name in names[rows])
    assert ns.sum() == pytest.approx(rank.once(norms)["ns"].sum())
    assert rank.once(concerned_rows)["losses"][1].sum() == 0


# -- which lines count for a stack, and over several ranks

LIBRARY = "/lib/python3.11/site-packages"
BACKWARD = f"backward ({LIBRARY}/torch/_tensor.py:500)"
WORKING = 'process 10:"python train.py";process 11:"python train.py";thread (0x2): MainThread'


def test_a_stack_counts_for_the_innermost_line_of_the_users(tmp_path: Path) -> None:
    path = stacked(
        tmp_path, f"{MAIN};<module> (/w/train.py:90);main (/w/train.py:68) 60\n",
        f"{MAIN};<module> (/w/train.py:90);main (/w/train.py:69) 30\n",
        f"{MAIN};<module> (/w/train.py:90);main (/w/train.py:69);dumps ({LIBRARY}/fast/json.py:5) 10\n",
        f"{MAIN};<module> (/w/train.py:90);main (/w/train.py:70);{BACKWARD} 40\n",
        f"{MAIN};<module> (/w/train.py:90);main (/w/train.py:61);{FETCHING};decode (/w/data.py:7) 25\n",
        f"{WORKING};{WORKER};decode (/w/data.py:8) 50\n", f"{MAIN};run ({LIBRARY}/fancy/cli.py:3) 5\n", ranks=2,
    )  # fmt: skip
    frame = measured(path, line_shares).frame(line_shares)
    of_rank = frame[frame["rank"] == 0]
    rows = of_rank[["doing", "own", "file", "line", "function", "samples", "of"]].to_numpy().tolist()
    assert rows == [
        ["backward", True, "/w/train.py", 70, "main", 40, 40], ["fetch", True, "/w/data.py", 7, "decode", 25, 25],
        ["rest", True, "/w/train.py", 68, "main", 60, 105], ["rest", True, "/w/train.py", 69, "main", 40, 105],
        ["rest", False, "fancy/cli.py", 0, "run", 5, 105], ["worker", True, "/w/data.py", 8, "decode", 50, 50],
    ]  # fmt: skip
    assert of_rank["library"].tolist()[0] == "backward (torch/_tensor.py)"
    both = over_ranks(frame)
    first = both.iloc[0]
    assert (first["line"], first["samples"], first["of"], first["share"]) == (68, 120, 210, 120 / 210)


def test_what_the_users_line_called_is_named_where_it_was_seen_most(tmp_path: Path) -> None:
    log = f"main (/w/train.py:69);dumps ({LIBRARY}/fast/json.py:5);deep ({LIBRARY}/fast/x.py:1)"
    path = stacked(tmp_path, f"{MAIN};{log} 30\n", f"{MAIN};main (/w/train.py:69) 10\n")
    frame = measured(path, line_shares).frame(line_shares)
    assert frame[["line", "library", "samples"]].to_numpy().tolist() == [[69, "dumps (fast/json.py)", 40]]


def test_without_stacks_it_is_not_known(tmp_path: Path) -> None:
    run = measured(stacked(tmp_path, 'process 10:"python train.py";thread (0x2): other;f (/w/x.py:1) 5\n'), line_shares)
    with pytest.raises(NotMeasured):
        run.frame(line_shares)


# -- the line that calls operators most often, by the phase, and the function beside it


def line(number: int, function: str, *, after: str = "backward", phase: str = "", **operators: int) -> dict[str, Any]:
    of = {f"aten::{name}": n for name, n in operators.items()}
    return {"file": "a.py", "line": number, "function": function, "source": "x", "phase": phase, "after": after} | {
        "operators": of
    }


@pytest.mark.parametrize(
    ("lines", "places"),
    [
        ([], []),
        ([line(1, "f", mul=5), line(2, "f", mul=9)], [2]),
        ([line(1, "f", mul=9), line(2, "g", mul=3), line(3, "h", mul=8)], [1, 3]),
        # A function that hardly calls them says nothing.
        ([line(1, "f", mul=9), line(2, "g", mul=2)], [1]),
        ([line(1, "f", add=9), line(2, "g", mul=2)], [2]),
        ([line(1, "f", mul=9, after="forward"), line(2, "g", mul=9, phase="forward")], []),
    ],
)
def test_the_busiest_line_of_each_function(lines: list[dict[str, Any]], places: list[int]) -> None:
    found = busiest({"flops": {"lines": lines}}, "", "backward", {"aten::mul"})
    assert [place.line for place in found] == places
    for facts in ({}, {"flops": None}, {"flops": {"state": "off"}}):  # recordings without lines
        assert busiest(facts, "", "backward", {"aten::mul"}) == ()


# -- the calls of all ranks

ROW = {"kind": "save", "file": "train.py", "line": 7, "function": "main", "source": "torch.save(x)"}


def test_calls_are_those_of_all_ranks_each_once(tmp_path: Path) -> None:
    other = {**ROW, "line": 9}
    ranks = [(None, [light(n, MS) for n in range(9)], {**CPU, "calls": rows}) for rows in ([ROW], [ROW, other])]
    found = measured(recorded(tmp_path, *ranks), call_sites).frame(call_sites)
    assert [(call.line, call.source) for call in found] == [(7, "torch.save(x)"), (9, "torch.save(x)")]
    none = recorded(tmp_path / "none", (None, [light(n, MS) for n in range(9)], CPU))
    assert measured(none, call_sites).frame(call_sites) == []


@pytest.mark.parametrize(
    ("source", "text", "known"),
    [
        ("loss = F.cross_entropy(model(images), labels)", "model(images)", True),
        ("out = model(x.to(device))", "model(x.to(device))", True),
        ("for x in model(images):", "model(images)", True),
        ("return model(images)", "model(images)", True),
        ("a, b = model(x), other(y) + third(z)", "other(y)", False),  # as long as third(z)
        ("out = model(", "model(", False),
    ],
)
def test_the_syntax_of_a_call_in_its_line(source: str, text: str, known: bool) -> None:
    at = source.index(text)
    found = call_of(Call("forward", "t.py", 1, source=source, span=Span(1, 1, at, at + len(text))))
    assert (found is not None and ast.unparse(found)) == (known and text)


# -- an option of the script's own is named before the edit: for sure where its value is what the call gets

WORKERS = change("`num_workers=4`", num_workers=(0, 4))
PINNED = change("`pin_memory=True`", pin_memory=(False, True))
BOTH = change("both", num_workers=(0, 4), persistent_workers=(False, True))
NONE = change("`num_workers=0`", num_workers=(2, 0), pin_memory=(True, False))
CAST = change("autocast", autocast_enabled=(False, True), autocast_dtype=(None, "bfloat16"))
SCALED = change("autocast", autocast_enabled=(False, True), autocast_dtype=(None, "float16"))
LAYOUT = change("layout", memory_format=("contiguous_format", "channels_last"))
CAPTURED = change("captured", mode=(None, "reduce-overhead"))
FUSED = change("fused", fused=(None, True))

J = Option("--jobs", "jobs")
LOOKS = "the script has an option that looks like it: "


def loader(value: str) -> Call:
    return Call("loader", "a.py", 3, source=f"for x in DataLoader( data, batch_size=args.b, num_workers={value} ):")


@pytest.mark.parametrize(
    ("wanted", "calls", "there", "said"),
    [
        (WORKERS, [loader("args.jobs")], [J], "the script has an option for it: `--jobs 4`; else "),
        (WORKERS, [loader("self.args.jobs")], [Option("-j", "jobs")], "the script has an option for it: `-j 4`; else "),
        (WORKERS, [loader("jobs")], [J], ""),  # a name that may be anything
        (WORKERS, [loader("args.jobs"), loader("2")], [J], ""),
        (WORKERS, [loader("2")], [Option("--n-workers", "n")], LOOKS + "`--n-workers 4`; else "),
        (WORKERS, [], [Option("--num_workers", "x")], LOOKS + "`--num_workers 4`; else "),
        (WORKERS, [], [Option("--workers-per-host", "x")], ""),
        (NONE, [], [Option("--workers", "workers"), Option("--pin", "p", True)], LOOKS + "`--workers 0`; else "),
        (NONE, [], [Option("--pin-mem", "pin_mem", True, True)], ""),  # it is given, and cannot be taken back by itself
        (PINNED, [], [Option("--pin-mem", "pin_mem", True)], LOOKS + "`--pin-mem`; else "),
        (PINNED, [], [Option("--pin-mem", "pin_mem", True, True)], ""),
        (
            BOTH,
            [loader("args.jobs")],
            [J, Option("--persistent-workers", "p", True)],
            "the script has an option for it: `--jobs 4`, and one that looks like it: `--persistent-workers`; else ",
        ),
        (CAST, [], [Option("--amp", "amp", True)], LOOKS + "`--amp`; else "),
        (CAST, [], [Option("--amp-dtype", "a"), Option("--fp16", "fp16", True)], ""),
        (CAST, [], [Option("--fp16", "f", True), Option("--bf16", "b")], LOOKS + "`--bf16 …`; else "),
        (SCALED, [], [Option("--fp16", "f", True), Option("--bf16", "b", True)], LOOKS + "`--fp16`; else "),
        (LAYOUT, [], [Option("--channels-last", "c", True)], LOOKS + "`--channels-last`; else "),
        (FUSED, [], [Option("--use-fused", "f", True)], LOOKS + "`--use-fused`; else "),
        (CAPTURED, [], [Option("--mode", "m"), Option("--torchcompile", "t")], LOOKS + "`--torchcompile …`; else "),
        (change("no setting"), [], [Option("--compile", "c", True)], ""),
    ],
)
def test_an_option_is_named_first(wanted: Change, calls: list[Call], there: list[Option], said: str) -> None:
    assert with_option(wanted, calls, there).text == said + wanted.text


def test_a_change_without_a_setting_names_what_it_does() -> None:
    told = with_option(change("compile"), (), [Option("--compile", "c", True)], Setting("compile", False, True))
    assert told == change(LOOKS + "`--compile`; else compile")


def test_the_options_are_those_of_the_facts(tmp_path: Path) -> None:
    def of(facts: dict[str, Any], name: str) -> list[Option]:
        path = recorded(tmp_path / name, (None, [light(n, MS) for n in range(9)], {**CPU, **facts}))
        return measured(path, options).frame(options)

    row = {"name": "--amp", "dest": "amp", "switch": True, "on": False}
    assert of({"options": [row, {"name": "-x", "dest": "x"}]}, "some") == [
        Option("--amp", "amp", True),
        Option("-x", "x"),
    ]
    assert of({}, "none") == []
