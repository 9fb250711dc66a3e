"""Claims about what the commands on a run folder refuse, and when: before anything long begins, in
one sentence, in the words of the command line.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from test_runs import asked, begun, refused

from pipelines import pipeline, saved_world
from tiny_runs import network, pictures, small_preset
from wherefrom.cli.talk import visible

SIZE = ("--size", "8", "--channels", "1")
FEW = ("--set", "train.batch_size=4")
NET = ["--factory", "net.py:make", "--images", "pictures"]


@pytest.fixture(autouse=True, scope="module")
def _small() -> Iterator[None]:
    with small_preset():
        yield


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def piped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a pipeline of which nothing is made."""
    place = tmp_path_factory.mktemp("piped")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        saved_world("pipe", "pictures", count=4)
        assert asked("init", "run", "--pipeline", "pipe", "--images", "pictures").exit_code == 0
    return place


def factory(*options: str, name: str = "run") -> tuple[str, ...]:
    """`init` of a network of one's own, in the current folder."""
    network(Path())
    pictures(Path("pictures"), 5)
    given = ("--factory", "net.py:make", "--weights", "net.safetensors", "--process", "edm")
    return ("init", name, *given, "--images", "pictures", *options)


def marked(path: str, cond: Any) -> str:
    info = PngInfo()
    info.add_text("wherefrom", json.dumps({"cond": cond}))
    Image.new("L", (8, 8)).save(path, pnginfo=info)
    return path


def nothing_made(run: Path) -> bool:
    return [one.name for one in run.iterdir()] == ["run.toml"]


# --- prompts and classes --------------------------------------------------------------------------


def test_a_missing_prompt_is_said_before_the_pipeline_is_opened(piped: Path) -> None:
    for verb in (["generate"], ["attribute", str(piped / "pictures/00.png")]):
        said = refused(verb[0], piped / "run", *verb[1:])
        assert "generates from a prompt: say which it is with --prompt" in said
    assert nothing_made(piped / "run")


def test_each_option_is_of_its_own_kind_of_model(piped: Path) -> None:
    assert "use --prompt" in refused("generate", piped / "run", "--class", "cat")
    run = begun(Path("plain"), pictures(Path("pictures"), 6), *FEW)
    assert "takes no prompt: leave --prompt out" in refused("generate", run, "--prompt", "a cat")
    toml = run / "run.toml"
    text = toml.read_text().replace("# labels = false", "labels = true")
    toml.write_text(text)
    assert "takes no prompt: use --class" in refused("generate", run, "--prompt", "a cat")
    assert "say which of digit 0" in refused("generate", run)
    long = refused("generate", run, "--class", "7" * 5000)
    assert "there is no class '7777" in long
    assert len(long) < 400


def test_a_picture_whose_mark_does_not_fit_says_so_and_can_be_overruled() -> None:
    run = begun(Path("run"), pictures(Path("pictures"), 6), *FEW)
    said = refused("attribute", run, marked("a.png", "tabby"))
    assert "a.png says itself that it was generated from 'tabby'" in said
    assert "--class none" in said
    assert nothing_made(run)
    assert asked("attribute", run, "a.png", "--class", "none").exit_code == 0


# --- what is there, and what is asked for ---------------------------------------------------------


def test_more_hits_than_images_are_refused_at_once_and_the_usual_are_all_there_are() -> None:
    run = begun(Path("run"), pictures(Path("pictures"), 5), *FEW)
    image = marked("a.png", None)
    assert "from 1 to the 5 items" in refused("attribute", run, image, "--top-k", 6)
    assert nothing_made(run)
    result = asked("attribute", run, image, "--json")
    assert "there are only 5 training images" in result.stderr
    assert len(json.loads(result.stdout)["queries"][0]["most_influential"]) == 5


def test_a_page_is_not_served_by_the_exact_method() -> None:
    run = begun(Path("run"), pictures(Path("pictures"), 5), *FEW)
    assert "use --method index" in refused("serve", run, "--method", "tid")
    assert nothing_made(run)


