"""The settings that can be overridden."""

import pytest

from dlprof.errors import DlprofError
from dlprof.overrides import OVERRIDES, changes_numbers, named, parse


def test_words_become_values_by_name() -> None:
    words = ["loader.num_workers=4", "loader.pin_memory=off", "ddp.bucket_cap_mb=12.5", "env.OMP_NUM_THREADS=1"]
    assert parse(words) == {
        "loader.num_workers": 4,
        "loader.pin_memory": False,
        "ddp.bucket_cap_mb": 12.5,
        "env.OMP_NUM_THREADS": "1",
    }


@pytest.mark.parametrize("word", ["loader.num_workers", "loader.num_workers=-1", "loader.nothing=1", "ddp.comm_hook=x"])
def test_what_cannot_be_set_is_one_clear_error(word: str) -> None:
    with pytest.raises(DlprofError, match="--set"):
        parse([word])


def test_those_that_change_numbers_are_known() -> None:
    assert changes_numbers({"torch.autocast": "bf16", "loader.num_workers": 2, "env.X": "1"}) == ["torch.autocast"]


def test_a_change_names_its_override() -> None:
    assert named("num_workers") == "loader.num_workers"
    assert named("OMP_NUM_THREADS") == "env.OMP_NUM_THREADS"
    assert named("shuffle") is None
    assert len({o.setting for o in OVERRIDES}) == len(OVERRIDES)
