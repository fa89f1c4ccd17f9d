"""How many samples and tokens batches hold, and of what they are made: within bounds, without the script's code."""

from __future__ import annotations

import sys
from collections import UserDict, namedtuple
from pathlib import Path
from time import perf_counter_ns
from types import SimpleNamespace
from typing import Any

import pytest

from dlprof.record.loaders import BatchSize, Padding, Pass, lengths_of, look_at, samples_of, size_of
from tests.fixtures.jobs import COMPILES_NOTHING, facts, record

torch = pytest.importorskip("torch", reason="recording needs torch")

Pair = namedtuple("Pair", "image label")


def passing(batch_size: int | None = None, length: int | None = None) -> Pass:
    return Pass(SimpleNamespace(settings={"batch_size": batch_size, "dataset_length": length}), 0, 0)  # type: ignore[arg-type]


def images(n: int) -> Any:
    return torch.zeros(n, 3, 2, 2)


@pytest.mark.parametrize(
    ("batch", "of"),
    [
        ([images(4), torch.zeros(4)], 4),
        (Pair(images(4), torch.zeros(4)), 4),
        ({"input_ids": torch.zeros(4, 9, dtype=torch.int64)}, 4),
        (UserDict(input_ids=torch.zeros(4, 9, dtype=torch.int64)), 4),
        (images(4), 4),
        # What does not show its samples has as many as the loader's batches.
        ([[torch.zeros(3, 2, 2), torch.zeros(3, 5, 5)], [{"boxes": torch.zeros(7, 4)}]], 4),
        (["a.jpg", "b.jpg"], 4),
        (SimpleNamespace(x=torch.zeros(90, 3)), 4),
        (torch.tensor(3.0), 4),
    ],
)
def test_batches_of_a_loader_with_a_batch_size(batch: object, of: int) -> None:
    assert samples_of(batch, passing(4)) == of


def test_a_data_set_that_is_smaller_than_a_batch_is_one() -> None:
    over = passing(4, length=3)
    assert [samples_of([images(n)], over) for n in (3, 3)] == [3, 3]


@pytest.mark.parametrize(
    ("batch", "of"),
    [
        ([images(6), torch.zeros(6)], 6),
        ([images(6), torch.zeros(6), torch.tensor(3.0)], -1),
        ([images(6), torch.zeros(5)], -1),
        ([torch.zeros(0, 2)], -1),
        ("text", -1),
        ([], -1),
    ],
)
def test_batches_of_a_loader_without_one_must_agree(batch: object, of: int) -> None:
    assert samples_of(batch, passing()) == of


def test_batches_of_a_bucketing_sampler_are_counted_one_by_one() -> None:
    over = passing()
    assert [samples_of({"x": torch.zeros(n, 5), "n": torch.zeros(n)}, over) for n in (6, 9, 2)] == [6, 9, 2]


def test_a_pass_whose_loader_was_not_seen_counts_by_its_tensors() -> None:
    assert samples_of([images(5), torch.zeros(5)], Pass(None, 0, 0)) == 5


@pytest.mark.parametrize(
    ("first", "shape", "tokens"),
    [
        (torch.zeros(8, 16, dtype=torch.int64), 8, 128),
        (torch.zeros(8, 16), 8, 0),
        (torch.zeros(8, 3, 4, 4, dtype=torch.uint8), 8, 0),
        (torch.zeros(8, dtype=torch.int64), 8, 0),
        (torch.tensor(3), -1, 0),
        (torch.nn.Parameter(torch.zeros(2, 2)), -1, 0),
        (torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]), -1, 0),
        ({"x": torch.zeros(8)}, -1, 0),
        (None, -1, 0),
    ],
)
def test_what_a_module_gets(first: Any, shape: int, tokens: int) -> None:
    assert look_at(first) == (shape, tokens)


class Sample:
    """As libraries make them: tensors in attributes, one of them a ring."""

    def __init__(self) -> None:
        self.x, self.y, self.itself = torch.zeros(3), [torch.zeros(2, dtype=torch.int64)], self

    def __len__(self) -> int:
        raise AssertionError("called")

    def __getattr__(self, _: str) -> Any:
        raise AssertionError("asked")


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (torch.zeros(4, 8), (1, 128)),
        ([torch.zeros(2), {"a": torch.zeros(1, dtype=torch.uint8), "b": ("text", 3)}], (2, 9)),
        (UserDict(a=torch.zeros(2)), (1, 8)),
        (torch.nn.Parameter(torch.zeros(2)), (1, 0)),
        (7, (0, 0)),
        (list(range(5_000)), (-1, -1)),
        ([torch.zeros(2).to_sparse(), torch.zeros(2)], (2, 8)),
    ],
)
def test_tensors_are_counted_with_their_bytes(batch: object, size: tuple[int, int]) -> None:
    assert size_of(batch) == size


