"""Machines of one name are told apart by the start of their kernel."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlprof.hosts import boot, longer


def test_the_start_of_a_kernel_is_the_same_all_along_and_unknown_where_it_is_not_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert boot() == boot()
    assert "\n" not in boot()

    def refuse(_: Path) -> str:
        raise PermissionError

    monkeypatch.setattr(Path, "read_text", refuse)
    assert boot() == ""


def test_two_machines_of_one_name_have_two_longer_ones() -> None:
    assert longer("node", "0123456789") == "node~01234567" != longer("node", "9876543210")
