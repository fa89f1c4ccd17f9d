"""Warnings name the same lines of the same files with wrappers of ours as without them."""

from __future__ import annotations

import importlib
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dlprof.record.attribution import passed_over
from tests.fixtures.jobs import launch, tiny, wrapped
from tests.fixtures.overriding import sets


def warns(level: int) -> None:
    warnings.warn("look", stacklevel=level)


def wrapper_of(original: Callable[..., Any]) -> Any:
    def call(*args: Any) -> Any:
        return original(*args)

    return call


def warned(function: Callable[..., Any], *args: Any) -> tuple[str, int]:
    """Return file and line, from that of the call on, that a warning names."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        line = sys._getframe().f_lineno + 1
        function(*args)
    return seen[0].filename, seen[0].lineno - line


def test_a_warning_passes_over_wrappers() -> None:
    assert warned(wrapper_of(warns), 2) != (__file__, 0)
    twice = passed_over(wrapper_of(passed_over(passed_over(wrapper_of(warns)))))
    assert warned(warns, 2) == warned(twice, 2) == (__file__, 0)


def test_a_traceback_still_shows_a_wrappers_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "with_a_wrapper.py").write_text("def call(original):\n    return original()\n")
    monkeypatch.syspath_prepend(tmp_path)
    call = passed_over(importlib.import_module("with_a_wrapper").call)
    with pytest.raises(ZeroDivisionError) as raised:
        call(lambda: 1 / 0)
    frame = traceback.extract_tb(raised.tb)[1]
    assert Path(frame.filename).name == "with_a_wrapper.py"
    assert frame.line == "return original()"


def test_what_is_no_function_stays() -> None:
    code = warns.__code__
    assert passed_over(None) is None
    assert passed_over(len) is len
    assert warns.__code__ is code
    assert passed_over(classmethod(wrapper_of(len))).__func__.__code__.co_filename != __file__


# Warnings of torch that name the line which a wrapper of ours calls them from, and lines above that.
WARNING = """
import logging, warnings
warnings.simplefilter("always")
logging.basicConfig(format="%(pathname)s:%(lineno)d %(message)s")

def collate(samples):
    warnings.warn("collating", stacklevel=2)
    return torch.stack([s[0] for s in samples]), torch.stack([s[1] for s in samples])

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        if index == 3:
            warnings.warn("reading", stacklevel=5)
        return data[index]

class Careful(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 1)
    def forward(self, x):
        for level in range(1, 6):
            warnings.warn(f"forward, level {level}", stacklevel=level)
        logging.getLogger().warning("forward", stacklevel=4)
        return self.inner(x)

def main():
    torch.amp.GradScaler("cuda")
    torch.cuda.amp.GradScaler()
    with torch.autocast("cuda"):
        pass
    DataLoader(data, num_workers=500)
    weight = torch.ones(3, requires_grad=True)
    torch.optim.SGD([weight, weight], lr=0.1)
    torch.autograd.grad(weight.sum(), weight, only_inputs=False)
    torch.autograd.backward(weight.sum(), grad_variables=torch.tensor(1.0))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    schedule.step()
    careful = Careful()
    nn.Sequential(nn.Linear(8, 8), nn.Softmax())(data[0][0])
    for batch in DataLoader(Data(), batch_size=4, pin_memory=True, collate_fn=collate):
        careful(batch[0]).sum().backward()
        optimizer.step()
        train(batch)

main()
"""

# Settings that put more wrappers in the way and change nothing that warns.
OVERRIDDEN = "torch.autocast=off model.memory_format=contiguous_format torch.compile=off optimizer.foreach=False"
OVERRIDDEN += " loader.prefetch_factor=2 torch.num_threads=1"


@pytest.mark.long
@pytest.mark.parametrize("settings", ["", pytest.param(OVERRIDDEN, marks=pytest.mark.slow)])
def test_warnings_of_a_script_are_the_same_recorded(settings: str, tmp_path: Path) -> None:
    command = [sys.executable, str(tiny(tmp_path, WARNING))]
    plain = launch(command, tmp_path).stderr
    assert plain.count("Warning: ") >= 20
    options = ("--window", "1,0,1", "--allow-numerics", *sets(*settings.split()))
    recorded = launch(wrapped(tmp_path / "run", command, *options), tmp_path).stderr
    assert [line for line in recorded.splitlines() if not line.startswith("dlprof: ")] == plain.splitlines()
    assert (tmp_path / "run/ranks/00000/records.jsonl").exists()