def test_attributes_are_looked_at_and_not_asked_for() -> None:
    assert size_of(Sample()) == (2, 28)


def test_the_first_batches_are_looked_at_and_then_few() -> None:
    batches = BatchSize()
    seen = [batches.see(torch.zeros(n)) for n in range(1, 65)]
    assert sorted(set(seen)) == [(1, 4 * n) for n in (1, 2, 3, 4, 32, 64)]


def padded(*lengths: int, to: int = 40, left: bool = False) -> tuple[Any, Any]:
    """Return ids of rows of these lengths, padded with zeros, and the mask that transformers make of it."""
    places = torch.arange(to).expand(len(lengths), -1)
    ends = torch.tensor(lengths)[:, None]
    mask = (places >= to - ends if left else places < ends).long()
    return torch.randint(5, 900, mask.shape, generator=torch.Generator().manual_seed(0)) * mask, mask


LENGTHS = [40, 3, 17, 8]
IDS, MASK = padded(*LENGTHS)
LEFT_IDS, LEFT_MASK = padded(*LENGTHS, left=True)
FRAMES = torch.zeros(4, 40, 3)
TYPES = (torch.arange(40) >= 20).long() * MASK  # of pairs of sentences: 0, then 1, then padding
# Of a prompt of two tokens nothing is learnt, nor of padding.
LABELS = IDS.masked_fill((MASK == 0) | (torch.arange(40) < 2), -100)


@pytest.mark.parametrize(
    ("batch", "pads", "source"),
    [
        ({"input_ids": IDS, "attention_mask": MASK, "labels": torch.zeros(4)}, None, "attention_mask"),
        (UserDict(input_ids=LEFT_IDS, attention_mask=LEFT_MASK), None, "attention_mask"),
        ({"input_ids": IDS, "length": torch.full((4,), 40), "attention_mask": MASK}, None, "attention_mask"),
        ({"token_type_ids": TYPES, "input_ids": IDS, "attention_mask": MASK}, None, "attention_mask"),
        ({"x": FRAMES, "src_key_padding_mask": MASK == 0}, None, "src_key_padding_mask"),
        ({"x": FRAMES, "padding_mask": 1 - MASK}, None, "padding_mask"),
        ((IDS, MASK, torch.zeros(4, dtype=torch.long)), None, "mask"),
        ([FRAMES, MASK == 1], None, "mask"),
        ([FRAMES, [MASK == 0]], None, "mask"),
        ({"x": FRAMES, "x_len": torch.tensor(LENGTHS), "y": torch.zeros(4, 9)}, None, "x_len"),
        ((IDS, torch.tensor([0, 1, 0, 1])), (0,), "padding_idx"),
        ((LEFT_IDS, torch.tensor([0, 1, 0, 1])), (1, 0), "padding_idx"),
        ((IDS, torch.tensor([0, 1, 0, 1])), (), "ends"),
        ({"input_ids": LEFT_IDS}, (), "ends"),
        ({"input_ids": torch.randint(5, 9, (4, 40)), "labels": LABELS}, (), "labels"),
    ],
)
def test_what_shows_the_lengths_of_rows(batch: Any, pads: tuple[int, ...] | None, source: str) -> None:
    assert lengths_of(batch, pads) == (source, 40, LENGTHS)


