"""What the syntax of a script's files says: causal masks, and settings that are switched on."""

from __future__ import annotations

import ast
import re

import pytest

from dlprof.analysis.source.statements import (
    calling,
    causal_masks,
    contiguous_parts,
    filtered_after,
    groups_made,
    independent_turns,
    made_in,
    parts_taken,
    switched_on,
    telling,
)

CALLS = """
def forward(q, k, v, mask):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
"""
TRIL = "torch.tril(torch.ones(n, n, dtype=torch.bool))"


def masks(*statements: str, calls: str = CALLS) -> list[int]:
    text = "\n".join((calls, *statements))
    return [place.line for place in causal_masks({"train.py": ast.parse(text)}, "train.py", 3)]


@pytest.mark.parametrize(
    "statement",
    [
        f"mask = {TRIL}",
        f"self.mask = {TRIL}[None, None].to(device)",
        "mask = torch.ones(n, n).tril().bool()",
        "mask = ~torch.triu(torch.ones(n, n), diagonal=1).bool()",
        "mask = torch.full((n, n), float('…')).triu(1)",
        "mask = torch.zeros(n, n).masked_fill(torch.tril(torch.ones(n, n)) == 0, float('…'))",
        f"self.register_buffer('…', None if args.fixed else {TRIL}, persistent=False)",
        "mask = nn.Transformer.generate_square_subsequent_mask(n)",
    ],
)
def test_a_causal_mask_in_any_form(statement: str) -> None:
    assert masks(statement) == [5]
    assert masks(statement, "block(x, mask=self.mask[:n, :n])", "other_mask = None") == [5]


@pytest.mark.parametrize(
    "statements",
    [
        (),
        ("mask = batch['…']",),
        ("for x, mask in loader: pass",),
        ("x, mask = batch",),
        (f"mask = {TRIL} & padded[:, None, None]",),
        (f"mask = {TRIL}", "mask &= padded"),
        (f"mask = {TRIL}", "block(x, mask=tokens != 0)"),
        (f"mask = {TRIL}", "padding_mask = tokens.ne(0)"),
        # A window, a triangle without the token itself, and one that sees what comes later.
        ("mask = torch.ones(n, n).tril() * torch.ones(n, n).triu(-8)",),
        ("mask = torch.ones(n, n).tril(-1)",),
        ("mask = torch.triu(torch.ones(n, n))",),
        ("mask = made(n)",),
    ],
)
def test_another_mask_or_one_that_is_not_known(statements: tuple[str, ...]) -> None:
    assert masks(*statements) == []


def test_only_what_the_line_is_given_counts() -> None:
    assert masks(f"mask = {TRIL}", calls=CALLS.replace("attn_mask=mask", "attn_mask=bias(x)")) == []
    assert masks(f"mask = {TRIL}", calls=CALLS.replace("attn_mask=mask", "is_causal=True")) == []
    assert masks(f"mask = {TRIL}", calls=CALLS.replace("attn_mask=mask", "mask")) == [5]


@pytest.mark.parametrize(
    ("line", "on"),
    [
        ("torch.use_deterministic_algorithms(True, warn_only=True)", True),
        ("torch.use_deterministic_algorithms(mode=not args.fast)", True),
        ("Trainer(model, deterministic=True)", True),
        ("torch.use_deterministic_algorithms(False)", False),
        ("Trainer(model, deterministic=None)", False),
        ("torch.manual_seed(1)", False),
    ],
)
def test_the_lines_that_switch_a_setting_on(line: str, on: bool) -> None:
    found = switched_on({"a.py": ast.parse(line)}, "use_deterministic_algorithms", "deterministic")
    assert [(place.file, place.line, place.what) for place in found] == ([("a.py", 1, line)] if on else [])


