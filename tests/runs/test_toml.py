"""Claims about run.toml: what is wrong is said in one sentence with its line, and what is written
is read again.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import wherefrom
from wherefrom.runs.settings import TABLES, tables_of
from wherefrom.runs.toml import line_of, read_settings, written

GOOD = """\
[model]
preset = "digits"

[data]
dataset = "digits"
"""


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        (GOOD + "[tid]\nsampels = 3\n", 7, "no key in [tid] called sampels: did you mean samples?"),
        (GOOD + "[tidd]\nsamples = 3\n", 6, "no table called [tidd]: did you mean tid?"),
        (GOOD + "[tid]\nsamples = 0\n", 7, "samples must be at least 1, not 0"),
        (GOOD + "[tid]\nsamples = 2.5\n", 7, "samples must be a whole number, not 2.5"),
        (GOOD + "[tid]\n\n# x\nsamples = true\n", 9, "samples must be a whole number"),
        (GOOD + '[tid]\ndamping = "much"\n', 7, "damping must be a number"),
        (GOOD + '[attribute]\nmethod = "magic"\n', 7, "method must be one of index, tid, tide"),
        (GOOD + "[draws]\nseed = -1\n", 7, "seed must be from 0 to"),
        (GOOD + '[process]\nkind = "edm"\n', 7, "kind has no place in [process] here"),
        (GOOD.replace('"digits"', "3", 1), 2, "preset must be one of digits"),
        (GOOD.replace("preset", "pipeline"), 5, "a pipeline takes a folder: use images"),
        (GOOD + 'labels = "yes"\n', 6, "labels must be True or False"),
        (GOOD + 'images = "x"\n', 5, "[data] has both images and dataset"),
        (GOOD.replace('preset = "digits"', ""), 1, "[model] names none: give one of preset"),
        (GOOD.replace("digits", "cifar10"), 5, "cifar10 needs its place: add path"),
        ('model.preset = "digits"\ndata.dataset = "digits"\ntid.sample = 1', 3, "called sample"),
        ('model = {preset = "digits", pipelin = 1}\n', 1, "no key in [model] called pipelin"),
        ("model = 3\n", 1, "model is a table"),
        (GOOD.replace("\n\n", '\nlora = "x"\n'), 3, "only a pipeline has it"),
        ('[model]\nfactory = "a.py:b"\n[data]\nimages = "x"\nsize = 8', 2, "needs weights"),
        (
            '[model]\nfactory = "a:b"\nweights = "w"\n[process]\nkind = "flow"\nrho = 7\n',
            6,
            "flow has no such number",
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_with_its_line(tmp_path: Path, text, line, words) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(wherefrom.WherefromError) as refused:
        read_settings(path)
    said = str(refused.value)
    assert said.startswith(f"{path}, line {line}: ")
    assert words in said
    assert "\n" not in said


def test_what_is_no_toml_is_said_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(GOOD + "[tid\n")
    with pytest.raises(wherefrom.WherefromError, match=r"cannot be read as TOML: .*line 6"):
        read_settings(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(wherefrom.WherefromError, match="not text in UTF-8"):
        read_settings(path)


@pytest.mark.parametrize(
    "given",
    [
        {"model": {"preset": "digits", "seed": 3}, "data": {"dataset": "digits", "labels": False}},
        {
            "model": {"pipeline": 'a "quoted"\\ name', "layers": ["a.*", "b"], "size": [8, 16]},
            "data": {"images": "änderung", "captions": "a photo, with # and = in it"},
            "attribute": {"exact": 0.02},
        },
        {
            "model": {"factory": "net.py:make", "weights": "w.pt", "arguments": {"width": 8}},
            "process": {"kind": "ddpm", "schedule": "linear", "end": 1e-2},
            "data": {"images": "x", "size": 8, "channels": 1, "labels": True},
        },
    ],
    ids=["preset", "pipeline", "factory"],
)
def test_what_is_written_is_read_again(tmp_path: Path, given) -> None:
    (tmp_path / "run.toml").write_text(written(given))
    assert read_settings(tmp_path / "run.toml") == tables_of(given)


def test_every_line_that_stands_as_a_comment_may_be_uncommented(tmp_path: Path) -> None:
    text = written({"model": {"preset": "digits"}, "data": {"dataset": "digits"}})
    lines = [line.removeprefix("# ") if " = " in line else line for line in text.splitlines()]
    lines = [line for line in lines if "= ..." not in line]
    (tmp_path / "run.toml").write_text("\n".join(lines))
    settings = read_settings(tmp_path / "run.toml")
    assert settings == tables_of({"model": {"preset": "digits"}, "data": {"dataset": "digits"}})
    shown = {line.partition(" = ")[0] for line in text.splitlines() if " = " in line}
    assert {"# samples", "# dim", "# epochs", "# method"} <= shown


def test_every_key_says_what_it_is() -> None:
    for name, table in TABLES.items():
        assert table.__doc__.startswith(f"[{name}]: ")
        for key in table.__dataclass_fields__.values():
            assert key.metadata["words"], f"{name}.{key.name}"


def test_a_key_is_found_in_its_own_table_and_not_in_another_s() -> None:
    text = "[draws]\ncount = 8\nseed = 0\n\n[tide]\nseed = 1\n"
    assert line_of(text, ("draws", "seed")) == 3
    assert line_of(text, ("tide", "seed")) == 6
    assert line_of(text, ("tide", "epochs")) == 5
    assert line_of(text, ("index", "dim")) is None
