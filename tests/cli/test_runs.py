"""Claims about the commands on a run folder: what they write, the statuses they end with, and the
one sentence that bad input gets at every door.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from forks import killed
from tiny_runs import SMALL, network, pictures, small_preset
from wherefrom.artefacts import files
from wherefrom.artefacts.artefact import Artefact, there
from wherefrom.cli import main
from wherefrom.cli.app import app
from wherefrom.cli.verbs import _show_hits

VERBS = [
    "init",
    "plan",
    "train",
    "generate",
    "encode",
    "fit",
    "index",
    "distill",
    "merge",
    "attribute",
    "serve",
    "report",
    "info",
]


def asked(*arguments: object) -> Any:
    """What a command ends with; anything but an exit is raised."""
    return CliRunner().invoke(app, [str(one) for one in arguments], catch_exceptions=False)


def refused(*arguments: object, status: int = 1) -> str:
    """The one sentence that a command ends with."""
    result = asked(*arguments)
    assert result.exit_code == status, result.output
    said = [line for line in result.stderr.splitlines() if line.startswith("wherefrom: ")]
    assert len(said) == 1, result.stderr
    assert result.stderr.strip().splitlines()[-1] == said[0]
    assert "Traceback" not in result.stderr
    return said[0]


def begun(folder: Path, images: Path, *options: str) -> Path:
    sets = [part for line in SMALL for part in ("--set", line)]
    result = asked("init", folder, "--preset", "digits", "--images", images, *sets, *options)
    assert result.exit_code == 0, result.output
    return folder


@pytest.fixture(autouse=True, scope="module")
def _small() -> Iterator[None]:
    with small_preset():
        yield


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures, a run, and an image that it generated and attributed."""
    place = tmp_path_factory.mktemp("world")
    pictures(place / "pictures")
    begun(place / "run", place / "pictures")
    assert asked("generate", place / "run", "--seed", 3).exit_code == 0
    result = asked("attribute", place / "run", place / "run/generated/seed-0003.png")
    assert result.exit_code == 0, result.output
    return place


IMAGE = "run/generated/seed-0003.png"


# --- what is shown --------------------------------------------------------------------------------


def test_an_attribution_is_a_table_with_names_and_standings(world: Path) -> None:
    result = asked("attribute", world / "run", world / IMAGE, "--top-k", 4)
    rows = [line.split() for line in result.stdout.splitlines() if ".png" in line and "sd" in line]
    assert [row[0] for row in rows] == ["1", "2", "3", "4"]
    assert all(row[1] == "digit" and row[-1] == "sd" for row in rows)
    assert "report.html" in result.stdout


def test_json_is_all_that_stands_on_stdout(world: Path) -> None:
    result = asked("attribute", world / "run", world / IMAGE, world / IMAGE, "--json", "--top-k", 2)
    said = json.loads(result.stdout)
    assert [len(query["most_influential"]) for query in said["queries"]] == [2, 2]
    best = said["queries"][0]["most_influential"][0]
    assert best["rank"] == 1
    assert (world / "pictures" / best["name"]).is_file()
    assert best["score"] >= said["queries"][0]["most_influential"][1]["score"]
    assert "<html" in Path(said["report"]).read_text()
    exact = asked("attribute", world / "run", world / IMAGE, "--json", "--exact", 0.2, "--top-k", 2)
    hit = json.loads(exact.stdout)["queries"][0]["most_influential"][0]
    assert hit["standardised"] is None  # JSON has no NaN


def test_every_method_can_be_asked(world: Path) -> None:
    for method, name in (("index", "TID index"), ("tid", "TID")):
        result = asked("attribute", world / "run", world / IMAGE, "--json", "--method", method)
        assert json.loads(result.stdout)["method"] == name


def test_generated_images_are_of_their_seeds(world: Path) -> None:
    result = asked("generate", world / "run", "--seed", 5, "--count", 2, "--json")
    made = [Path(path) for path in json.loads(result.stdout)["generated"]]
    assert [path.name for path in made] == ["seed-0005.png", "seed-0006.png"]
    assert Image.open(made[0]).size == (8, 8)
    mark = json.loads(Image.open(made[1]).info["wherefrom"])
    assert (mark["seed"], mark["cond"]) == (6, None)


