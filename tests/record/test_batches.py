"""Loaders describe themselves, and their batches show samples, tokens, bytes and padding: without the script's code.

What is kept of the script's loaders, models and optimizers, and for how long.
"""

from __future__ import annotations

import gc
import multiprocessing
import sys
from collections import UserDict, namedtuple
from pathlib import Path
from time import perf_counter_ns
from types import SimpleNamespace
from typing import Any

import pytest

from dlprof.record.loaders import (
    BatchSize,
    LoaderSeen,
    Padding,
    Pass,
    adopt,
    begin_pass,
    forget_passes,
    lengths_of,
    loader_of,
    look_at,
    samples_of,
    settings_of,
    size_of,
)
from dlprof.record.observed import Observed
from tests.fixtures.devices import Model, Parameter
from tests.fixtures.jobs import COMPILES_NOTHING, facts, record
from tests.fixtures.ticking import Job

torch: Any = pytest.importorskip("torch", reason="recording needs torch")

from torch.nn import Dropout, ReLU  # noqa: E402
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, Subset  # noqa: E402

Pair = namedtuple("Pair", "image label")
NUMBERS: Any = list(range(10))


class Endless(IterableDataset[Any]):
    """Has no length."""

    def __iter__(self) -> Any:
        return iter(())


class Many(Dataset[Any]):
    """Keeps a list of many objects, as a data set and within one."""

    def __init__(self, dataset: Any = None) -> None:
        self.dataset, self.rows, self.few = dataset, [None] * 100_000, [1]

    def __len__(self) -> int:
        return 4


class Compose:
    """Holds transforms as torchvision's and albumentations' do."""

    def __init__(self, *transforms: Any) -> None:
        self.transforms = list(transforms)


class Pictures(Dataset[Any]):
    """Keeps its transforms as torchvision's data sets do."""

    def __init__(self, transform: Any) -> None:
        self.transform = transform

    def __len__(self) -> int:
        return 4


ROWS = {"class": "Many", "name": "rows", "kind": "list", "length": 100_000}
BATCHES = BatchSampler(RandomSampler(NUMBERS), batch_size=3, drop_last=False)
AROUND: Any = SimpleNamespace(batch_sampler=BATCHES, __len__=lambda: 4)  # as accelerate wraps the script's
DEFAULT = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]


@pytest.mark.parametrize(
    ("loader", "settings"),
    [
        (
            DataLoader(NUMBERS, batch_size=4, shuffle=True, drop_last=True),
            {"num_workers": 0, "batch_size": 4, "shuffle": True, "drop_last": True, "dataset": "list"}
            | {"dataset_length": 10, "iterable": False, "start_method": None},
        ),
        (
            DataLoader(NUMBERS, num_workers=2, prefetch_factor=3, multiprocessing_context="spawn"),
            {"num_workers": 2, "prefetch_factor": 3, "start_method": "spawn", "shuffle": False},
        ),
        (DataLoader(NUMBERS, num_workers=2), {"start_method": DEFAULT}),
        (
            DataLoader(Endless(), batch_size=2),
            {"dataset": "Endless", "dataset_length": None, "iterable": True, "shuffle": None},
        ),
        (DataLoader(NUMBERS, batch_sampler=BATCHES), {"batch_size": 3, "shuffle": True}),
        (DataLoader(NUMBERS, batch_sampler=AROUND), {"batch_size": 3, "shuffle": True}),
        (DataLoader(Many()), {"objects": [ROWS]}),
        (DataLoader(Many(Many(NUMBERS))), {"objects": [ROWS, ROWS]}),
        (
            DataLoader(Subset(Pictures(Compose(Compose(Dropout()), ReLU())), [0])),
            {"transforms": ["Dropout", "ReLU"], "dataset": "Subset"},
        ),
        (DataLoader(Pictures(None)), {"transforms": []}),
        (DataLoader(NUMBERS, batch_size=None), {"batch_size": None}),  # its samples are batches
    ],
)
def test_how_a_loader_is_set_up(loader: Any, settings: dict[str, Any]) -> None:
    before = multiprocessing.get_start_method(allow_none=True)
    assert settings.items() <= settings_of(loader).items()
    assert multiprocessing.get_start_method(allow_none=True) == before  # which is not decided for the script


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(NUMBERS, batch_size=4, shuffle=True, drop_last=True),
        DataLoader(NUMBERS, num_workers=2, prefetch_factor=3, multiprocessing_context="fork"),
        DataLoader(NUMBERS, num_workers=1, persistent_workers=True),
        DataLoader(Endless(), batch_size=2),
        DataLoader(NUMBERS, batch_sampler=BATCHES),
        DataLoader(NUMBERS, batch_size=None),
    ],
)
def test_an_iterator_says_how_its_loader_is_set_up(loader: Any) -> None:
    assert settings_of(loader_of(iter(loader))) == settings_of(loader)


