"""Claims about what a run keeps: an attribution is of its own network, images and precision, its
page is what the terminal shows, and a picture says what made it.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from safetensors.torch import load_file, save_file

import wherefrom
from tiny_runs import NETWORK, network, pictures
from wherefrom.artefacts import files
from wherefrom.data.digits import digits
from wherefrom.data.stamps import stamps
from wherefrom.runs.asking import file_words
from wherefrom.runs.beginning import begin
from wherefrom.runs.kept import read_query
from wherefrom.runs.run import Run
from wherefrom.runs.standing import COUNTS

SMALL = {"draws": {"count": 2}, "index": {"dim": 64}, "generate": {"steps": 2}}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures with metadata, a network of one's own, and a run of both that has attributed."""
    place = tmp_path_factory.mktemp("made")
    pictures(place / "pictures", 6)
    names = sorted(path.relative_to(place / "pictures") for path in place.rglob("*.png"))
    lines = [f"{name},{100 + number},Ann{number % 2},x" for number, name in enumerate(names)]
    text = "\n".join(["file_name,score,artist,index", *lines])
    (place / "pictures" / "metadata.csv").write_text(text + "\n")
    network(place)
    model = {"factory": str(place / "net.py:make"), "weights": str(place / "net.safetensors")}
    data = {"images": str(place / "pictures"), "size": 8, "channels": 1}
    begin(place / "run", {"model": model, "data": data, "process": {"kind": "edm"}, **SMALL})
    run = Run.open(place / "run", "cpu")
    run.attribute(list(run.generate([0])), top_k=2)
    return place