MADE = """
def features(rows):
    for row in rows:
        yield {**row, "": spectrum(row)}
"""
KEEPS = """
def short(rows):
    for row in rows:
        if len(row) < 9:
            yield row
"""
SKIPS = """
def short(rows):
    for row in rows:
        if len(row) > 9:
            continue
        yield row
"""
CHANGES = """
def short(rows):
    for row in rows:
        if len(row) > 9:
            row = row[:9]
        yield row
"""
BATCHES = """
def short(rows):
    kept = []
    for row in rows:
        kept.append(row)
        if len(kept) == 9:
            yield kept
            kept = []
"""


@pytest.mark.parametrize(
    ("generator", "chain", "line"),
    [
        (KEEPS, "rows = short(features(rows))", 1),
        (SKIPS, "rows = short(shuffled(features(rows)))", 1),
        (KEEPS, "rows = features(short(rows))", 0),  # it filters first
        (CHANGES, "rows = short(features(rows))", 0),  # it hands on all
        (BATCHES, "rows = short(features(rows))", 0),
    ],
)
def test_what_is_made_before_a_filter_is_known_by_the_chain(generator: str, chain: str, line: int) -> None:
    found = filtered_after({"a.py": ast.parse(chain + MADE + generator)}, "features", "short")
    assert [place.line for place in found] == [line] * bool(line)


CLIPS = """
class Clips(Dataset):
    def __init__(self):
        self.rest = frames[1:]
    def __getitem__(self, index):
        first, last = self.spans[index]
        {}
        {}
        return clip, label
class Others(Dataset):
    def __getitem__(self, index):
        return frames[1:]
def collate(items):
    return [one[:last] for one in items]
"""


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        (("label = 0", "clip = frames[first:last]"), [8]),
        (("name = names[1:]", "clip = torch.from_numpy(frames)[:, first:last].permute(1, 0)"), [8, 7]),
        (("label = labels[first:last]", "clip = frames.narrow(0, first, last)"), [7, 8]),
        # No parts, or copies of them: the collate function is next.
        (("label = self.labels[index]", "clip = torch.stack([one[1:] for one in frames])"), [14]),
        (("label = 0", "clip = frames[first:last].clone()"), [14]),
        (("label = 0", "clip = decode(self.paths[first:last])"), [14]),
    ],
)
def test_parts_that_a_data_set_takes(lines: tuple[str, str], found: list[int]) -> None:
    trees = {"train.py": ast.parse(CLIPS.format(*lines))}
    assert [place.line for place in parts_taken(trees, "Clips", "collate")] == found


def test_a_data_set_without_parts_is_named_by_its_method() -> None:
    trees = {"train.py": ast.parse(CLIPS.format("label = 0", "clip = frames.view(2, 3)"))}
    assert [(place.line, place.function) for place in parts_taken(trees, "Clips")] == [(5, "Clips.__getitem__")]
    assert parts_taken(trees, "Subset", "default_collate") == ()


GROUPED = """
def groups_of(model, settings):
    found = {}
    for name, p in model.named_parameters():
        found[name] = {"…": [p], "lr": settings.lr}
    return list(found.values())
"""


@pytest.mark.parametrize(
    ("made", "line"),
    [
        ("optimizer = torch.optim.AdamW(groups_of(model, args), lr=0.1)", 5),
        ("optimizer = AdamW(params=self.trainer.groups_of(model, args))", 5),
        ("optimizer = AdamW([{'…': p} for p in model.parameters()])", 7),
        ("optimizer = AdamW(model.parameters())", None),
        ("optimizer = Adam(groups_of(model, args))", None),
    ],
)
def test_where_the_groups_of_an_optimizer_are_made(made: str, line: int | None) -> None:
    places = groups_made({"train.py": ast.parse(GROUPED + made)}, "AdamW")
    assert [place.line for place in places] == ([] if line is None else [line])


@pytest.mark.parametrize(
    ("text", "lines"),
    [("tracemalloc.start(10)", [1]), ("start()", [1]), ("timer.start()", []), ("x = 1\nsys.settrace(f)", [2])],
)
def test_the_lines_that_call_a_function(text: str, lines: list[int]) -> None:
    found = calling({"train.py": ast.parse(text)}, "tracemalloc.start", "sys.settrace")
    assert [place.line for place in found] == lines


