"""Artefacts on disk."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
import torch

import wherefrom
from wherefrom.artefacts import files as store


def test_what_was_saved_is_loaded(tmp_path):
    tensors = {"a": torch.randn(3, 4), "b": torch.arange(5), "transposed": torch.randn(2, 3).T}
    store.save(tmp_path / "new" / "x.safetensors", tensors, {"kind": "test", "numbers": [1, 2]})
    loaded, header = store.load(tmp_path / "new" / "x.safetensors")
    assert header == {"kind": "test", "numbers": [1, 2]}
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)


def test_tied_weights_are_saved_both(tmp_path):
    shared = torch.randn(3)
    store.save(tmp_path / "x.safetensors", {"one": shared, "other": shared}, {})
    loaded, _ = store.load(tmp_path / "x.safetensors")
    assert torch.equal(loaded["one"], loaded["other"])


def test_a_failed_write_leaves_what_was_there(tmp_path, monkeypatch):
    store.save_json(tmp_path / "x.json", {"old": True})

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.save_json(tmp_path / "x.json", {"old": False})
    assert json.loads((tmp_path / "x.json").read_text()) == {"old": True}
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(wherefrom.WherefromError, match=r"cannot write .*file"):
        store.save_json(tmp_path / "file" / "x.json", {})


def test_artefacts_are_ordinary_files(tmp_path):
    store.save(tmp_path / "x.safetensors", {"a": torch.zeros(1)}, {})
    store.save_json(tmp_path / "x.json", {})
    assert (tmp_path / "x.safetensors").stat().st_mode == (tmp_path / "x.json").stat().st_mode


def test_files_that_are_missing_foreign_or_damaged_are_named(tmp_path):
    from safetensors.torch import save_file

    with pytest.raises(wherefrom.WherefromError, match="there is no file"):
        store.load(tmp_path / "none.safetensors")
    save_file({"a": torch.zeros(1)}, tmp_path / "foreign.safetensors")
    with pytest.raises(wherefrom.WherefromError, match="not one that wherefrom wrote"):
        store.load(tmp_path / "foreign.safetensors")
    (tmp_path / "damaged.safetensors").write_bytes(b"nonsense")
    with pytest.raises(wherefrom.WherefromError, match="truncated or damaged"):
        store.load(tmp_path / "damaged.safetensors")


def test_fingerprints_tell_apart_what_differs_and_only_that():
    x = torch.randn(4)
    assert store.fingerprint(x, {"a": 1}) == store.fingerprint(x.clone(), {"a": 1})
    others = [
        x + 1,
        x.double(),
        x[:2],
        (x, x),
        {"x": x},
        wherefrom.EDM(),
        wherefrom.EDM(rho=6.0),
        wherefrom.DDPM.linear(),
        1,
        "1",
        1.0,
        None,
    ]
    assert len({store.fingerprint(other) for other in [x, *others]}) == 13


def test_differences_between_settings_are_words():
    assert store.differing({"a": 1, "b": (1, 2)}, {"a": 1, "b": [1, 2]}) == ""
    assert (
        store.differing({"a": 1}, {"a": 2, "c": "x"})
        == "a was 1 and is now 2, c was None and is now 'x'"
    )