@pytest.fixture
def world(made: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy of all that, to be changed; copies keep the times by which pictures are known."""
    shutil.copytree(made, tmp_path / "made")
    path = tmp_path / "made" / "run" / "run.toml"
    path.write_text(path.read_text().replace(str(made), str(tmp_path / "made")))
    return tmp_path / "made"


def opened(world: Path, tell: Any = None) -> Run:
    return Run.open(world / "run", "cpu", tell)


IMAGE = "run/generated/seed-0000.png"


def other_weights(world: Path) -> None:
    weights = load_file(world / "net.safetensors")
    save_file({name: one + 0.01 for name, one in weights.items()}, world / "net.safetensors")


# --- columns --------------------------------------------------------------------------------------


def test_a_column_never_stands_in_for_a_number_of_the_result(world: Path) -> None:
    run = opened(world)
    kept = run.attribute([world / IMAGE], top_k=2)
    best = kept.described(run.pictures)[0]["most_influential"][0]
    assert best["score"] == pytest.approx(float(kept.hits.scores[0, 0]))
    assert best["index"] == int(kept.hits.indices[0, 0])
    assert best["columns"]["score"] == str(100 + best["index"])
    assert best["columns"]["index"] == "x"


# --- reports --------------------------------------------------------------------------------------


def test_a_report_of_another_network_is_refused_by_name(world: Path) -> None:
    name = opened(world).kept()[0].name
    assert [path.parent.name for path in opened(world).report()] == [name]
    other_weights(world)
    with pytest.raises(wherefrom.WherefromError, match=f"{name} left out: it is of another net"):
        list(opened(world).report())


def test_a_report_of_another_process_is_refused(world: Path) -> None:
    path = world / "run" / "run.toml"
    path.write_text(path.read_text().replace('kind = "edm"', 'kind = "edm"\nsigma_data = 0.3'))
    with pytest.raises(wherefrom.WherefromError, match="of another network"):
        list(opened(world).report())


def test_what_can_be_reported_is_and_what_cannot_is_said(world: Path) -> None:
    old = opened(world).kept()[0].name
    other_weights(world)
    with pytest.warns(UserWarning, match="says that another model"):
        new = opened(world).attribute([world / IMAGE], top_k=2).name
    assert new != old
    with pytest.warns(UserWarning, match=f"{old} left out"):
        assert [path.parent.name for path in opened(world).report()] == [new]
    with pytest.raises(wherefrom.WherefromError, match=f"{old} left out"):
        list(opened(world).report([old, new]))


def test_a_damaged_attribution_does_not_keep_others_from_being_reported(world: Path) -> None:
    kept = opened(world).kept()[0]
    second = opened(world).attribute([world / IMAGE], top_k=1)
    (kept.folder / "query-0.png").write_bytes(b"no picture")
    with pytest.warns(UserWarning, match=f"{kept.name} left out"):
        assert [path.parent.name for path in opened(world).report()] == [second.name]


def test_of_an_attribution_of_an_older_version_the_network_is_not_known(
    world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = opened(world).kept()[0]
    other_weights(world)
    from wherefrom.runs import pages

    older = wherefrom.runs.run.Kept.read(kept.folder)
    object.__setattr__(older, "network", None)
    monkeypatch.setattr(pages.Kept, "read", lambda _: older)
    with pytest.warns(UserWarning, match="is not known, since an older version kept it"):
        assert list(opened(world).report()) == [kept.page]
    assert opened(world).subject.denoiser.identity()["weights"][:8] not in kept.page.read_text()


# --- pages ----------------------------------------------------------------------------------------


def test_a_page_says_what_the_terminal_says(world: Path) -> None:
    page = opened(world).kept()[0].page
    assert "Zoe" not in page.read_text()
    assert "seed-0000.png" in page.read_text(), "which file was asked about"
    path = world / "pictures" / "metadata.csv"
    path.write_text(path.read_text().replace("Ann", "Zoe"))
    (page.parent / "query-0.png").unlink()
    opened(world).attribute([world / IMAGE], top_k=2)
    assert "Zoe" in page.read_text()
    assert (page.parent / "query-0.png").is_file()


def test_a_page_that_cannot_be_written_takes_nothing_from_the_answer(
    world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.warns(UserWarning, match="No space left"):
        kept = opened(world).attribute([world / IMAGE], top_k=2)
    assert kept.hits.indices.shape == (1, 2)


# --- what an attribution depends on ---------------------------------------------------------------


def test_precision_is_part_of_what_an_exact_attribution_depends_on(world: Path) -> None:
    first = opened(world).attribute([world / IMAGE], method="tid", top_k=2)
    path = world / "run" / "run.toml"
    path.write_text(path.read_text().replace("# precision = ...", 'precision = "bf16"'))
    second = opened(world).attribute([world / IMAGE], method="tid", top_k=2)
    assert first.name != second.name
    assert second.hits.about["precision"] == "bfloat16"
    parts = opened(world)._student_parts
    assert parts["precision"] == "bf16"
    assert len(list((world / "run").glob("curvature-*"))) == 1, "it is of both"


# --- a factory's code -----------------------------------------------------------------------------


def test_a_changed_forward_makes_anew_what_was_made_with_the_old_one(world: Path) -> None:
    said: list[str] = []
    opened(world, said.append).attribute([world / IMAGE], top_k=2)
    assert said == []
    (world / "net.py").write_text(
        NETWORK.replace("torch.tanh(block(h))", "2 * torch.tanh(block(h))")
    )
    with pytest.warns(UserWarning, match=r"another model \(or other code\) made it"):
        opened(world, said.append).attribute([world / IMAGE], top_k=2)
    assert "the code of the factory was another one" in said[0]
    assert [line.split()[0] for line in said[::2]] == ["fitting", "indexing"]
    with pytest.warns(UserWarning, match="left out: it is of another network, process or code"):
        assert len(list(opened(world).report())) == 1
    (world / "net.py").write_text(NETWORK)
    said.clear()
    opened(world, said.append).attribute([world / IMAGE], top_k=2)
    assert said == []


def test_modules_beside_a_factory_count_and_are_read_anew(tmp_path: Path) -> None:
    from wherefrom.runs.networks import made_network
    from wherefrom.runs.settings import ModelTable

    network(tmp_path)
    (tmp_path / "bricks_of_mine.py").write_text(NETWORK)
    (tmp_path / "unused_of_mine.py").write_text("x = 1\n")
    (tmp_path / "own.py").write_text("from bricks_of_mine import make as make\n")
    table = ModelTable(factory="own.py:make", weights="net.pt")
    made, code = made_network(table, tmp_path)
    (tmp_path / "unused_of_mine.py").write_text("x = 2\n")
    assert made_network(table, tmp_path).code == code
    (tmp_path / "bricks_of_mine.py").write_text(NETWORK.replace("self.last(h)", "0 * self.last(h)"))
    again = made_network(table, tmp_path)
    assert again.code != code
    x, sigma = torch.ones(1, 1, 8, 8), torch.ones(1)
    assert made(x, sigma).abs().sum() > 0
    assert again.made(x, sigma).abs().sum() == 0, "not what Python had in its memory"


# --- pictures that are generated ------------------------------------------------------------------


def test_other_conditions_have_other_files() -> None:
    assert file_words("dog") == "-dog"
    assert file_words(3) == "-3"
    assert file_words(None) == ""
    assert file_words("a b") != file_words("a_b")
    assert file_words("x" * 41) != file_words("x" * 42)
    assert file_words("a b").startswith("-a_b-")


def test_a_picture_says_which_model_made_it(world: Path) -> None:
    mark = json.loads(Image.open(world / IMAGE).info["wherefrom"])
    assert len(mark["model"]) == 16
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opened(world).attribute([world / IMAGE], top_k=2)


@pytest.mark.parametrize(("said", "cond"), [(True, None), (1, 1), ("dog", "dog"), (2.5, None)])
def test_a_mark_is_a_text_or_a_whole_number(tmp_path: Path, said: Any, cond: Any) -> None:
    info = PngInfo()
    info.add_text("wherefrom", json.dumps({"cond": said}))
    Image.new("L", (8, 8)).save(tmp_path / "a.png", pnginfo=info)
    assert read_query(tmp_path / "a.png").cond == cond
    assert read_query(tmp_path / "a.png", marks=False).cond is None


# --- info -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "missing"),
    [
        ("count = 2", "count = 3", ["curvature", "index"]),
        ("dim = 64", "dim = 32", ["index"]),
        ("# samples = 2000", "samples = 3", ["curvature", "index"]),
        ("# samples = 2000", "samples = 1000", []),
        ("# damping = 0.1", "damping = 0.2", ["index"]),
        ("# top_k = 8", "top_k = 4", []),
        ("# method = \"index\"", "method = \"tide\"", ["student", "bank"]),
    ],
)  # fmt: skip
def test_info_calls_done_what_the_present_settings_have(
    world: Path, old: str, new: str, missing: list[str]
) -> None:
    assert opened(world).info()["missing"] == []
    path = world / "run" / "run.toml"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    info = opened(world).info()
    assert info["missing"] == missing
    for one in info["stages"]:
        assert one["of_these_settings"] == (one["stage"] not in missing)


def test_info_knows_how_many_images_known_data_sets_have() -> None:
    assert len(digits()) == COUNTS["digits"]
    assert len(stamps()) == COUNTS["stamps"]
