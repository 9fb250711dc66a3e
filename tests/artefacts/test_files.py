"""Files are written whole or not at all."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
import torch

import wherefrom
from forks import Fork
from wherefrom.artefacts import files


def test_what_was_saved_is_loaded(tmp_path):
    tensors = {"a": torch.randn(3, 4), "b": torch.arange(5), "transposed": torch.randn(2, 3).T}
    files.save(tmp_path / "new" / "x.safetensors", tensors, {"kind": "test", "numbers": [1, 2]})
    loaded, header = files.load(tmp_path / "new" / "x.safetensors")
    assert header == {"kind": "test", "numbers": [1, 2]}
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)


def test_tied_weights_are_saved_both(tmp_path):
    shared = torch.randn(3)
    files.save(tmp_path / "x.safetensors", {"one": shared, "other": shared}, {})
    loaded, _ = files.load(tmp_path / "x.safetensors")
    assert torch.equal(loaded["one"], loaded["other"])


def test_a_failed_write_leaves_what_was_there(tmp_path, monkeypatch):
    files.save_json(tmp_path / "x.json", {"old": True})

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        files.save_json(tmp_path / "x.json", {"old": False})
    assert json.loads((tmp_path / "x.json").read_text()) == {"old": True}
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


def test_what_a_killed_writer_left_is_taken_away_and_what_one_elsewhere_writes_is_not(
    tmp_path, monkeypatch
):
    gone = Fork(lambda: None)
    gone.end()
    written = list[str]()

    def left(of: str) -> None:
        """A part as a process of that machine leaves it, of which the number is nobody's here."""
        monkeypatch.setattr(files, "_MACHINE", of)
        monkeypatch.setattr(os, "getpid", lambda: gone.pid)

        def killed(part: str) -> None:
            written.append(part)
            os.link(part, f"{part}.kept")
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            files.atomically(tmp_path / "x.json", killed)
        os.rename(f"{written[-1]}.kept", written[-1])
        monkeypatch.undo()

    left("ffffffff" if files._MACHINE != "ffffffff" else "00000000")
    left(files._MACHINE)
    assert [os.path.exists(part) for part in written] == [True, True]
    files.save_json(tmp_path / "x.json", {})
    assert [os.path.exists(part) for part in written] == [True, False]


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(wherefrom.WherefromError, match=r"cannot write .*file"):
        files.save_json(tmp_path / "file" / "x.json", {})


def test_artefacts_are_ordinary_files(tmp_path):
    files.save(tmp_path / "x.safetensors", {"a": torch.zeros(1)}, {})
    files.save_json(tmp_path / "x.json", {})
    assert (tmp_path / "x.safetensors").stat().st_mode == (tmp_path / "x.json").stat().st_mode


def test_files_that_are_missing_foreign_or_damaged_are_named(tmp_path):
    from safetensors.torch import save_file

    with pytest.raises(wherefrom.WherefromError, match="there is no file"):
        files.load(tmp_path / "none.safetensors")
    save_file({"a": torch.zeros(1)}, tmp_path / "foreign.safetensors")
    with pytest.raises(wherefrom.WherefromError, match="not one that wherefrom wrote"):
        files.load(tmp_path / "foreign.safetensors")
    (tmp_path / "damaged.safetensors").write_bytes(b"nonsense")
    with pytest.raises(wherefrom.WherefromError, match="truncated or damaged"):
        files.load(tmp_path / "damaged.safetensors")