def test_info_says_what_is_done_and_computes_nothing(world: Path, tmp_path: Path) -> None:
    said = json.loads(asked("info", world / "run", "--json").stdout)
    assert [one["stage"] for one in said["stages"]] == ["training", "curvature", "index"]
    assert all(one["finished"] for one in said["stages"])
    assert said["missing"] == []
    text = asked("info", world / "run").stdout
    assert 'preset = "digits"' in text
    begun(tmp_path / "new", world / "pictures")
    result = asked("info", tmp_path / "new")
    assert "not done yet: training, curvature, index" in result.stdout
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["run.toml"]


def test_a_report_is_written_of_what_is_kept_and_trains_nothing(
    world: Path, tmp_path: Path
) -> None:
    run = begun(tmp_path / "run", world / "pictures")
    assert "has attributed nothing yet" in refused("report", run)
    made = json.loads(asked("attribute", run, world / IMAGE, "--json").stdout)["report"]
    Path(made).unlink()
    result = asked("report", run)
    assert result.stdout.split() == [made]
    assert "<html" in Path(made).read_text()
    text = (run / "run.toml").read_text()
    (run / "run.toml").write_text(text.replace("steps = 4 ", "steps = 5 "))
    assert "run.toml in" in refused("report", run)
    assert len(list(run.glob("training-*"))) == 1


def test_progress_is_told_unless_it_is_quiet(world: Path, tmp_path: Path) -> None:
    begun(tmp_path / "a", world / "pictures")
    result = asked("train", tmp_path / "a")
    assert "training the network (4 steps on 20 images): done in" in result.stderr
    assert "\r" not in result.stderr
    begun(tmp_path / "b", world / "pictures")
    result = asked("train", tmp_path / "b", "--quiet")
    assert result.stderr == ""
    assert "is trained" in result.stdout


@pytest.mark.parametrize("verb", [command.callback.__name__ for command in app.registered_commands])
def test_every_help_has_an_example(verb: str) -> None:
    result = asked(verb, "--help")
    assert result.exit_code == 0
    assert f"Example: wherefrom {verb} " in " ".join(result.stdout.split())
    assert {*VERBS} <= {command.callback.__name__ for command in app.registered_commands}


def test_completion_can_be_installed() -> None:
    assert "--install-completion" in asked("--help").stdout


def test_what_stands_before_a_name_takes_no_column_from_others(capsys) -> None:
    columns = {"label": "2", "tar": "0.tar", "folder": "here", "artist": "Ada"}
    hit = {"rank": 1, "name": "0.tar/7.png", "score": 1.0, "standardised": None, "caption": "a cat"}
    row = {"query": "q.png", "condition": None, "most_influential": [{**hit, "columns": columns}]}
    _show_hits(row, "TID")
    shown = capsys.readouterr().out
    assert "Ada" in shown
    assert "here" not in shown
    assert shown.count("0.tar") == 1


# --- init -----------------------------------------------------------------------------------------