def test_captions_that_are_not_there_are_said_by_init(piped: Path) -> None:
    given = ("--pipeline", piped / "pipe", "--images", piped / "pictures")
    said = refused("init", "run", *given, "--captions", "nosuch.csv")
    assert "there is no metadata file nosuch.csv" in said
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"file_name;artist\na.png;Ann\n", "separated by semicolons"),
        ("file_name,artist\na.png,Jos\xe9\n".encode("latin-1"), "is not UTF-8"),
        (b"name,artist\na.png,Ann\n", "no file_name"),
    ],
)
def test_metadata_that_cannot_be_read_is_said_by_init_whatever_the_network(
    content: bytes, words: str
) -> None:
    given = factory(*SIZE)
    Path("pictures/metadata.csv").write_bytes(content)
    assert words in refused(*given)
    assert words in refused("init", "run", "--preset", "digits", "--images", "pictures")
    assert not Path("run").exists()


def test_captions_in_text_files_go_with_metadata_of_artists(piped: Path) -> None:
    images = Path("images")
    images.mkdir()
    for name in ("a", "b"):
        Image.new("RGB", (16, 16)).save(images / f"{name}.png")
        (images / f"{name}.txt").write_text(f"a picture of {name}")
    (images / "metadata.csv").write_text("file_name,artist\na.png,Ann\nb.png,Bob\n")
    result = asked("init", "run", "--pipeline", piped / "pipe", "--images", "images")
    assert result.exit_code == 0, result.output
    from wherefrom.runs.run import Run

    run = Run.open("run", "cpu")
    assert [run.pictures.caption(0), run.pictures.caption(1)] == [
        "a picture of a",
        "a picture of b",
    ]
    assert run.pictures.columns["artist"] == ["Ann", "Bob"]


# --- networks that do not fit ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--size", "8"), "the network fails on an item of (3, 8, 8) without a class"),
        ((*SIZE, "--labels"), "with a class"),
    ],
)
def test_a_network_that_does_not_fit_is_said_by_init_and_by_every_command(
    options: tuple[str, ...], words: str
) -> None:
    assert words in refused(*factory(*options))
    assert asked(*factory(*SIZE)).exit_code == 0
    toml = Path("run/run.toml")
    changed = (
        {"channels = 1": "channels = 3"} if "(3" in words else {"# labels = false": "labels = true"}
    )
    for old, new in changed.items():
        assert old in toml.read_text()
        toml.write_text(toml.read_text().replace(old, new))
    more = ["--class", "digit 0"] if "--labels" in options else []
    assert words in refused("generate", "run", *more)
    assert words in refused("fit", "run")


def test_blocks_are_named_in_run_toml_where_they_are_not_found() -> None:
    given = factory(*SIZE, "--set", "draws.count=1", "--set", "tide.epochs=1")
    code = Path("net.py").read_text().replace("self.blocks", "self.body")
    Path("net.py").write_text(code)
    weights = torch.load("net.pt", weights_only=True)
    torch.save({key.replace("blocks", "body"): one for key, one in weights.items()}, "net.pt")
    assert asked(*given[:5], "net.pt", *given[6:]).exit_code == 0
    said = refused("distill", "run")
    assert 'in [model] of run.toml, as blocks = ["body.*"]' in said
    assert nothing_made(Path("run"))
    toml = Path("run/run.toml")
    toml.write_text(toml.read_text().replace("[model]", '[model]\nblocks = ["body.*"]', 1))
    result = asked("distill", "run")
    assert result.exit_code == 0, result.output
    assert "fitting the curvature (5 images, 1 draw)" in result.stderr
    assert "(1 epoch)" in result.stderr


# --- words ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([*NET, "--size", "8"], "give their file with --weights"),
        (
            ["--preset", "wikiart-small"],
            "not named; give one of --images, --tars, --parquet or --dataset",
        ),
        ([*NET, "--weights", "net.pt"], "with --size"),
        (["--preset", "digits", "--dataset", "cifar10"], "give it with --path"),
        ([*NET, "--weights", "net.pt", *SIZE], "give --process"),
    ],
)
def test_init_speaks_of_options(options: list[str], words: str) -> None:
    factory()
    assert words in refused("init", "run", *options)


def test_a_suggested_command_can_be_pasted() -> None:
    run = begun(Path("my run"), pictures(Path("pictures"), 5), *FEW)
    assert "wherefrom attribute 'my run' IMAGE" in refused("report", run)
    assert "wherefrom init 'no run'" in refused("info", "no run")


def test_a_file_that_is_no_image_is_named_and_nothing_else() -> None:
    run = begun(Path("run"), pictures(Path("pictures"), 5), *FEW)
    Path("text.png").write_text("hello")
    assert "BytesIO" not in refused("attribute", run, "text.png")