TURNS: list[tuple[str, bool | None]] = [
    ("for t in range(n):\n    out.append(model(x[:, t]))", False),
    ("for t in range(n):\n    out.append(model(heard[:, : t + 1], memory)[:, -1])", True),
    ("for t in range(n):\n    out[:, t] = self.encode(x[:, t])", False),
    ("for image in images:\n    total = total + score(model(image[None]))", False),
    ("for image in images:\n    total += score(model(image[None]))", False),
    ("for image in images:\n    small = resize(image)\n    out.append(model(small))", False),
    ("out = torch.stack([self.choose(view, g) for view, g in zip(views, noise)])", False),
    ("out = torch.stack(list(map(str, (model(one) for one in images))))", False),
    ("for t in range(n):\n    h = cell(x[:, t], h)", None),  # a recurrence
    ("for t in range(n):\n    out.append(model(out[-1]))", None),
    ("for t in range(n):\n    last = model(notes)\n    notes = torch.cat([notes, last[:, t:]], 1)", None),
    ("for layer in self.layers:\n    x = layer(x)", None),
    ("for layer in self.layers:\n    out.append(layer(x))", None),  # other weights in each turn
    ("for _ in range(n):\n    out.append(model(x))", None),
    ("for x in data:\n    loss = model(x)\n    loss.backward()", None),  # that of the training
    ("for x in loader:\n    out.append(model(x))", None),
    ("for piece in batch.chunk(4):\n    out.append(model(piece))", None),  # micro-batches
    ("for x in data:\n    yield model(x)", None),
    ("out = model(x)", None),
]


@pytest.mark.parametrize(("code", "grows"), TURNS)
def test_turns_of_a_loop_that_do_not_need_each_other(code: str, grows: bool | None) -> None:
    tree = ast.parse(code)
    line = next(
        n for n, text in enumerate(code.split("\n"), 1) if re.search(r"(model|cell|layer|encode|choose)\(", text)
    )
    found = independent_turns({"train.py": tree}, "train.py", line)
    assert (found.grows if found else None) == grows
    assert independent_turns({}, "train.py", line) is None


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("ids = ids[rank * per:(rank + 1) * per]", [1]),
        ("x = 1\nmine = batch[self.rank * n : self.rank * n + n]", [2]),
        ("mine = np.array_split(files, world)[dist.get_rank()]", [1]),
        ("mine = x.chunk(size)[local_rank]", [1]),
        ("ids = ids[rank::world]", []),  # in turn
        ("ids = ids[rank * per::world]", []),
        ("row = rows[rank]", []),
        ("x = x[k * n:(k + 1) * n]", []),
        ("x = x[frank * n:]", []),
    ],
)
def test_where_a_process_takes_its_part_of_a_row(source: str, lines: list[int]) -> None:
    assert [place.line for place in contiguous_parts({"a.py": ast.parse(source)})] == lines


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("self.table = nn.Embedding(9, 2)\nself.other = nn.Embedding(9, 2)", [1]),
        ("table = torch.nn.EmbeddingBag(9, 2)", [1]),
        ("self.table = nn.Linear(9, 2)", []),
        ("self.table = [nn.Embedding(9, 2)]", []),
    ],
)
def test_where_an_attribute_is_made(source: str, lines: list[int]) -> None:
    found = made_in({"a.py": ast.parse(source)}, "table", "Embedding", "EmbeddingBag")
    assert [place.line for place in found] == lines


@pytest.mark.parametrize(
    ("name", "lines"), [("padding='…'", [2]), ("padding", [1, 2]), ("tokenizer", [2]), ("padding='max'", [])]
)
def test_what_a_script_tells_a_library(name: str, lines: list[int]) -> None:
    trees = {"train.py": ast.parse("nn.Conv2d(3, 8, 3, padding=1)\ntokenizer(texts, padding='…')")}
    assert [place.line for place in telling(trees, (name,))] == lines