def test_rows_without_padding_are_seen_as_such() -> None:
    ids = torch.randint(5, 900, (4, 40), generator=torch.Generator().manual_seed(1))
    for batch, pads in (
        ({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, None),
        ((ids,), (0,)),
        ((ids,), ()),
    ):
        found = lengths_of(batch, pads)
        assert found is not None
        assert (found[1], sum(found[2]) >= 4 * 40 - 4) == (40, True)


@pytest.mark.parametrize(
    "batch",
    [
        (images(4), torch.tensor([1, 0, 2, 1])),
        (FRAMES, torch.randint(0, 2, (4, 40), generator=torch.Generator().manual_seed(1)).bool()),  # hidden at random
        (IDS, TYPES),
        {"x": FRAMES, "x_len": torch.tensor([41, 3, 17, 8])},  # of something else
        {"input_ids": IDS.to("meta"), "attention_mask": MASK.to("meta")},  # on a device: it would have to be waited for
        ["text"],
        None,
    ],
)
def test_what_shows_no_lengths(batch: Any) -> None:
    assert lengths_of(batch) is None


def test_ids_on_a_device_are_not_read() -> None:
    assert lengths_of((IDS.to("meta"),), (0,)) is None


def test_large_batches_are_read_in_parts_that_need_one_thread() -> None:
    from torch.utils import _python_dispatch

    made: list[int] = []
    modes: Any = _python_dispatch

    class Sizes(modes.TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and not func.is_view:
                made.append(out.numel())
            return out

    ids, mask = padded(*range(1, 301), to=1_000)
    with Sizes():
        assert lengths_of((ids, mask)) == ("mask", 1_000, list(range(1, 257)))
        assert lengths_of((ids,), (0,)) == ("padding_idx", 1_000, list(range(1, 257)))
    assert 10_000 < max(made) < 32_768  # at::internal::GRAIN_SIZE


def test_batches_are_looked_at_seldom_and_not_while_operators_are_traced() -> None:
    padding = Padding()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        padding.look((IDS, MASK), 1, [])
    assert (padding.seen, padding.due_ns) == ([], 0)
    assert not any(event.key.startswith("aten::") for event in profile.key_averages())
    for step in range(64):
        assert padding.due_ns < sys.maxsize
        began = perf_counter_ns()
        padding.look((IDS, MASK), step, [])
        ended = perf_counter_ns()
        assert ended < padding.due_ns < ended + 400 * (ended - began) or step == 63
    assert [row["step"] for row in padding.seen] == list(range(64))
    assert padding.due_ns == sys.maxsize


def test_a_batch_of_an_unforeseen_kind_ends_the_looks() -> None:
    padding = Padding()
    padding.look(IDS, 1, [lambda: 7])  # a model that has no modules
    assert (padding.seen, padding.due_ns) == ([], sys.maxsize)


SCRIPT = f"""{COMPILES_NOTHING}
import sys
from torch import nn
from torch.utils.data import DataLoader
torch.manual_seed(0)
rows = [torch.randint(5, 50, (n,)) for n in range(4, 12)] * 8

def collate(rows):
    ids = torch.zeros(len(rows), 32, dtype=torch.long)
    for n, row in enumerate(rows):
        ids[n, : len(row)] = row
    return {{"input_ids": ids, "attention_mask": (ids > 0).long()}}

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 8), nn.Linear(8, 1)
    def forward(self, input_ids, attention_mask):
        return (self.head(self.embed(input_ids)).squeeze(-1) * attention_mask).sum()

model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
loader = DataLoader(rows, 8, collate_fn=collate)
batches = loader if sys.argv[1] == "loader" else [collate(rows[n : n + 8]) for n in range(0, 64, 8)]
for epoch in range(3):
    for batch in batches:
        optimizer.zero_grad()
        model(**batch).backward()
        optimizer.step()
    with torch.no_grad():
        for batch in DataLoader(rows[:7], 7, collate_fn=collate):
            model(**batch)
"""


@pytest.mark.long
@pytest.mark.parametrize("kind", ["loader", "forward"])
def test_lengths_of_a_real_job(kind: str, tmp_path: Path) -> None:
    script = SCRIPT if kind == "loader" else SCRIPT.partition("    with torch.no_grad")[0]
    (tmp_path / "train.py").write_text(script)
    record(tmp_path / "train.py", kind, folder=tmp_path / "run", options=["--no-trace", "--no-sample"])
    told = facts(tmp_path / "run/ranks/00000")
    assert told["warnings"] == []
    assert told["padding"]
    # Batches to train on, and none to validate with.
    assert {(row["source"], row["padded"], tuple(row["lengths"])) for row in told["padding"]} == {
        ("attention_mask", 32, tuple(range(4, 12)))
    }
    if kind == "loader":
        collate = told["loaders"][0]["collate"]
        line = script.splitlines().index("def collate(rows):") + 1
        assert collate == {"name": "collate", "file": str(tmp_path / "train.py"), "line": line}
