"""The browser of these tests, one for each file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.fixtures.browsers import chromium

if TYPE_CHECKING:
    from selenium import webdriver


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    yield from chromium(tmp_path_factory.mktemp("profile"))
