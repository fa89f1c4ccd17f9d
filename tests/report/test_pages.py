"""The page, the terminal, the notebook and the answer of `dlprof try`: complete, within bounds, and safe to show."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import unicodedata
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
from jinja2 import DictLoader, Environment
from msgspec.structs import replace
from numpy.typing import NDArray

from dlprof.analysis.diagnosis import diagnose
from dlprof.analysis.rules import RULES
from dlprof.plain import NBSP
from dlprof.read.run import open_run
from dlprof.report import brief, html, looks, terminal, tried
from dlprof.result import CATEGORIES, Blame, Change, Fact, ForeignLoad, Outcome, Panel, Place, Result, RunInfo, TimePart
from dlprof.result.tried import Attempt, Gain, Tried, Verdict
from dlprof.trial.planning import named
from tests.fixtures import results
from tests.fixtures.pages import Page
from tests.fixtures.places import TRACES

# The page.


@pytest.fixture(scope="module")
def pages() -> dict[str, Page]:
    return {name: Page(html.render(make())) for name, make in results.ALL.items()}


def said(page: Page) -> str:
    return " ".join(page.text.replace(NBSP, " ").split())


@pytest.mark.parametrize("name", results.ALL)
def test_the_page_fetches_nothing_and_runs_no_script_but_its_own(pages: dict[str, Page], name: str) -> None:
    page = pages[name]
    ids = [a["id"] for _, a in page.elements if "id" in a]
    assert len(ids) == len(set(ids))
    loads = {"src", "srcset", "data", "action", "formaction", "poster", "background", "xlink:href"}
    for tag, attributes in page.elements:
        assert not loads & set(attributes), tag
        assert not any(a.startswith("on") for a in attributes), tag
        assert (attributes.get("href") or f"#{ids[0]}").partition("#")[::2] in [("", one) for one in ids]
    assert not {"link", "img", "iframe", "object", "embed", "form", "base"} & {tag for tag, _ in page.elements}
    [policy] = [a["content"] or "" for a in page.of("meta") if a.get("http-equiv") == "Content-Security-Policy"]
    assert [a.get("type") for a in page.of("script")] == ["application/json", None, None]
    digests = (base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in page.scripts[1:])
    parts = {p.split()[0]: set(p.split()[1:]) for p in policy.split(";")}
    assert (parts["default-src"], parts["script-src"]) == ({"'none'"}, {f"'sha256-{one}'" for one in digests})
    assert "connect-src" not in parts


@pytest.mark.parametrize("name", results.ALL)
def test_every_figure_has_its_data_and_words_and_the_page_its_landmarks(pages: dict[str, Page], name: str) -> None:
    page = pages[name]
    charts = [attributes for attributes in page.of("div") if attributes.get("class") == "chart"]
    assert charts or name == "empty"
    assert set(json.loads(page.scripts[0])["figures"]) == {(a["id"] or "").removeprefix("chart-") for a in charts}
    assert not set("<>&\u2028\u2029") & set(page.scripts[0])
    assert all(a.get("role") in ("img", "group") and len(a.get("aria-label") or "") > 10 for a in charts)
    labelled = {a["aria-labelledby"] for _, a in page.elements if "aria-labelledby" in a}
    assert labelled <= {a["id"] for _, a in page.elements if "id" in a}
    assert page.of("html") == [{"lang": "en"}]
    assert [len(page.of(tag)) for tag in ("main", "nav", "footer", "title")] == [1, 1, 1, 1]
    assert (page.headings[0], page.headings.count(1)) == (1, 1)
    assert all(after <= before + 1 for before, after in zip(page.headings, page.headings[1:], strict=False))


def test_the_page_holds_what_the_result_holds(pages: dict[str, Page]) -> None:
    words, result = said(pages["ddp"]), results.ddp()
    parts = [p for o in result.outcomes for p in (o.id, o.why or o.summary)]
    parts += [p for o in result.found for p in (o.title, *o.advice)]
    parts += [*(fact.value for fact in result.facts), result.run.warnings[0], "148.6 ms"]
    assert [part for part in parts if part.replace("`", "") not in words] == []
    assert "no rule could be checked" in pages["empty"].text
    assert "no rule could be checked" not in pages["healthy"].text
    assert pages["healthy"].of("article") == []
    facts = (Fact("Model", "parameters", "272474"), Fact("Model", "parameter bytes", "1089896"))
    others = (Fact("Loader", "batch size", "1024"), Fact("Software", "cudnn", "91900"))
    page = html.render(replace(results.healthy(), facts=facts + others))
    assert all(text in page for text in ("272,474", "1.09\u00a0MB", ">1024<", ">91900<"))


@pytest.mark.long
@pytest.mark.skipif(not (TRACES / "h200").is_dir(), reason="needs the reference traces")
def test_of_a_recording_it_says_what_is_known_and_why_the_device_was_traced_for_longer() -> None:
    words = said(Page(html.render(diagnose(open_run(TRACES / "h200" / "g02_resnet_layout"), RULES, jobs=1))))
    assert "2,313 samples/s" in words
    assert "nknown for this run" not in words
    assert "The span of 332.0 ms is longer than the 5 traced steps, 279.5 ms together: what the device" in words


def test_the_mean_of_the_ranks_is_set_apart_and_an_operator_of_that_name_is_not() -> None:
    operators = Panel("table", "Operators", (("mean", 3), ("add", 2)), columns=("operator", "calls"))
    marked = '<tr class="mean">'
    assert marked in html.render(results.ddp())
    assert marked not in html.render(replace(results.healthy(), panels=(operators,)))


# What the first screen says, in its order.
FIRST = {
    "training": (
        "ddp_resnet.py · 4 × NVIDIA H200 · 412 steady steps of 214.6 ms",
        "The change that gains most",
        "Set num_workers=6, persistent_workers=True.",
        "1.44 × faster (1.41 to 1.47 ×)",
        "A step: 214.6 → 148.6 ms",
        "The recorded run: 90.0 → 62.8 s",
        "predicted tried same losses",
        "train.py:61 31 % of each step waits for data on rank 1.",
        "data = Images()",
        "train = DataLoader(data, batch_size=64, num_workers=6, persistent_workers=True)",
        "dlprof try runs/ddp_resnet --change 1",
        "rank 2: the trace was cut short",
        "What the time is made of start-up 8 % training 80 % validation 8 % the end 4 %",
        "stepcomputation 58 %communication 24 %214.6 ms",
        "aftercomputation 84 %−66.0 ms148.6 ms",
        "Communication 50.4 → 4.43 ms",
        "Then each counted after those above it",
        "1.21 × 1.11 to 1.31148.6 → 122.9 ms",
        "If the training may change",
        "Looked at and healthy 5 checks",
        "Not measured: 2 checks",
        "Copy for an agent",
        "Open in Perfetto",
        "Where the step goes",
    ),
    "died": (
        "Why the job ended",
        "Set prefetch_factor=2.",
        "The job then needs about 36.4 GB of memory instead of 66 GB.",
        "Linux killed a loader worker: no memory was left.",
        "num_workers=2, prefetch_factor=2",
        "The command was ended by signal 9",
        "What the memory was made of",
        "endactivations 73 %input 18 %66 GB after−29.6 GB36.4 GB",
        "Parameters 6 GB Activations 48 GB Input 12 GB",
        "Looked at and healthy",
    ),
    "healthy": ("Healthy · no finding in 5 checks", "Computation takes 89 % of each step.", "What the time is made of"),
    "empty": ("Not known", "No steady step was recorded.", "no rule could be checked"),
}


@pytest.mark.parametrize("name", FIRST)
def test_the_first_screen_says_in_its_order_what_to_do_and_how_that_is_known(pages: dict[str, Page], name: str) -> None:
    words, at = said(pages[name]), 0
    for part in FIRST[name]:
        assert part in words[at:], words[at : at + 900]
        at = words.index(part, at)
    [*known] = [a["class"] for a in pages[name].of("i") if (a.get("class") or "").startswith("dot")][:3]
    assert known == (["dot predicted", "dot tried", "dot losses"] if name == "training" else [])
    now = [n for n, a in enumerate(pages[name].of("li")) if a.get("aria-current")]
    assert len(now) == (name == "training")


def test_what_an_agent_is_given_is_the_markdown_of_the_report() -> None:
    page = Page(html.render(results.hostile(), "runs/my run", named))
    assert json.loads(page.scripts[0])["agent"] == brief.markdown(results.hostile(), "runs/my run", named)


def test_findings_are_numbered_by_the_change_that_cures_them() -> None:
    result = results.ddp()
    waits, saves, batches = result.changes
    both = replace(waits, findings=(*waits.findings, *batches.findings))
    page = html.render(replace(result, changes=(saves, both)))
    cards = re.findall(
        r'<article class="finding" id="finding-(\d)".*?<span class="n" aria-hidden="true">(\d)<', page, re.S
    )
    ids = re.findall(r'<p class="what"><code>(\w+)</code>', page)
    assert cards == [("1", "1"), ("2", "2"), ("3", "2")]
    assert ids == ["checkpoint_stall", "input_wait", "slow_worker_batches"]
    assert "\\u25c0 finding 2" in page


def test_answers_are_sorted_by_what_they_are_worth() -> None:
    states = {
        "clear": (("a", "", 0.0), ("b", "", 0.2)),
        "not_measured": (("c", "x"), ("d", "y"), ("e", "z"), ("f", "y")),
    }
    clear = [replace(results.CLEAR[0], id=name, why=why, share=share) for name, why, share in states["clear"]]
    lacks = [replace(results.NOT_MEASURED[0], id=name, why=why) for name, why in states["not_measured"]]
    page = html.render(replace(results.healthy(), outcomes=(*clear, *lacks)))
    assert re.findall(r"<summary><code>(\w)</code>", page) == ["b", "a", "d", "f", "c", "e"]


def test_what_changes_the_training_has_a_section_after_the_findings(pages: dict[str, Page]) -> None:
    words = said(pages["training"])
    apart = words.index("If the training may change This time")
    assert words.index("Each saving is estimated alone") < apart
    assert apart < words.rindex("A larger batch would fit, and fill the GPU")
    assert words.index("save every 70 steps (now every 7th one) (changes the training)") < apart
    ids = [a["id"] for a in pages["training"].of("article")]
    assert ids == ["finding-1", "finding-2", "finding-3", "finding-training-1"]
    assert "Predicted with larger batches" in words[apart:]
    assert "If the training may change" not in pages["ddp"].text


def test_figures_over_the_runs_time_have_one_range() -> None:
    panels = [Panel("lines", f"{at}", ((at * 1e9, 1.0), ((at + 3) * 1e9, 2.0)), ("time_ns", "a")) for at in (1, 4)]
    page = Page(html.render(replace(results.healthy(), panels=(*panels, Panel("bars", "b", (("x", 99e9),))))))
    layouts = [figure["layout"] for figure in json.loads(page.scripts[0])["figures"].values()]
    assert [one["xaxis"]["range"] for one in layouts if one.get("meta") == {"axis": "time"}] == [[0, 7]] * 2


def test_attacks_are_shown_as_text(pages: dict[str, Page]) -> None:
    assert [attack for attack in results.ATTACKS[:9] if attack not in pages["hostile"].text] == []
    assert "\\u202eevil" in pages["hostile"].text
    page = Page(str(html._manual(results.MANUAL + "\n\n<b>x</b>")))
    assert [tag for tag, _ in page.elements] == ["p", "p", "code", "p", "ul", "li", "code", "li", "pre", "p", "p"]
    assert "<b>x</b>" in page.text


def test_the_scripts_of_the_page_are_the_vendored_ones_and_can_stand_in_a_page() -> None:
    folder = files("dlprof.report") / "page"
    bundle = (folder / "plotly-basic.min.js").read_bytes()
    assert hashlib.sha256(bundle).hexdigest() in (folder / "README.md").read_text(encoding="utf-8")
    for script in (bundle, (folder / "page.js").read_bytes()):
        assert not any(bad in script.lower() for bad in (b"</script", b"<!--", b"\r"))


def test_data_cannot_close_its_element_and_lists_of_several_figures_are_written_once() -> None:
    specs = {"</script><!--": ["<script>", "&lt;", "\u2028\u2029", 'quote"', None, 1.5]}
    text = str(html.data(specs))
    assert not set("<>&\u2028\u2029") & set(text)
    assert json.loads(text)["figures"] == specs
    times, short = [float(n) for n in range(html.PACKED)], [1.0, 2.0]
    shared = {name: {"data": [{"x": times, "y": [*times, place], "z": short}]} for place, name in enumerate("ab")}
    data = json.loads(str(html.data(shared)))
    assert data["lists"] == [times]
    traces = [data["figures"][name]["data"][0] for name in "ab"]
    assert [(t["x"], t["y"][-1], t["z"]) for t in traces] == [({"list": 0}, n, short) for n in (0, 1)]


def full(ranks: int) -> Result:
    """Return a result with as much of everything as the report ever holds of a job."""
    few = min(ranks, 8)
    name = "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<int>, at::detail::Array<char*>>"
    names = tuple(f"rank {r}" for r in range(few))
    times = tuple(tuple(1e9 * n + 1e4 * r for r in range(few + 1)) for n in range(2_000))
    readings = tuple(tuple(1e9 * n + 1e4 * r for r in range(few + 3)) for n in range(200))
    spans = tuple((f"rank {n % few} · device", 1e4 * n, 7e3 + n, name, "computation") for n in range(600 * few))
    panels = (
        Panel("lines", "Steps", times, ("time_ns", *names), "ns", steps=tuple(range(100_000, 102_000))),
        Panel("areas", "Parts", tuple(row[:6] for row in readings), ("time_ns", *CATEGORIES[:5]), "ns"),
        *(Panel("timeline", f"Step {n}", spans, unit="ns") for n in range(2)),
        *(Panel("lines", f"Sampled {n}", readings, ("time_ns", *names, "a", "b")) for n in range(7)),
        Panel("flame", "Stacks", tuple((n % 30, n, 2, f"{name} {n}", "own") for n in range(400)), unit="samples"),
        *(Panel("table", f"Table {n}", ((name, *range(9)),) * 64, tuple(map(str, range(10)))) for n in range(5)),
    )
    time = tuple(TimePart(r, c, 1e7, 1 / len(CATEGORIES)) for r in range(ranks) for c in CATEGORIES)
    blame = tuple(Blame(r, c, "host", 1e6, 0.01) for r in range(ranks) for c in range(8) if r != c)
    facts = tuple(Fact(f"Section {n % 9}", f"name {n}", name) for n in range(150))
    return replace(results.many(ranks), panels=panels, time=time, blame=blame, facts=facts)


@pytest.mark.parametrize(("ranks", "most"), [(8, 2_000_000), (256, 4_000_000)])
def test_a_page_keeps_to_its_size_however_much_was_recorded(ranks: int, most: int) -> None:
    assert len(html.render(full(ranks)).encode()) <= most


def test_a_template_is_kept_compiled_where_that_can_be_written(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    for folder in (kept, kept, tmp_path / "missing"):
        cache = html.Compiled(str(folder))
        environment = Environment(loader=DictLoader({"page": "<p>{{ word }}</p>"}), bytecode_cache=cache)
        assert environment.get_template("page").render(word="x") == "<p>x</p>"
        assert len(list(kept.iterdir())) == 1
    assert not (tmp_path / "missing").exists()


# Colours. What protanopia, deuteranopia and tritanopia make of linear RGB (Machado, Oliveira and Fernandes 2009).
EYES = (
    np.eye(3),
    np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]),
    np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]),
    np.array([[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]),
)
# Linear RGB to cones, and their cube roots to Oklab (Ottosson 2020), where distances are as they are seen.
TO_LMS = [
    [0.41222147, 0.53633254, 0.05144599],
    [0.2119035, 0.68069955, 0.10739696],
    [0.08830246, 0.28171884, 0.6299787],
]
TO_LAB = [[0.21045426, 0.79361778, -0.0040720], [1.9779985, -2.4285922, 0.45059371], [0.0259040, 0.7827718, -0.8086757]]


def linear(colour: str) -> NDArray[np.float64]:
    """Return a colour, "#4477aa", in linear RGB."""
    one = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    return np.where(one <= 0.04045, one / 12.92, ((one + 0.055) / 1.055) ** 2.4)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_passes_differ_from_all_else_and_from_each_other_to_every_eye(theme: str) -> None:
    names = list(looks.DRAWN)
    colours = np.array([linear(getattr(looks.DRAWN[name], theme)) for name in names])
    for eye in EYES:
        seen = np.cbrt(np.clip(colours @ eye.T, 0, 1) @ np.transpose(TO_LMS)) @ np.transpose(TO_LAB)
        apart = np.linalg.norm(seen[:, None] - seen[None], axis=2) + np.eye(len(names))
        # A just noticeable difference is about 0.02.
        assert [a for i, a in enumerate(names) if a in looks.PASSES and apart[i].min() < 0.03] == []


def test_every_category_is_drawn_and_none_like_another() -> None:
    assert tuple(looks.LOOKS) == CATEGORIES
    for kind in ("name", "light", "dark", "ansi", "glyph"):
        assert len({getattr(look, kind) for look in looks.LOOKS.values()}) == len(CATEGORIES), kind
    for kind in ("name", "light", "dark"):
        assert len({getattr(look, kind) for look in looks.DRAWN.values()}) == len(looks.DRAWN), kind


# The terminal.


def acting(text: str) -> set[str]:
    """Return the characters of a text that a terminal obeys."""
    return {c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")} - {"\n"}


def shown_width(line: str) -> int:
    wide = sum(unicodedata.east_asian_width(c) in "WF" for c in line)
    return len(line) + wide - sum(1 for c in line if unicodedata.combining(c))


@pytest.mark.parametrize("name", results.ALL)
def test_every_line_fits_and_nothing_in_it_acts(name: str) -> None:
    result = results.ALL[name]()
    for width in (40, 80, 132):
        text = terminal.render(result, width)
        assert max(map(shown_width, text.split("\n"))) <= width
        assert acting(text) == set()
    coloured = terminal.render(result, 132, colour=True)
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == text
    assert "\x1b[" in coloured


@pytest.mark.parametrize("name", results.ALL)
@pytest.mark.parametrize("width", [40, 80, 110])
def test_the_first_screen_fits_and_nothing_in_it_acts(name: str, width: int) -> None:
    text = terminal.first(results.ALL[name](), "runs/x", named, width)
    lines = text.split("\n")
    assert max(map(shown_width, lines)) <= width
    assert len(lines) - 1 <= (terminal.MOST_LINES if width > 40 else terminal.MOST_LINES + 8)
    assert acting(text) == set()
    assert lines[0].strip()


def test_the_first_screen_says_what_to_do_before_all_else() -> None:
    lines = [line.strip() for line in terminal.first(results.training(), "runs/x", named, 110).split("\n")]
    order = (
        "Set num_workers=6, persistent_workers=True.",
        "● 1.44 × faster (1.41 to 1.47, tried, same losses): a step 214.6 → 148.6 ms, the run 90.0 → 62.8 s",
        "31 % of each step waits for data on rank 1.",
        "train.py:61 in main: train = DataLoader(data, batch_size=64, num_workers=2)",
        "+    train = DataLoader(data, batch_size=64, num_workers=6, persistent_workers=True)",
        "Try it:  dlprof try runs/x --change 1",
    )
    found = [lines.index(line) for line in order]
    assert found == sorted(found)
    rest = [line.split()[0] for line in lines[found[-1] + 1 :] if line]
    assert rest == ["Ranks", "step", "after", "run", "2", "3", "If", "Healthy:", "More:"]


def test_the_diagnosis_comes_first_then_findings_by_size() -> None:
    text = terminal.render(results.ddp(), 200)
    assert [line.strip() for line in text.split("\n")[:4]] == [
        "ddp_resnet.py · 4 × NVIDIA H200 · 412 steady steps of 214.6 ms",
        "",
        "31 % of each step waits for data on rank 1.",
        "Fixing it at train.py:61 would make this job 1.44 × faster.",
    ]
    assert re.findall(r"^  (\d)  (\w+) +(−\S+ ms) +(\S+ ×)$", text, re.M) == [
        ("1", "input_wait", "−66.0 ms", "1.44 ×"),
        ("2", "checkpoint_stall", "−25.7 ms", "1.14 ×"),
        ("3", "slow_worker_batches", "−3.10 ms", "1.01 ×"),
    ]
    for part in (
        "every 7 steps (rank 0)",
        "→ DataLoader(train, batch_size=64, num_workers=6",
        "clear: 5 rules · not measured: 2 (the report says why) · errors: slow_link2",
        "1.04 × as long",
    ):
        assert part in text


def test_what_changes_the_training_comes_after_the_cures_and_without_a_number() -> None:
    text = terminal.render(results.training(), 200)
    cures, heading, apart = text.partition("  If the training may change:\n")
    assert heading
    plain = terminal.render(results.ddp(), 200)
    before = plain.partition("\n  clear:")[0].replace("Save less often, or with torch", "torch")
    assert cures == before.replace("async_save.", "async_save") + "\n"
    assert "All of these together: at most 1.79 × faster (−94.8 ms)." in cures
    assert apart.startswith("  ·  memory_headroom   −100.0 ms    1.87 ×\n     A larger batch would fit")
    assert "     → batch_size=96 (is 64)\n" in apart
    assert heading not in plain
    assert "save every 70" not in text  # the first change is the cure


def test_a_bar_a_rank_divided_in_proportion_and_of_many_ranks_the_odd_one() -> None:
    glyphs = re.escape("".join(look.glyph for look in looks.LOOKS.values()))
    bars = re.findall(rf"^  rank \d  ([{glyphs}]+)   ", terminal.render(results.ddp(), 120), re.M)
    assert [len(bar) for bar in bars] == [40] * 4
    assert abs(bars[0].count("█") - 0.58 * 40) <= 1
    text = terminal.render(results.healthy())
    assert "Computation takes 89 % of each step." in text
    assert ("→" in text, len(re.findall(r"^  rank \d ", text, re.M))) == (False, 2)
    text = terminal.render(results.many(64))
    assert [int(r) for r in re.findall(r"^  rank (\d+) ", text, re.M)] == [0, 1, 2, 3, 4, 5, 6, 7, 37]
    assert "… 55 more: computation 59 % to 61 %" in text


def test_the_first_place_and_the_edit_are_under_a_finding_and_a_long_call_takes_two_lines() -> None:
    lines = [line.strip() for line in terminal.render(results.ddp(), 120).split("\n")]
    at = lines.index("at train.py:61 in main: train = DataLoader(data, batch_size=64, num_workers=2)")
    assert not any("data.py:41" in line for line in lines)
    edits = [n for n, line in enumerate(lines) if line.startswith(("-  ", "+  "))]
    assert at < next(n for n, line in enumerate(lines) if line.startswith("→ DataLoader(train")) < edits[0]
    assert [lines[n].split(" ", 1)[1].strip() for n in edits] == [
        "train = DataLoader(data, batch_size=64, num_workers=2)",
        "train = DataLoader(data, batch_size=64, num_workers=6, persistent_workers=True)",
    ]
    call = Place("train.py", 61, "main", what=f"DataLoader( data, {', '.join(f'option_{n}={n}' for n in range(20))}, )")
    long = replace(results.ddp(), outcomes=(replace(results.ddp().found[0], where=(call,)),))
    lines = terminal.render(long, 60).split("\n")
    at = next(n for n, line in enumerate(lines) if line.strip().startswith("at train.py:61 in main: DataLoader(data,"))
    assert (lines[at + 1].strip()[:7], lines[at + 1][-1]) == ("option_", "…")
    assert not any("option" in line for line in lines[at + 2 :])


def test_rules_are_not_clear_where_other_programs_used_the_cores() -> None:
    load = ForeignLoad("node-1", cores=2.0, used=2.0, foreign=1.0, waited=None, disturbs=True)
    text = terminal.render(replace(results.healthy(), foreign_load=load))
    assert ("clear beside other programs: " in text, "clear: " in text) == (True, False)
    other = results.outcome("x", "does_not_apply", "X")
    text = terminal.render(replace(results.healthy(), outcomes=(*results.healthy().outcomes, other)))
    assert ("clear: " in text, "does not apply: 1" in text) == (True, True)


# The notebook.


def test_a_cell_has_a_row_a_finding_in_escaped_text_and_warnings_as_a_list() -> None:
    found = Outcome("x", "found", "<script>", saving_ns=2e6, share=0.5, speedup=2.0, changes=(Change("do <b>"),))
    page = html.cell(Result(run=RunInfo("run"), window=None, outcomes=(found,)))
    assert (page.count("<tr>"), "<script" in page) == (2, False)
    assert all(text in page for text in ("&lt;script&gt;", "do &lt;b&gt;"))
    cures, _, apart = html.cell(results.training()).partition("<th>if the training may change</th>")
    assert (cures.count("<tr>"), apart.count("<tr>")) == (1 + 3 + 1, 1)
    assert ["batch_size=96" in part for part in (cures, apart)] == [False, True]
    assert "save every 70 steps (now every 7th one) (changes the training)" in cures
    page = html.cell(Result(run=RunInfo("run", warnings=("rank 1 is not here",)), window=None))
    assert ("<li>rank 1 is not here</li>" in page, "<table>" in page) == (True, False)


# What was tried.

WORKERS = Attempt(
    {"loader.num_workers": 4},
    "gain",
    findings=("input_wait",),
    predicted=1.44,
    measured=Gain(1.412, 1.38, 1.44, 3),
    epochs=Gain(1.3, 1.2, 1.4, 3),
    before_ns=214.6e6,
    after_ns=152e6,
)
FREEZE = Attempt({"gc.freeze": True}, "no_gain", measured=Gain(1.0, 0.99, 1.01, 3))
UNCLEAR = replace(FREEZE, verdict="unclear")
BEST = Tried("complete", (WORKERS, FREEZE), best=WORKERS, runs=7, steps=30, seconds=100)
DIFF = "--- a/train.py\n+++ b/train.py\n-    x = '</script><b>'\n"


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (BEST, "Tried: loader.num_workers=4: 1.41 × measured (1.38 to 1.44), 1.44 × predicted."),
        (replace(BEST, best=replace(WORKERS, predicted=None, numerics=True)), "other numbers"),
        (Tried("complete", (FREEZE,)), "nothing to gain from 1 change"),
        (Tried("complete", (FREEZE, replace(FREEZE, verdict="slower"))), "nothing to gain from 2 changes"),
        (Tried("complete"), "no change could be set"),
        (Tried("failed", why="no data"), "did not run again: no data"),
        (
            Tried("interrupted", (FREEZE, Attempt({"a.b": 1}, "not_tried"))),
            "faster; the trial was interrupted; not clear or not tried: a.b=1.",
        ),
        (Tried("out_of_time", (UNCLEAR,)), "faster; the trial ran out of time; not clear or not tried: gc.freeze"),
        (Tried("complete", (UNCLEAR,)), "nothing was found to be faster; not clear or not tried: gc.freeze"),
    ],
    ids=lambda case: case if isinstance(case, str) else "",
)
def test_the_answer_says_what_was_gained_and_what_is_not_known(made: Tried, words: str) -> None:
    sentence = tried.sentence(made).replace(NBSP, " ")
    assert words in sentence
    assert ("predicted" in sentence) == (made is BEST)


@pytest.mark.parametrize(
    ("gain", "words"),
    [
        (Gain(1.5, 1.4, 1.6, 3), "1.50 × (1.40 to 1.60)"),
        (Gain(1.5), "1.50 × (once)"),
        (Gain(1e9, 1e3, 1e12, 2), "over 100"),
    ],
)
def test_a_gain_with_its_interval(gain: Gain, words: str) -> None:
    assert words in tried.measured(gain).replace(NBSP, " ")


@pytest.mark.parametrize("verdict", ["gain", "no_gain", "slower", "unclear", "not_counted", "not_tried"])
def test_every_verdict_has_words(verdict: Verdict) -> None:
    text = tried.row(Attempt({"gc.freeze": True}, verdict, "because"))
    assert (text[:16], text[-9:], "_" in text) == ("gc.freeze=True: ", ", because", False)


def test_every_report_has_what_was_tried_and_the_edit_as_text() -> None:
    result = replace(results.ddp(), tried=replace(BEST, diff=DIFF))
    assert "1.41 × measured (1.38 to 1.44), 1.44 × predicted" in terminal.render(result, 110)
    page = html.render(result)
    for text, there in (
        ('id="tried"', True),
        ("loader.num_workers=4", True),
        ("+++ b/", True),
        ("</script><b>", False),
    ):
        assert (text in page) == there
    assert 'id="tried"' not in html.render(results.ddp())
    made = tried.panel(replace(BEST, combinations=(FREEZE,)))
    assert [r[0] for r in made.rows] == ["loader.num_workers=4", "gc.freeze=True", "gc.freeze=True"]
    assert {len(r) for r in made.rows} == {len(made.columns)}


def test_the_text_of_dlprof_try_begins_with_the_answer_fits_and_is_safe() -> None:
    odd = Attempt({"env.\x1b[31mODD": "\u202e"}, "not_counted", "the job ended with exit code 1: \x1b[2J" + "x" * 300)
    made = Tried("out_of_time", (WORKERS, odd), (WORKERS,), WORKERS, "", 7, 30, 100, ("it was recorded on node-1",))
    for width in (40, 80, 132):
        text = terminal.trial(made, width)
        assert (max(map(len, text.splitlines())) <= width, acting(text)) == (True, set())
    lines = text.splitlines()
    assert lines[0].startswith("Tried: loader.num_workers=4: 1.41 × measured (1.38 to")
    assert lines[1] == "  214.6 ms → 152.0 ms a step"
    assert "  7 runs of 30 steps · 1.7 min · out of time" in lines
    assert {"  alone", "  together, against the best before"} <= set(lines)
    assert lines[-1] == "  ! it was recorded on node-1"
    assert terminal.trial(replace(made, diff=DIFF), 80).endswith("\n" + DIFF)
    nothing = terminal.trial(Tried("complete"), 80)
    assert nothing.splitlines() == ["Tried: nothing, as no change could be set from outside."]
