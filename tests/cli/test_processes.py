"""Claims about commands by several processes: torchrun finds what one process finds, shards that
know of no other are merged, and what is missing, doubled or one process's work is said.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pipelines import saved_world
from tiny_runs import SMALL, network, pictures
from wherefrom.artefacts.lock import Lock
from wherefrom.cli.app import app
from wherefrom.errors import WherefromError
from wherefrom.running.launch import Launched, launched

TOGETHER = {"WORLD_SIZE": "4", "RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}


def asked(*arguments: object, status: int = 0) -> str:
    """What a command says; it must end with this status."""
    told = [str(one) for one in arguments]
    told += [] if told[0] == "info" else ["--device", "cpu"]
    result = CliRunner().invoke(app, told, catch_exceptions=False)
    assert result.exit_code == status, result.output
    return result.stderr if status else result.stdout


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a network of one's own, with nothing made, and an image."""
    place = tmp_path_factory.mktemp("begun")
    pictures(place / "pictures")
    net = network(place / "net")
    sets = [
        part
        for line in [*(one for one in SMALL if "train" not in one), "tid.batch_size=4"]
        for part in ("--set", line)
    ]
    model = ["--factory", f"{net / 'net.py'}:make", "--weights", str(net / "net.safetensors")]
    model += ["--process", "edm"]
    data = ["--images", str(place / "pictures"), "--channels", "1", "--size", "8"]
    result = CliRunner().invoke(app, ["init", str(place / "run"), *model, *data, *sets])
    assert result.exit_code == 0, result.output
    asked("generate", place / "run", "--seed", 3)
    return place / "run"


@pytest.fixture
def run(begun: Path, tmp_path: Path) -> Path:
    """A copy of it, to be worked on."""
    shutil.copytree(begun, tmp_path / "run")  # its paths are whole
    return tmp_path / "run"


def image(run: Path) -> Path:
    return run / "generated" / "seed-0003.png"


def hits(said: str) -> list[tuple[str, float]]:
    found = json.loads(said)["queries"][0]["most_influential"]
    return [(one["name"], one["score"]) for one in found]


# --- torchrun -------------------------------------------------------------------------------------