def test_init_asks_a_person_for_what_is_missing(world: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("wherefrom.cli.begin._person", lambda: True)
    network(tmp_path)
    answers = ["factory", f"{tmp_path}/net.py:make", f"{tmp_path}/net.pt", "edm", "8"]
    answers += [str(world / "pictures"), ""]
    given = ["init", str(tmp_path / "run"), "--channels", "1"]
    result = CliRunner().invoke(app, given, input="\n".join(answers))
    assert result.exit_code == 0, result.output
    text = (tmp_path / "run/run.toml").read_text()
    assert f'factory = "{tmp_path}/net.py:make"' in text
    assert "size = 8" in text


def test_init_without_a_person_says_what_is_missing(tmp_path: Path) -> None:
    words = "a model: not named; give one of --preset, --pipeline or --factory"
    assert words in refused("init", tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--preset", "digit"], "there is no preset 'digit'; there are digits"),
        (["--preset", "digits", "--images", "nowhere"], "there is no folder nowhere"),
        (["--preset", "digits", "--images", "empty"], "empty holds no images"),
        (["--preset", "digits", "--images", "broken"], "cannot be decoded as an image"),
        (["--preset", "digits", "--set", "tid.sample=3"], "did you mean samples?"),
        (["--preset", "digits", "--set", "samples=3"], "not of the form table.key=value"),
        (["--pipeline", "nowhere", "--images", "good"], "nowhere is no folder: name what pipe"),
        (["--factory", "net.py:make", "--weights", "whole.pt", "--process", "edm", "--size", "8",
          "--channels", "1", "--images", "good"], "opening it would run code"),
        (["--factory", "net.py:make", "--weights", "net.pt", "--process", "edm",
          "--images", "good"], "needs size"),
        (["--preset", "wikiart-small", "--images", "flat"], "lies in no subfolder"),
    ],
)  # fmt: skip
def test_init_refuses_what_cannot_be_and_makes_nothing(
    world: Path, tmp_path: Path, monkeypatch, options, words
) -> None:
    monkeypatch.chdir(tmp_path)
    network(tmp_path)
    torch.save(torch.nn.Linear(2, 2), "whole.pt")
    for name in ("empty", "broken", "flat"):
        Path(name).mkdir()
    Path("broken/a.png").write_bytes(b"no image")
    Image.new("L", (8, 8)).save("flat/a.png")
    os.symlink(world / "pictures", "good")
    assert words in refused("init", "run", *options)
    assert not Path("run").exists()


def test_init_leaves_what_is_there_alone(world: Path, tmp_path: Path) -> None:
    assert "holds a run already" in refused("init", world / "run", "--preset", "digits")
    (tmp_path / "thesis.txt").write_text("mine")
    assert "has files in it that are no run's" in refused("init", tmp_path, "--preset", "digits")
    assert "is a file" in refused("init", tmp_path / "thesis.txt", "--preset", "digits")


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb not in ("init", "report")])
def test_a_folder_that_is_no_run_is_refused_by_every_command(tmp_path: Path, verb: str) -> None:
    image = tmp_path / "a.png"
    Image.new("L", (8, 8)).save(image)
    more = [image] if verb == "attribute" else []
    assert "there is no run" in refused(verb, tmp_path / "nowhere", *more)
    assert "holds no run.toml, so it is no run" in refused(verb, tmp_path, *more)
    assert "is a file, so it is no run" in refused(verb, image, *more)
    (tmp_path / "run.toml").write_text("[model\n")
    assert "cannot be read as TOML" in refused(verb, tmp_path, *more)
    (tmp_path / "run.toml").write_text('[project]\nname = "another\'s"\n')
    assert "line 1: there is no table called [project]" in refused(verb, tmp_path, *more)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("none.png", None, "there is no file"),
        ("text.png", b"hello", "cannot be decoded as an image"),
        ("empty.png", b"", "cannot be decoded as an image"),
        ("cut.png", "cut", "cannot be decoded as an image"),
        ("folder", "folder", "is a folder: name images"),
    ],
)
def test_a_picture_that_is_none_is_refused_before_anything_is_made(
    world: Path, tmp_path: Path, name, content, words
) -> None:
    begun(tmp_path / "run", world / "pictures")
    path = tmp_path / name
    if content == "folder":
        path.mkdir()
    elif content == "cut":
        path.write_bytes((world / IMAGE).read_bytes()[:60])
    elif content is not None:
        path.write_bytes(content)
    assert words in refused("attribute", tmp_path / "run", path)
    assert [one.name for one in (tmp_path / "run").iterdir()] == ["run.toml"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["generate", "--seed", "-1"], "--seed must be from 0 to 9223372036854775807, not -1"),
        (["generate", "--count", "0"], "--count must be from 1 to 100000, not 0"),
        (["generate", "--class", "dog"], "this model takes no condition: leave 'dog' out"),
        (["generate", "--class", "dog", "--prompt", "x"], "give --class or --prompt"),
        (["generate", "--device", "tpu"], "there is no device 'tpu'"),
        (["generate", "--device", "cuda:7"], "there is no device cuda:7 on this machine"),
        (["attribute", "IMAGE", "--top-k", "0"], "--top-k must be at least 1"),
        (["attribute", "IMAGE", "--top-k", "21"], "top_k must be from 1 to the 20 items"),
        (["attribute", "IMAGE", "--exact", "2"], "exact must be above 0 and at most 1"),
        (["attribute", "IMAGE", "--method", "magic"], "there is no method 'magic'"),
        (["attribute", "IMAGE", "--method", "tid", "--exact", ".1"], "tid is exact already"),
        (["report", "nothing"], "keeps no attribution 'nothing'"),
        (["report", "--fraction", "0.1"], "is a run: --of, --data, --fraction and --metric"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_an_option_that_cannot_be_is_refused_by_name(world: Path, options, words) -> None:
    verb, *rest = [str(world / IMAGE) if one == "IMAGE" else one for one in options]
    assert words in refused(verb, world / "run", *rest)


def test_wrong_usage_ends_with_2(world: Path) -> None:
    for arguments in (["attribute", world / "run"], ["attribut"], ["fit", world / "run", "--no"]):
        assert asked(*arguments).exit_code == 2


def test_a_folder_that_may_not_be_written_is_refused(world: Path, tmp_path: Path, monkeypatch):
    begun(tmp_path / "run", world / "pictures")
    real = os.access  # root may write everywhere, so its answer stands for the disk's

    def access(path: Any, mode: int) -> bool:
        return real(path, mode) and not (mode == os.W_OK and str(tmp_path) in str(path))

    monkeypatch.setattr(files.os, "access", access)
    for arguments in (["train"], ["generate"], ["attribute", world / IMAGE]):
        verb, *rest = arguments
        assert "cannot write to" in refused(verb, tmp_path / "run", *rest)


def test_a_full_disk_is_said_and_leaves_what_was_there(world: Path, tmp_path: Path, monkeypatch):
    begun(tmp_path / "run", world / "pictures")
    assert asked("train", tmp_path / "run").exit_code == 0

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "fsync", full)
        assert "No space left on device" in refused("fit", tmp_path / "run")
        assert "No space left on device" in refused("generate", tmp_path / "run")
    result = asked("fit", tmp_path / "run")
    assert result.exit_code == 0, result.output
    assert "training the network" not in result.stderr


