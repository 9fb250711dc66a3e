"""Fixtures that the tests of evaluations share."""

from __future__ import annotations

import pytest
from counting import Counted


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(monkeypatch)