def by_two(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A command that torchrun starts in two processes."""
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    path = os.pathsep.join(sys.path)
    return subprocess.run(
        [sys.executable, *torchrun, "-m", "wherefrom", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )


def test_what_is_amiss_in_all_processes_is_said_once(run: Path) -> None:
    done = by_two("attribute", str(run), "missing.png", "--device", "cpu")
    assert done.returncode == 1
    assert done.stderr.count("there is no file missing.png") == 1


def test_torchrun_finds_what_one_process_finds_and_speaks_once(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "alone")
    words = ["--method", "tid", "--json", "--top-k", "5", "--device", "cpu"]
    done = by_two("attribute", str(run), str(image(run)), *words)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("fitting the curvature (20 images, 2 draws): done") == 1
    assert done.stderr.count("curvature (process 0 of 2): 20 of 20 images") == 1  # half of 2 x 20
    assert "(process 1 of 2)" not in done.stderr
    alone = hits(asked("attribute", tmp_path / "alone", image(run), *words[:-2]))
    together = hits(done.stdout)  # JSON alone: the second process says nothing
    assert [name for name, _ in together] == [name for name, _ in alone]
    assert [score for _, score in together] == pytest.approx([score for _, score in alone], 1e-4)
    assert len(list((run / "attributions").iterdir())) == 1
    assert not list(run.rglob("parts"))
    assert "index" in asked("info", run).split("not done yet:")[1]


def test_of_several_processes_one_looks_for_broken_images(run: Path, tmp_path: Path) -> None:
    shutil.copytree(Path(run_pictures(run)), tmp_path / "bad")
    (tmp_path / "bad/digit 3/003.png").write_bytes(b"")
    text = (run / "run.toml").read_text().replace(run_pictures(run), str(tmp_path / "bad"))
    text = text.replace("# skip_broken = false", "skip_broken = true")
    (run / "run.toml").write_text(text)
    done = by_two("fit", str(run), "--device", "cpu")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("looking for broken images: 20 of 20 images") == 1
    assert done.stderr.count("1 of 20 training images cannot be decoded") == 1
    assert "left out as broken: 1 of 20 images" in asked("info", run)


def run_pictures(run: Path) -> str:
    """The folder of images that a run.toml names."""
    return (run / "run.toml").read_text().split('images = "')[1].split('"')[0]


@pytest.mark.parametrize("command", ["generate", "info", "merge", "plan", "report"])
def test_what_is_one_processs_work_is_refused_to_several_by_the_first(
    command: str, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals = {"0": f"wherefrom (process 0 of 4): {command} is one process's work", "1": ""}
    for rank, refusal in refusals.items():
        for name, value in {**TOGETHER, "RANK": rank}.items():
            monkeypatch.setenv(name, value)
        result = CliRunner().invoke(app, [command, str(run)])
        assert result.exit_code == 1
        assert result.stderr.startswith(refusal)
        assert bool(result.stderr) == bool(refusal)


@pytest.mark.parametrize(
    ("variables", "wrong"),
    [
        ({"WORLD_SIZE": "2"}, "2 processes, without RANK, MASTER_ADDR, MASTER_PORT:"),
        ({**TOGETHER, "RANK": "4"}, "RANK is 4 of WORLD_SIZE 4"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE must be a whole number, not 'two'"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is 0, and says how many processes there are"),
        (
            {**TOGETHER, "MASTER_PORT": "abc"},
            "MASTER_PORT is 'abc', and must be the number of a port",
        ),
        ({**TOGETHER, "MASTER_PORT": "65536"}, "MASTER_PORT is '65536', and must be the number of"),
    ],
)
def test_variables_that_cannot_be_are_refused(
    variables: dict[str, str], wrong: str, monkeypatch: pytest.MonkeyPatch, run: Path
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(WherefromError, match="torchrun") as refused:
        launched()
    assert wrong in str(refused.value)
    assert CliRunner().invoke(app, ["fit", str(run)]).stderr.count("wherefrom: ") == 1


def test_a_process_without_variables_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TOGETHER:
        monkeypatch.delenv(name, raising=False)
    assert launched() == Launched()
    for name, value in {**TOGETHER, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    assert launched() == Launched(1, 4, local=0, beside=1)


# --- shards ---------------------------------------------------------------------------------------


def test_shards_are_merged_into_what_one_process_makes(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "alone")
    for number in (1, 2, 0):
        said = asked("fit", run, "--shard", f"{number}/3")
        assert f"shard {number}/3 of the curvature" in said
    assert "the curvature" in asked("merge", run)
    for number in (1, 0):
        assert f"shard {number}/2" in asked("index", run, "--shard", f"{number}/2")
    assert "the index" in asked("merge", run)
    assert not list(run.rglob("parts"))
    assert not list(run.rglob("*.lock"))
    words = ["--json", "--top-k", 5]
    merged = hits(asked("attribute", run, image(run), *words))
    alone = hits(asked("attribute", tmp_path / "alone", image(run), *words))
    assert [name for name, _ in merged] == [name for name, _ in alone]
    assert [score for _, score in merged] == pytest.approx([score for _, score in alone], 1e-3)
    assert "no shards of" in asked("merge", run, status=1)


def test_the_pictures_of_a_pipeline_are_encoded_in_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    saved_world("pipe", "pictures", "lora", count=6)
    words = ["--pipeline", "pipe", "--lora", "lora", "--images", "pictures"]
    result = CliRunner().invoke(app, ["init", "run", *words, "--set", "draws.count=2"])
    assert result.exit_code == 0, result.output
    assert "wherefrom encode run" in asked("fit", "run", "--shard", "0/2", status=1)
    asked("encode", "run", "--shard", "1/2")  # one batch holds all, and is the other's
    assert "wherefrom merge run" in asked("fit", "run", "--shard", "0/2", status=1)
    assert "are missing: run the other shards" in asked("merge", "run", status=1)
    asked("encode", "run", "--shard", "0/2")
    assert "all shards of the latents of run are joined" in asked("merge", "run")
    assert "shard 0/2 of the curvature" in asked("fit", "run", "--shard", "0/2")
    assert "nothing is encoded" not in asked("encode", "run")


def test_nothing_is_encoded_for_a_network_of_pixels(run: Path) -> None:
    assert "takes the images as they are" in asked("encode", run, status=1)


def test_a_student_is_taught_whole_and_embeds_in_shards(run: Path) -> None:
    toml = run / "run.toml"
    text = toml.read_text().replace("# epochs = 50", "epochs = 1")
    toml.write_text(text.replace("factory =", 'blocks = ["blocks.*"]\nfactory =', 1))
    assert "wherefrom distill --student-only" in asked("distill", run, "--shard", "0/2", status=1)
    assert "is taught" in asked("distill", run, "--student-only")
    for number in (0, 1):
        asked("distill", run, "--shard", f"{number}/2")
    assert "the bank" in asked("merge", run)
    assert "20 images" in asked("distill", run)


def test_a_network_is_trained_whole_before_shards(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert CliRunner().invoke(app, ["init", str(run), "--preset", "digits"]).exit_code == 0
    refused = asked("fit", run, "--shard", "0/2", status=1)
    assert refused.strip().endswith(f"is not done in shards: run `wherefrom train {run}`")


def test_a_shard_that_is_missing_or_not_finished_is_named(run: Path) -> None:
    asked("fit", run, "--shard", "1/4")
    assert "begun, not merged: 1/4" in asked("info", run)
    assert "15 of 20 items of the curvature" in (said := asked("merge", run, status=1))
    assert "are missing: run --shard 0/4, 2/4, 3/4, or run `wherefrom fit` without --shard" in said
    assert "must be whole" in (said := asked("index", run, "--shard", "0/2", status=1))
    assert "wherefrom merge" in said
    asked("fit", run)  # whoever comes without a shard makes the rest
    assert "no shards of" in asked("merge", run, status=1)
    asked("index", run, "--shard", "1/2")
    assert "run --shard 0/2" in asked("merge", run, status=1)


def test_shards_of_machines_that_share_no_disk_are_merged_once_copied(
    run: Path, tmp_path: Path
) -> None:
    shutil.copytree(run, tmp_path / "elsewhere")
    asked("fit", run, "--shard", "0/2")
    asked("fit", tmp_path / "elsewhere", "--shard", "1/2")
    shutil.copytree(tmp_path / "elsewhere", run, dirs_exist_ok=True)
    assert "curvature" in asked("merge", run)


def test_two_shards_of_the_same_images_are_refused_by_name(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "elsewhere")
    asked("fit", run, "--shard", "0/2")
    assert "0-of-2 holds some" in asked("fit", run, "--shard", "0/3", status=1)
    asked("fit", tmp_path / "elsewhere", "--shard", "0/3")
    shutil.copytree(tmp_path / "elsewhere", run, dirs_exist_ok=True)
    for command in (["fit", run, "--shard", "1/2"], ["merge", run]):
        assert "0-of-2 and 0-of-3" in asked(*command, status=1)


@pytest.mark.parametrize("shard", ["2/2", "x", "1", "-1/2", "1/0"])
def test_a_shard_that_cannot_be_is_refused(shard: str, run: Path) -> None:
    assert "as 0/8 to 7/8" in asked("fit", run, f"--shard={shard}", status=1)


def test_shards_and_who_makes_the_whole_keep_out_of_each_others_way(run: Path) -> None:
    asked("fit", run, "--shard", "0/2")
    (stage,) = run.glob("curvature-*")
    lock = Lock.take(stage / ".shard-1-of-2.lock")
    assert lock is not None
    assert "shard 1-of-2 is at work" in asked("merge", run, status=1)
    assert "at work" in asked("fit", run, "--shard", "1/2", status=1)
    lock.release()
    lock = Lock.take(stage / ".stage.lock")
    assert lock is not None
    assert "somebody else is at work" in asked("fit", run, "--shard", "1/2", status=1)
    lock.release()
    asked("fit", run, "--shard", "1/2")
    asked("merge", run)