def test_an_iterator_that_was_not_seen_being_made_gets_a_pass_once() -> None:
    iterator = SimpleNamespace(_dlprof_pass=None)
    over = adopt(iterator)
    assert over.loader is None
    assert over.began_ns > 0
    assert adopt(iterator) is iterator._dlprof_pass is over
    over.reported, over.place = True, 3
    forget_passes()
    assert (over.loader, over.reported, over.place, over.unsettled) == (None, False, -1, True)


def passing(batch_size: int | None = None, length: int | None = None) -> Pass:
    return Pass(SimpleNamespace(settings={"batch_size": batch_size, "dataset_length": length}), 0, 0)  # type: ignore[arg-type]


def images(n: int) -> Any:
    return torch.zeros(n, 3, 2, 2)


# Batches of one pass over a loader, its batch size and the length of its data set, and the samples of each.
SAMPLES: list[tuple[list[Any], int | None, int | None, list[int]]] = [
    ([[images(4), torch.zeros(4)]], 4, None, [4]),
    ([Pair(images(4), torch.zeros(4))], 4, None, [4]),
    ([UserDict(input_ids=torch.zeros(4, 9, dtype=torch.int64))], 4, None, [4]),
    # What does not show its samples has as many as the loader's batches.
    ([[[torch.zeros(3, 2, 2), torch.zeros(3, 5, 5)], [{"boxes": torch.zeros(7, 4)}]], ["a.jpg"]], 4, None, [4, 4]),
    ([SimpleNamespace(x=torch.zeros(90, 3)), torch.tensor(3.0)], 4, None, [4, 4]),
    ([[images(3)], [images(3)]], 4, 3, [3, 3]),  # the data set is smaller than a batch
    # Without a batch size, the tensors must agree in their first dimension.
    ([[images(6), torch.zeros(6)]], None, None, [6]),
    ([[images(6), torch.zeros(6), torch.tensor(3.0)]], None, None, [-1]),
    ([[images(6), torch.zeros(5)]], None, None, [-1]),
    ([[torch.zeros(0, 2)]], None, None, [-1]),
    (["text", []], None, None, [-1, -1]),
    # A bucketing sampler's are counted one by one.
    ([{"x": torch.zeros(n, 5), "n": torch.zeros(n)} for n in (6, 9, 2)], None, None, [6, 9, 2]),
]


@pytest.mark.parametrize(("batches", "batch_size", "length", "of"), SAMPLES)
def test_the_samples_of_batches(batches: Any, batch_size: Any, length: Any, of: list[int]) -> None:
    over = passing(batch_size, length)
    assert [samples_of(batch, over) for batch in batches] == of
    if batch_size is None:
        over = Pass(None, 0, 0)  # whose loader was not seen
        assert [samples_of(batch, over) for batch in batches] == of


ROWS, OTHERS = torch.arange(12.0).view(4, 3), torch.arange(12.0).view(4, 3) + 1


@pytest.mark.parametrize(
    ("batches", "same"),
    [
        pytest.param([ROWS, ROWS], True, id="every worker gives all samples"),
        pytest.param([ROWS, OTHERS, ROWS], False, id="each its share"),
        pytest.param([[ROWS, images(4)], [ROWS, images(4)]], True, id="one tensor tells"),
        pytest.param([images(4), images(4)], None, id="rows that are all alike tell nothing"),
        pytest.param([["text"], ["text"]], None, id="no tensor"),
        pytest.param([ROWS], "", id="one worker has not come yet"),
    ],
)
def test_first_batches_of_workers_are_compared(batches: list[Any], same: object) -> None:
    seen: Any = SimpleNamespace(settings={"iterable": True, "num_workers": 2, "batch_size": 4})
    over = begin_pass(SimpleNamespace(), seen, 0, 0)
    for batch in batches:
        samples_of(batch, over)
    assert seen.settings.get("same_batches", "") == same
    again = begin_pass(SimpleNamespace(), seen, 0, 0)
    assert (again.firsts is None) == (same != "")


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
    assert sorted(set(seen)) == [(1, 4 * n, 4 * n) for n in (1, 2, 3, 4, 32, 64)]


LARGE = torch.zeros(1_000_000)
SHARED = torch.zeros(1_000_000).share_memory_()


@pytest.mark.parametrize(
    ("batch", "copied"),
    [
        ([LARGE[:10], LARGE[20:30]], 4_000_000),
        ([torch.from_numpy(LARGE.numpy())[:10] for _ in range(2)], 8_000_000),  # each has a storage of its own
        ([torch.from_numpy(LARGE.numpy()[:10])], 40),
        ([LARGE[:10].clone()], 40),
        ([SHARED[:10]], 0),
        ([torch.zeros(2, device="meta"), torch.zeros(2).to_sparse()], 0),
    ],
)
def test_a_part_of_a_tensor_is_sent_with_all_of_its_storage(batch: list[torch.Tensor], copied: int) -> None:
    assert BatchSize().see(batch)[2] == copied