# --- interrupted ----------------------------------------------------------------------------------


def command(*arguments: object) -> None:
    """The command, of a tiny preset, in a process that ends with it."""
    sys.argv = ["wherefrom", *map(str, arguments)]
    with small_preset():
        main()


def step_of(run: Path) -> int:
    found = list(run.glob("training-*/training"))
    if not found or not there(found[0]):
        return 0
    return int(Artefact.open(found[0], "training").state["step"])


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=["interrupted", "killed"])
def test_training_goes_on_by_the_same_command(world: Path, tmp_path: Path, how) -> None:
    run = begun(tmp_path / "run", world / "pictures", "--set", "train.steps=60")
    status, said = killed(lambda: command("train", run), lambda: step_of(run) > 0, how)
    reached = step_of(run)
    assert 0 < reached < 60, said
    if how == signal.SIGINT:
        assert status == 130
        last = said.strip().splitlines()[-1]
        assert last == "wherefrom: interrupted; run the same command again to go on from here"
    result = asked("train", run)
    assert result.exit_code == 0
    assert "from where it was interrupted" in result.stderr
    assert step_of(run) == 60
    assert len(list(run.glob("training-*"))) == 1


def test_an_attribution_that_was_killed_while_it_indexed_ends_as_if_it_had_not_been(
    world: Path, tmp_path: Path
) -> None:
    run = begun(tmp_path / "run", world / "pictures")
    killed(
        lambda: command("attribute", run, world / IMAGE),
        lambda: list(run.glob("index-*/stage.json")),
    )
    result = asked("attribute", run, world / IMAGE, "--json")
    assert result.exit_code == 0, result.output
    mine = json.loads(result.stdout)["queries"][0]["most_influential"]
    other = json.loads(asked("attribute", world / "run", world / IMAGE, "--json").stdout)
    assert mine == other["queries"][0]["most_influential"]