# --- odd names and numbers ------------------------------------------------------------------------


def test_a_run_below_a_link_finds_its_files() -> None:
    Path("deep/down").mkdir(parents=True)
    os.symlink("deep/down", "link")
    given = factory(*SIZE, name="link/run")
    result = asked(*given)
    assert result.exit_code == 0, result.output
    assert 'images = "../../../pictures"' in Path("link/run/run.toml").read_text()
    assert asked("fit", "link/run").exit_code == 0


def test_whatever_init_writes_it_can_read() -> None:
    Path("odd\x7f\x1b[31m").mkdir()
    pictures(Path("odd\x7f\x1b[31m"), 5)
    begun(Path("run"), Path("odd\x7f\x1b[31m"))
    assert asked("info", "run").exit_code == 0
    bad = os.fsdecode(b"\xff\xfe")
    Path(bad).mkdir()
    pictures(Path(bad), 5)
    assert "is not UTF-8" in refused("init", "other", "--preset", "digits", "--images", bad)
    assert not Path("other").exists()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("model.arguments={when=2020-01-01}", "arguments.when is a date"),
        ("model.arguments={'a b'=3}", "a b"),
        ("tid.damping=" + "9" * 400, "damping is beyond 2**63"),
        ("tid.damping=" + "9" * 5000, "damping must be a number"),
        ("data.size=" + "1" + "0" * 12, "size must be from 1 to 16384"),
        ("draws.count=1000000000000", "count must be from 1 to 100000"),
        ("draws.count=" + "[" * 5000, "count must be a whole number"),
        ("data.images=~nouser/x", "there is no folder ~nouser/x"),
    ],
    ids=lambda value: value[:30],
)
def test_an_odd_value_is_refused_in_one_sentence(line: str, words: str) -> None:
    said = refused(*factory(*SIZE, "--set", line))
    assert words in said
    assert len(said) < 400
    assert not Path("run").exists()


def test_a_run_toml_that_is_nested_too_deeply_is_said() -> None:
    run = begun(Path("run"), pictures(Path("pictures"), 5), *FEW)
    (run / "run.toml").write_text("[model]\nlayers = " + "[" * 5000)
    assert "cannot be read as TOML" in refused("info", run)


def test_no_letter_of_a_file_name_reaches_the_terminal_as_an_order() -> None:
    run = begun(Path("run"), pictures(Path("pictures"), 5), *FEW)
    os.rename("pictures/digit 0/000.png", "pictures/digit 0/\x1b[2J\x9b.png")
    image = marked("a.png", None)
    result = asked("attribute", run, image)
    assert result.exit_code == 0, result.output
    assert "\x1b" not in result.output
    assert "\ufffd[2J\ufffd.png" in result.stdout
    assert "\x1b" not in refused("attribute", run, "\x1b[2J.png")
    machine = asked("attribute", run, image, "--json").stdout
    assert "\x9b" not in machine
    names = [hit["name"] for hit in json.loads(machine)["queries"][0]["most_influential"]]
    assert "digit 0/\x1b[2J\x9b.png" in names


def test_letters_of_every_language_are_seen() -> None:
    text = "änderung 日本 👩\u200d🎨 e\u0301"
    assert visible(text) == text
    assert visible("a\u202eb\udcff") == "a\ufffdb\ufffd"


def test_a_closed_stdout_is_said() -> None:
    code = "from wherefrom.cli import main; main()"
    done = subprocess.run(
        f"{sys.executable} -c '{code}' info nowhere >&-",
        shell=True,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr == "wherefrom: stdout is closed: send it somewhere, as to /dev/null\n"


def test_a_missing_class_of_a_pipeline_is_said_before_it_is_opened() -> None:
    pipeline("dit").save_pretrained("pipe")
    for name in ("cat", "dog"):
        Path("images", name).mkdir(parents=True)
        Image.new("RGB", (16, 16)).save(f"images/{name}/a.png")
    given = ("--pipeline", "pipe", "--images", "images", "--labels")
    assert asked("init", "run", *given).exit_code == 0
    assert "say which of cat, dog it is with --class" in refused("generate", "run")
    assert "takes no prompt: use --class" in refused("generate", "run", "--prompt", "cat")
    assert nothing_made(Path("run"))
