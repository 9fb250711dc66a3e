"""Fixtures that the tests of evaluations share."""

from __future__ import annotations

import pytest
from counting import Counted

from wherefrom.evaluation import weights


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(monkeypatch)


@pytest.fixture
def no_wheels(monkeypatch: pytest.MonkeyPatch) -> None:
    """No installed package has weights, whatever is installed here."""
    monkeypatch.setattr(weights, "find_spec", lambda package: None)