def test_each_batch_is_looked_at_while_much_more_is_copied_than_it_holds() -> None:
    batches = BatchSize()
    seen = [batches.see([(LARGE if n < 8 else SHARED)[:10]])[2] for n in range(16)]
    assert seen == [4_000_000] * 8 + [0] * 8


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
        {"x": FRAMES, "seen": MASK},  # of another name
        {"x": FRAMES, "x_len": torch.tensor([41, 3, 17, 8])},  # of something else
        {"input_ids": IDS.to("meta"), "attention_mask": MASK.to("meta")},  # on a device: it would have to be waited for
        ["text"],
        None,
    ],
)
def test_what_shows_no_lengths(batch: Any) -> None:
    assert lengths_of(batch) is None
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
for epoch in range(3):
    for batch in loader:
        optimizer.zero_grad()
        model(**batch).backward()
        optimizer.step()
    with torch.no_grad():
        for batch in DataLoader(rows[:7], 7, collate_fn=collate):
            model(**batch)
"""


@pytest.mark.long
def test_lengths_of_a_real_job(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    record(script, folder=tmp_path / "run", options=["--no-trace", "--no-sample"])
    known = facts(tmp_path / "run/ranks/00000")
    assert known["warnings"] == []
    # Batches to train on, and none to validate with.
    assert {(row["source"], row["padded"], tuple(row["lengths"])) for row in known["padding"]} == {
        ("attention_mask", 32, tuple(range(4, 12)))
    }
    line = SCRIPT.splitlines().index("def collate(rows):") + 1
    assert known["loaders"][0]["collate"] == {"name": "collate", "file": str(script), "line": line}


def test_without_a_loader_what_the_model_gets_is_looked_at(job: Job) -> None:
    job.model = torch.nn.Embedding(50, 8)
    job.train()  # from here on it is known that it trains
    for with_grad in (True, False):
        job.forward(1, {"input_ids": IDS, "attention_mask": MASK}, with_grad=with_grad)
        job.now = sys.maxsize - 1
    assert [row["lengths"] for row in job.clock.observed.padding.seen] == [LENGTHS]


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Job:
    return Job(monkeypatch)


def loader(batch_size: int = 4) -> Any:
    return DataLoader(NUMBERS, batch_size=batch_size)


def test_a_model_is_kept_once_and_only_as_long_as_the_script_keeps_it() -> None:
    observed = Observed()
    model = Model(Parameter(4, "cpu"))
    for _ in range(2):
        observed.see_model(model)
        observed.see_model(Model())  # a loss: it has no parameters
    (kept,) = observed.models
    assert kept() is model
    assert observed.news
    del model
    gc.collect()
    assert kept() is None


def test_modules_and_optimizers_that_are_made_as_it_goes_are_kept_within_bounds() -> None:
    observed = Observed()
    made = [Model(Parameter(1, "cpu")) for _ in range(150)]
    for one in made:
        observed.see_model(one)
    assert len(observed.models) == 100
    assert [observed.see_optimizer(one) for one in made] == [True] * 100 + [False] * 50
    assert len(observed.optimizers) == 100
    observed.news = False
    assert not observed.see_optimizer(made[0])  # it is not new
    assert not observed.news
    assert observed.optimizer_id == id(made[0])


def test_a_loader_that_is_made_anew_each_epoch_is_one_and_two_at_a_time_are_two() -> None:
    observed = Observed()
    for _ in range(3):
        iterator = SimpleNamespace()
        observed.see_loader(loader(), iterator, 5, 7)  # gone at once
    (seen,) = observed.loaders
    over = iterator._dlprof_pass
    assert (over.loader, over.began_ns, over.took_ns) == (seen, 5, 7)
    first, second = loader(), loader()
    for one in (first, second, first):
        observed.see_loader(one, SimpleNamespace(), 0, 0)
    observed.see_loader(loader(batch_size=2), SimpleNamespace(), 0, 0)
    assert [seen.settings["batch_size"] for seen in observed.loaders] == [4, 4, 2]
    assert [seen.loader() for seen in observed.loaders[:2]] == [first, second]
    observed.see_loader(torch.utils.data.DataLoader([1, 2]), SimpleNamespace(), 0, 0)
    assert [seen.data_of for seen in observed.loaders] == [None, 0, 0, None]  # the same object


def test_autocast_is_looked_for_until_it_is_seen() -> None:
    observed = Observed()
    observed.see_autocast()
    assert observed.autocast == {"enabled": False, "dtype": None}
    assert observed.autocast_looks == 15
    with torch.autocast("cpu", dtype=torch.bfloat16):
        observed.see_autocast()
    assert observed.autocast == {"enabled": True, "dtype": "bfloat16"}
    assert observed.autocast_looks == 0


def test_batches_to_validate_with_are_not_looked_at() -> None:
    observed, batch = Observed(), {name: torch.ones(2, 4, dtype=torch.long) for name in ("input_ids", "attention_mask")}
    for step, role in enumerate(("validation", "unknown", "train")):
        seen = LoaderSeen(gc.collect, {}, role)  # type: ignore[arg-type]
        observed.see_batch(batch, step, Pass(seen, 0, 0))
    observed.see_batch(batch, 3)
    assert [row["step"] for row in observed.padding.seen] == [2, 3]
