"""The line that takes most of making a batch, or of the time between the phases, and what it is known to be."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.compute.rules import costly_line
from dlprof.analysis.engine import Maybe
from dlprof.analysis.input.loader import repeated_samples
from dlprof.analysis.input.rules import input_wait
from dlprof.analysis.source.line_shares import costliest, costly_lines, in_library
from tests.fixtures import readings, runs
from tests.fixtures.asking import ask
from tests.fixtures.loaders import loaded, repeating
from tests.fixtures.runs import MS
from tests.fixtures.sampled_stacks import burst

LOOP = 'process 10:"python train.py";thread (0x1): MainThread;<module> (/w/train.py:30)'
FETCH = f"{LOOP};__next__ (/v/lib/python3.11/site-packages/torch/utils/data/dataloader.py:700)"
INDEX = "_BaseDataLoaderIter._next_index (/v/lib/python3.11/site-packages/torch/utils/data/dataloader.py:715)"
MAKE = f"{FETCH};fetch (/v/lib/python3.11/site-packages/torch/utils/data/_utils/fetch.py:52)"
WORKER = 'process 10:"python train.py";process 11:"";thread (0x2): MainThread'
WORKER += ";_worker_loop (/v/lib/python3.11/site-packages/torch/utils/data/_utils/worker.py:350)"
MADE = f"{WORKER};fetch (/v/lib/python3.11/site-packages/torch/utils/data/_utils/fetch.py:52)"
ROW, ZIP = "__getitem__ (/w/data.py:5)", "__getitem__ (/w/data.py:9)"
PANDAS = "_getitem_axis (/v/lib/python3.11/site-packages/pandas/core/indexing.py:1750)"
DAYS = "day (/w/data.py:{});DatetimeIndex.day (/v/lib/python3.11/site-packages/pandas/core/indexes/datetimes.py:9)"
SET = "__getitem__ (/v/lib/python3.11/site-packages/torch/utils/data/dataset.py:208)"
EMA = "follow (/w/train.py:{})"
H5PY = "/v/lib/python3.11/site-packages/h5py/_hl/"
SOURCE = [
    ["/w/data.py", 9, "with zipfile.ZipFile(path) as archive:"],
    ["/w/train.py", 20, "for name, kept in average.state_dict().items():"],
]


def recorded(folder: Path, stacks: dict[str, int], lines: list[list[object]] = SOURCE) -> Path:
    steps = [runs.light(n, 10 * MS) for n in range(40)]
    path = runs.recorded(folder / "run", (None, steps, {**runs.CPU, "pid": 10, "directory": "/w/"}))
    return burst(path, stacks, lines=lines)


@pytest.mark.parametrize(
    ("stacks", "doing", "line", "idiom", "share"),
    [
        # What a worker does while it makes batches counts, and not that it waits for the next order.
        ({f"{MADE};{ZIP}": 60, f"{MADE};{ROW}": 20, WORKER: 500}, "worker", 9, "zip_opened", 0.75),
        ({f"{MADE};{ROW};{PANDAS}": 90, f"{MADE};{ZIP}": 10}, "worker", 5, "dataframe_rows", 0.9),
        ({f"{MADE};{ROW}": 90, f"{MADE};{ZIP}": 10}, "worker", 5, "", 0.9),
        ({f"{MAKE};{SET}": 50, f"{MAKE};{ROW}": 10}, "fetch", 30, "rows_of_tensors", 5 / 6),
        # What a sampler does before a batch is made.
        ({f"{FETCH};{INDEX};{ROW}": 50, f"{MAKE};{ZIP}": 10, FETCH: 90}, "fetch", 5, "", 5 / 6),
        # A loop of several lines is known by any of them that has a quarter of it.
        ({f"{LOOP};{EMA.format(20)}": 30, f"{LOOP};{EMA.format(21)}": 70}, "rest", 21, "average_of_weights", 0.7),
        ({f"{LOOP};{EMA.format(20)}": 10, f"{LOOP};{EMA.format(21)}": 90}, "rest", 21, "", 0.9),
        # Several lines that one calls are what they all call in a library, and it is that one.
        ({f"{MADE};{ROW};{DAYS.format(n)}": 10 for n in range(20, 24)}, "worker", 5, "dates_made", 1.0),
        (
            {f"{MADE};{ROW};{DAYS.format(20)}": 30, f"{MADE};{ROW};{DAYS.format(21)}": 10},
            "worker",
            20,
            "dates_made",
            0.75,
        ),
        # Few say enough where they are alike.
        ({f"{MADE};{ZIP}": 8}, "worker", 9, "zip_opened", 1.0),
        # Too few, or none in particular.
        ({f"{MADE};{ZIP}": 7}, "worker", 0, "", 0.0),
        ({f"{MADE};{ZIP}": 15, f"{MADE};{ROW}": 5}, "worker", 0, "", 0.0),
        ({f"{MADE};get (/w/data.py:{n})": 10 for n in range(1, 9)}, "worker", 0, "", 0.0),
    ],
)
def test_the_costliest_line_is_named_with_what_it_is_known_to_be(
    tmp_path: Path, stacks: dict[str, int], doing: str, line: int, idiom: str, share: float
) -> None:
    frame = runs.measured(recorded(tmp_path, stacks), costly_lines).frame(costly_lines)
    found = costliest(Maybe(lambda: frame), 0, doing)
    if not line:
        assert found is None
        return
    assert found is not None
    assert (found.place.line, found.idiom.name if found.idiom else "") == (line, idiom)
    assert found.place.share == pytest.approx(share)


MODEL = "_call_impl (/v/lib/python3.11/site-packages/torch/nn/modules/module.py:1700)"
NO_GRAD = "context_decorator.<locals>.decorate_context (/v/lib/python3.11/site-packages/torch/utils/_contextlib.py:120)"
MAIN = 'process 10:"python train.py";thread (0x1): MainThread;<module> (/w/train.py:90)'
EPOCH = f"{MAIN};epoch (/w/train.py:{{}})"
SCORE = "update (/w/metric.py:12);distance (/w/metric.py:5)"


@pytest.mark.parametrize(
    ("way", "text", "share"),
    [
        ("normal (/w/net.py:{})", "loops = torch.arange(nodes)", 0.9),  # all of the function's lines
        ("normal (/w/net.py:{})", "x = twice(x)", 0.5),
        ("forward (/w/net.py:{})", "loops = torch.arange(nodes)", 0.5),  # which does other things, too
    ],
)
def test_all_of_a_function_that_makes_constants_is_needless(tmp_path: Path, way: str, text: str, share: float) -> None:
    model = f"{EPOCH.format(60)};{MODEL};forward (/w/net.py:7)"
    called = f"{model};{way}" if way.startswith("normal") else f"{EPOCH.format(60)};{MODEL};{way}"
    stacks = {called.format(line): n for line, n in ((20, 50), (30, 40))} | {f"{model};{MODEL};forward (/w/l.py:3)": 10}
    stacks[f"{EPOCH.format(61)};backward (/v/lib/python3.11/site-packages/torch/_tensor.py:600)"] = 30
    path = recorded(tmp_path, stacks, lines=[["/w/net.py", 20, text], ["/w/net.py", 30, "return scale"]])
    frame = runs.measured(path, costly_lines).frame(costly_lines)
    found = costliest(Maybe(lambda: frame), 0, "forward")
    assert found is not None
    assert found.share == pytest.approx(share)
    assert costly_line._has_no_gradient(found) == (share > 0.5)


@pytest.mark.parametrize(
    ("way", "callers"),
    [
        (f"{EPOCH.format(70)};{SCORE}", [("update", "metric.py", 12), ("epoch", "train.py", 70)]),
        (f"{EPOCH.format(70)};{NO_GRAD};{SCORE}", [("update", "metric.py", 12), ("epoch", "train.py", 70)]),
        (f"{EPOCH.format(70)};distance (/w/metric.py:9);distance (/w/metric.py:5)", [("epoch", "train.py", 70)]),
        (EPOCH.format(70), []),  # in the loop itself
        # The body of an expression is in its function.
        (
            f"{EPOCH.format(70)};update (/w/metric.py:12);update.<locals>.<listcomp> (/w/metric.py:12)",
            [("epoch", "train.py", 70)],
        ),
        # The script's `model(x)` leads to every line of the model, and says nothing.
        (
            f"{EPOCH.format(60)};{MODEL};forward (/w/net.py:8);{SCORE}",
            [("update", "metric.py", 12), ("forward", "net.py", 8)],
        ),
    ],
)
def test_the_lines_that_call_the_costliest_are_named(
    tmp_path: Path, way: str, callers: list[tuple[str, str, int]]
) -> None:
    model = f"{EPOCH.format(60)};{MODEL};forward (/w/net.py:7)"
    elsewhere = f"{EPOCH.format(71)};{SCORE}"
    trains = f"{EPOCH.format(61)};backward (/v/lib/python3.11/site-packages/torch/_tensor.py:600)"
    path = recorded(tmp_path, {model: 30, way: 60, elsewhere: 5, trains: 30})
    frame = runs.measured(path, costly_lines).frame(costly_lines)
    found = costliest(Maybe(lambda: frame), 0, "forward" if MODEL in way else "rest")
    assert found is not None
    assert [(one.function, one.file, one.line) for one in found.callers] == callers
    told = found.advice(between=True)
    assert told.endswith(f"shown ({callers[-1][1]}:{callers[-1][2]})" if callers else "shown")


COLLATE = "collate (/v/lib/python3.11/site-packages/torch/utils/data/_utils/collate.py:155)"
TO_TENSOR = "to_tensor (/v/lib/python3.11/site-packages/torchvision/transforms/functional.py:171)"
PICTURES: dict[str, Any] = {"dataset": "MNIST", "role": "train", "transforms": ["ToTensor", "Normalize"]}
TENSORS = {"dataset": "TensorDataset", "batch_size": 32, "collate": {"name": "default_collate"}}


@pytest.mark.parametrize(
    ("loaders", "stack", "idiom"),
    [
        ([TENSORS], f"{MAKE};{COLLATE}", "rows_of_tensors"),
        ([TENSORS], f"{LOOP};follow (/w/train.py:21)", ""),  # no making of a batch
        ([TENSORS, TENSORS | {"dataset": "Images"}], MAKE, ""),
        ([TENSORS | {"collate": {"name": "joined"}}], MAKE, ""),
        ([TENSORS | {"batch_size": None}], MAKE, ""),
        # Pictures of which each epoch makes the same, and pictures that are drawn anew, or of which that is not known.
        ([PICTURES], f"{MAKE};{TO_TENSOR}", "same_pictures"),
        ([PICTURES | {"transforms": ["RandomCrop", "ToTensor"]}], f"{MAKE};{TO_TENSOR}", "picture_to_tensor"),
        ([PICTURES | {"transforms": []}], f"{MAKE};{TO_TENSOR}", "picture_to_tensor"),
        ([PICTURES | {"transforms": ["GaussNoise", "RandomCrop"]}], f"{MAKE};{TO_TENSOR}", "cropped_late"),
        ([PICTURES | {"transforms": ["HorizontalFlip", "RandomCrop"]}], f"{MAKE};{TO_TENSOR}", "picture_to_tensor"),
        ([PICTURES | {"role": "validation"}], f"{MAKE};{TO_TENSOR}", "picture_to_tensor"),
        ([PICTURES], f"{LOOP};{TO_TENSOR}", ""),
    ],
)
def test_what_the_loader_says_of_the_line_that_makes_its_batches(
    tmp_path: Path, loaders: list[dict[str, Any]], stack: str, idiom: str
) -> None:
    path = recorded(tmp_path, {stack: 20})
    file = path / "ranks/00000/facts.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"loaders": loaders}))
    (found,) = runs.measured(path, costly_lines).frame(costly_lines)["idiom"]
    assert found == idiom


FITS = f"{LOOP};fit (/v/lib/python3.11/site-packages/lightning/trainer.py:9);"
BACKWARD = "Tensor.backward (/v/lib/python3.11/site-packages/torch/_tensor.py:600)"


@pytest.mark.parametrize(("backward", "idiom"), [(FITS + BACKWARD, ""), (f"{LOOP};{BACKWARD}", "average_of_weights")])
def test_the_text_of_a_line_that_leaves_the_training_to_a_library_says_nothing(
    tmp_path: Path, backward: str, idiom: str
) -> None:
    path = recorded(
        tmp_path,
        {backward: 20, f"{FITS}log (/v/lib/python3.11/site-packages/lightning/loggers.py:1)": 30},
        [["/w/train.py", 30, SOURCE[1][2]]],
    )
    frame = runs.measured(path, costly_lines).frame(costly_lines)
    assert list(frame.loc[frame["doing"] == "rest", "idiom"]) == [idiom]
    line = costliest(Maybe(lambda: frame), 0, "rest")
    assert line is not None
    assert (in_library(line) is None) == bool(idiom)


def test_how_a_library_goes_through_modules_is_not_the_scripts_to_change(tmp_path: Path) -> None:
    listed = "Module.named_parameters (/v/lib/python3.11/site-packages/torch/nn/modules/module.py:2600)"
    for backward, idiom in ((FITS + BACKWARD, ""), (f"{LOOP};{BACKWARD}", "parameters_listed")):
        path = recorded(
            tmp_path / (idiom or "library"), {backward: 20, f"{FITS}{listed}": 30}, [["/w/train.py", 30, "f()"]]
        )
        frame = runs.measured(path, costly_lines).frame(costly_lines)
        assert list(frame.loc[frame["doing"] == "rest", "idiom"]) == [idiom]


def test_a_needless_line_comes_before_workers_that_give_no_more(tmp_path: Path) -> None:
    # A batch takes 80 ms in the training thread, and the rest of the step 20.
    path = loaded(fetch=80, cpu=80, workers=0, own=20, cores=4)(tmp_path)
    burst(path, {f"{MAKE};{ZIP}": 95, f"{MAKE};{ROW}": 5}, lines=SOURCE)
    first = ask(input_wait.RULE, path)
    assert [(place.file, place.line) for place in first.where] == [("/w/data.py", 9)]
    assert "open the archive once" in first.changes[0].text
    assert first.at_most
    assert first.saving_ns == pytest.approx(80 * MS, rel=0.05)  # batches that cost nothing to make
    # A line that somebody has to run, and one of which little is gained: workers first.
    for lines, share in ((["image = image.resize((64, 64))"], 95), (["with zipfile.ZipFile(path) as archive:"], 40)):
        burst(path, {f"{MAKE};{ZIP}": share, f"{MAKE};{ROW}": 100 - share}, lines=[["/w/data.py", 9, lines[0]]])
        then = ask(input_wait.RULE, path)
        assert [setting.name for setting in then.changes[0].settings] == ["num_workers", "persistent_workers"]


MB = 1_000_000
ONCE = repeating(160, 4, MB)
RESIZE = "image = image.resize((64, 64))"


@pytest.mark.parametrize(
    ("watched", "text", "kept"),
    [
        (repeating(80, 4, MB), RESIZE, True),
        (repeating(80, 4, MB), "", True),
        (repeating(80, 4, MB), SOURCE[0][2], False),  # it is known how to make a sample cheaper
        (repeating(80, 4, MB, changed=8), RESIZE, False),  # augmented
        (ONCE, RESIZE, False),  # no sample came again
        (repeating(80, 4, 4 * MB), RESIZE, False),  # to copy them takes too long
        (repeating(80, 4, MB), "memory", False),
    ],
)
def test_samples_that_are_the_same_in_every_epoch_may_be_kept(
    tmp_path: Path, watched: Callable[[Path], object], text: str, kept: bool
) -> None:
    of = {"dataset_length": 80, "batch_size": 4}
    path = loaded(watched, fetch=80, cpu=80, workers=0, own=20, cores=4, **of)(tmp_path)
    left = 100 * MB if text == "memory" else 1_000 * MB
    readings.write(path / "hosts/node-1/host.jsonl", [{"memory_available_bytes": left}] * 40)
    burst(
        path, {f"{MAKE};{ZIP}": 95, f"{MAKE};{ROW}": 5}, lines=[["/w/data.py", 9, RESIZE if text == "memory" else text]]
    )
    seen = runs.measured(path, repeated_samples).frame(repeated_samples)
    assert [*seen["again"]] == ([] if watched is ONCE else [20])
    found = ask(input_wait.RULE, path)
    assert ("make each sample once" in found.changes[0].text) == kept
    if kept:
        assert "the 20 that were looked at were), and the 80 take 80 MB" in found.changes[0].text
        again = "the same samples are made again in every epoch."
        assert found.verdict.endswith(again) == (not text)
        assert found.changes[0].text.startswith("make each") == (not text)
        assert found.saving_ns == pytest.approx(80 * MS, rel=0.05)


@pytest.mark.parametrize(
    ("stack", "loop", "idiom"),
    [
        (f"{MADE};{ROW}", 4, "loops_in_python"),
        (f"{MADE};{ROW}", 0, ""),
        # A library works below it: the line hands its work over.
        (f"{MADE};{ROW};{PANDAS}", 4, "dataframe_rows"),
        (f"{MADE};{ROW};split (/v/lib/python3.11/site-packages/other.py:5)", 4, ""),
    ],
    ids=["a loop", "no loop", "a known library", "another library"],
)
def test_a_line_in_a_loop_that_hands_nothing_over_is_a_loop_in_python(
    tmp_path: Path, stack: str, loop: int, idiom: str
) -> None:
    lines: list[list[object]] = [
        ["/w/data.py", 5, "total += self.weight(word)"],
        ["/w/data.py", 4, "for word in words:"],
    ]
    loops = [["/w/data.py", 5, loop]] if loop else []
    path = burst(recorded(tmp_path, {}), {stack: 60}, lines=lines, loops=loops)
    frame = runs.measured(path, costly_lines).frame(costly_lines)
    found = costliest(Maybe(lambda: frame), 0, "worker")
    assert found is not None
    assert (found.idiom.name if found.idiom else "") == idiom


def test_the_body_of_a_block_that_opens_a_file_is_named_by_the_line_that_opens_it(tmp_path: Path) -> None:
    opens, reads = f"__init__ ({H5PY}files.py:555)", f"__getitem__ ({H5PY}{{}}.py:4)"
    at = f"{MADE};read (/w/data.py:{{}})"
    stacks = {
        f"{at.format(3)};{opens}": 20,
        f"{at.format(5)};{reads.format('group')}": 40,
        f"{at.format(5)};{reads.format('dataset')}": 30,
        at.format(9): 10,
    }
    lines: list[list[object]] = [
        ["/w/data.py", 3, "with h5py.File(self.path) as file:"],
        ["/w/data.py", 5, "return file[name][first:last]"],
    ]
    path = burst(recorded(tmp_path, {}), stacks, lines=lines)
    frame = runs.measured(path, costly_lines).frame(costly_lines)
    found = costliest(Maybe(lambda: frame), 0, "worker")
    assert found is not None
    assert found.idiom is not None
    assert (found.place.line, found.idiom.name, found.place.share) == (3, "hdf5_opened", 0.9)


NET = f"{LOOP};_call_impl (/v/lib/python3.11/site-packages/torch/nn/modules/module.py:1786);"


@pytest.mark.parametrize(
    ("text", "stacks", "facts", "state"),
    [
        ("angles = torch.cat([x.sin(), x.cos()], -1)", 60, runs.CPU, "found"),
        ("angles = torch.cat([x.sin(), x.cos()], -1)", 60, {"device": {"type": "cuda"}}, "not_measured"),
        ("angles = torch.cat([x.sin(), x.cos()], -1)", 10, runs.CPU, "clear"),  # under a fifth
        ("angles = torch.cat([x.sin(), x.cos()], -1)", 0, runs.CPU, "not_measured"),
        ("return self.second(self.first(x))", 60, runs.CPU, "clear"),
        ("x = x.resize((64, 64))", 60, runs.CPU, "clear"),  # somebody has to do it
    ],
    ids=["positions", "on a device", "little", "no stacks", "nothing known", "not needless"],
)
def test_a_needless_line_of_the_forward_pass(
    tmp_path: Path, text: str, stacks: int, facts: dict[str, Any], state: str
) -> None:
    steps = [runs.light(n, 100 * MS, forward_ns=30 * MS, backward_ns=50 * MS) for n in range(40)]
    path = runs.recorded(tmp_path / "run", (None, steps, {**facts, "pid": 10, "directory": "/w/"}))
    if stacks:
        seen = {f"{NET}encode (/w/net.py:5)": stacks, f"{NET}forward (/w/net.py:50)": 80 - stacks}
        burst(path, seen, lines=[["/w/net.py", 5, text]])
    found = ask(costly_line.RULE, path)
    assert found.state == state, (found.why, found.summary)
    if state == "found":
        assert found.saving_ns == pytest.approx(0.75 * 80 * MS)
        assert found.at_most
        assert [place.line for place in found.where] == [5]
        assert "register_buffer" in found.changes[0].text


BACK = f"{LOOP};backward (/v/lib/python3.11/site-packages/torch/_tensor.py:660)"


@pytest.mark.parametrize(
    ("text", "stack", "losses", "saving"),
    [
        # 30 ms forward, 50 backward, 20 between: three quarters of the stacks of each are in the line.
        ("total.backward(retain_graph=True)", BACK, [], 0.75 * 50),
        ("loss = sum(criterion(a, b) for a, b in zip(x, y))", "", [5], 0.75 * 20 + 50),
        ("total = sum(correct(a, b) for a, b in zip(x, y))", "", [], None),
    ],
    ids=["a graph that is kept", "a loss in a loop", "a metric in a loop"],
)
def test_a_needless_line_of_the_backward_pass_or_a_loss(
    tmp_path: Path, text: str, stack: str, losses: list[int], saving: float | None
) -> None:
    steps = [runs.light(n, 100 * MS, forward_ns=30 * MS, backward_ns=50 * MS) for n in range(40)]
    calls = [{"kind": "loss", "file": "net.py", "line": n, "function": "fit", "count": 9} for n in losses]
    facts = {**runs.CPU, "pid": 10, "directory": "/w/", "calls": calls}
    path = runs.recorded(tmp_path / "run", (None, steps, facts))
    seen = {f"{LOOP};fit (/w/net.py:5){stack.removeprefix(LOOP)}": 60, f"{LOOP};fit (/w/net.py:50)": 20}
    if stack:
        seen = {one.replace("net.py:50)", f"net.py:50){stack.removeprefix(LOOP)}"): n for one, n in seen.items()}
    burst(path, seen, lines=[["/w/net.py", 5, text]])
    found = ask(costly_line.RULE, path)
    assert found.state == ("clear" if saving is None else "found"), (found.why, found.summary)
    assert saving is None or found.saving_ns == pytest.approx(saving * MS)


def test_the_lines_of_a_loop_count_together(tmp_path: Path) -> None:
    stacks = {f"{LOOP};{EMA.format(line)}": n for line, n in ((20, 30), (21, 50), (40, 20))}
    frame = runs.measured(recorded(tmp_path, stacks), costly_lines).frame(costly_lines)
    found = costliest(Maybe(lambda: frame), 0, "rest")
    assert found is not None
    assert found.place.share == pytest.approx(0.5)
    assert found.share == pytest.approx(0.8)
