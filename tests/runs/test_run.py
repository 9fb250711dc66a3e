"""Claims about a run: what is missing is done, what is done is never done twice, and a changed line
makes anew what depends on it and nothing else.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from PIL import Image

import wherefrom
from helpers import small_dit, stirred
from pipelines import WORDS, saved_world
from tiny_runs import network, pictures, small_preset
from wherefrom.artefacts.artefact import Artefact
from wherefrom.diffusion import run as training
from wherefrom.factors.curvature import Curvature
from wherefrom.runs.beginning import begin
from wherefrom.runs.run import Run
from wherefrom.search.store import VectorStore

SMALL = {"draws": {"count": 2}, "index": {"dim": 64}, "generate": {"steps": 3}}


@pytest.fixture(autouse=True, scope="module")
def _small() -> Iterator[None]:
    with small_preset():
        yield


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures, and a run of a built-in network that has attributed one image."""
    place = tmp_path_factory.mktemp("world")
    pictures(place / "pictures")
    model, data = {"preset": "digits"}, {"images": str(place / "pictures")}
    begin(place / "run", {"model": model, "data": data, **SMALL, "train": BRIEF})
    run = Run.open(place / "run", "cpu")
    made = list(run.generate([3]))
    run.attribute(made, top_k=3)
    return place


BRIEF = {"steps": 4, "batch_size": 8}
IMAGE = "generated/seed-0003.png"


@pytest.fixture
def run(world: Path, tmp_path: Path) -> Path:
    """A copy of that run, to be changed."""
    shutil.copytree(world / "run", tmp_path / "run")
    text = (tmp_path / "run" / "run.toml").read_text()
    assert str(world / "pictures") in text
    return tmp_path / "run"


def changed(run: Path, old: str, new: str) -> None:
    text = (run / "run.toml").read_text()
    assert old in text
    (run / "run.toml").write_text(text.replace(old, new))


def told(run: Path, **options: object) -> list[str]:
    """What is said while an image is attributed."""
    said: list[str] = []
    Run.open(run, "cpu", said.append).attribute([run / IMAGE], top_k=3, **options)  # type: ignore[arg-type]
    return said


def folders(run: Path, stage: str) -> list[str]:
    return sorted(path.name for path in run.glob(f"{stage}-*"))


def test_one_command_does_all_that_is_missing_and_tells_it(world: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    shutil.copy(world / "run" / "run.toml", tmp_path / "run" / "run.toml")
    said: list[str] = []
    Run.open(tmp_path / "run", "cpu", said.append).attribute([world / "run" / IMAGE], top_k=3)
    begun = [line for line in said if "done in" not in line]
    assert [line.split()[0] for line in begun] == ["training", "fitting", "indexing"]
    assert len(said) == 6
    assert said[1] == "training the network (4 steps on 20 images): " + said[1].split(": ")[1]
    assert [
        len(folders(tmp_path / "run", name)) for name in ("training", "curvature", "index")
    ] == [
        1,
        1,
        1,
    ]


def test_a_finished_stage_is_never_repeated(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("something was done again")

    monkeypatch.setattr(training.Run, "step", never)
    monkeypatch.setattr(Curvature, "_add", never)
    monkeypatch.setattr(VectorStore, "_fill", never)
    assert told(run) == []
    monkeypatch.setattr(wherefrom.Index, "search", never)
    assert told(run) == []  # what was found is kept


def test_a_changed_line_makes_anew_what_depends_on_it_and_says_so(run: Path) -> None:
    before = {name: folders(run, name) for name in ("training", "curvature", "index")}
    changed(run, "dim = 64", "dim = 32")
    said = told(run)
    assert said[0] == (
        "indexing 20 images anew (dim was 64 and is now 32); what was there stays in "
        f"{before['index'][0]}"
    )
    assert folders(run, "curvature") == before["curvature"]
    assert len(folders(run, "index")) == 2
    changed(run, "count = 2", "count = 3")
    said = told(run)
    assert any("anew (draws was 2 and is now 3)" in line for line in said)
    assert folders(run, "training") == before["training"]
    assert len(folders(run, "curvature")) == 2
    changed(run, "steps = 4", "steps = 5")
    assert "anew (steps was 4 and is now 5)" in told(run)[0]
    changed(run, "steps = 5", "steps = 4")
    changed(run, "count = 3", "count = 2")
    changed(run, "dim = 32", "dim = 64")
    assert told(run) == []  # back to what there was


def test_the_similarity_and_the_method_need_no_new_curvature(run: Path) -> None:
    changed(run, '# similarity = "kernel"', 'similarity = "cosine"')
    assert told(run) == []
    assert told(run, method="tid") == []
    assert len(folders(run, "curvature")) == 1


def test_an_added_picture_is_another_training_set(world: Path, run: Path, tmp_path: Path) -> None:
    shutil.copytree(world / "pictures", tmp_path / "more")
    changed(run, str(world / "pictures"), str(tmp_path / "more"))
    assert told(run) == []  # the same pictures elsewhere
    Image.new("L", (8, 8)).save(tmp_path / "more" / "new.png")
    assert told(run)[0].startswith("training the network (4 steps on 21 images) anew (the set of")


def test_what_is_found_is_what_the_library_finds(world: Path) -> None:
    run = Run.open(world / "run", "cpu")
    kept = run.attribute([world / "run" / IMAGE], top_k=3)
    tid, about = run.fit(), run.subject
    query = about.space.query(Image.open(world / "run" / IMAGE), None)
    hits = tid.index(about.dataset, dim=64).search(query[None], top_k=3)
    assert kept.hits.indices.equal(hits.indices)
    assert kept.hits.scores.equal(hits.scores)
    exact = run.attribute([world / "run" / IMAGE], top_k=3, method="tid")
    assert exact.hits.scores.equal(tid.attribute(query[None], about.dataset, top_k=3).scores)
    again = run.attribute([world / "run" / IMAGE], top_k=3, exact=1.0)
    assert again.hits.indices.equal(exact.hits.indices)
    rows = kept.described(run.pictures)
    assert rows[0]["most_influential"][0]["name"] == run.pictures.name(int(hits.indices[0, 0]))
    assert {one.name for one in run.kept()} >= {kept.name, exact.name}


def test_a_student_is_distilled_and_found_again(run: Path) -> None:
    changed(run, "# epochs = 50", "epochs = 1")
    changed(run, "# dim = 768", "dim = 16")
    changed(run, "# hidden = 512", "hidden = 16")
    changed(run, '# method = "index"', 'method = "tide"')
    said = told(run)
    assert [line.split()[0] for line in said if "done" not in line] == ["distilling", "embedding"]
    assert told(run) == []
    opened = Run.open(run, "cpu")
    assert isinstance(opened.bench().collection, wherefrom.Bank)
    assert opened._tid is None  # a student needs no teacher
    opened.attribute([run / IMAGE], top_k=2, exact=0.5)
    assert opened.info()["missing"] == []
    # one draw a step is as it was before there was a choice
    assert "draws_per_step" not in opened._student_parts
    changed(run, "# draws_per_step = 1", "draws_per_step = 2")
    assert Run.open(run, "cpu").info()["missing"] == ["student", "bank"]
    assert Run.open(run, "cpu")._student_parts["draws_per_step"] == 2


def test_a_run_may_have_the_papers_student(run: Path) -> None:
    changed(run, "# epochs = 50", "epochs = 1")
    changed(run, "# dim = 768", "dim = 16")
    changed(run, "# hidden = 512", "hidden = 16")
    changed(run, '# method = "index"', 'method = "tide"')
    assert Run.open(run, "cpu").distill().student.embedder.about["embedder"] == "grid"
    changed(run, '# objective = "listmle"', 'objective = "lambdarank"')
    changed(run, '# embedder = "grid"', 'embedder = "pool"')
    changed(run, "# decay = 0.5", "decay = 0")
    assert Run.open(run, "cpu").info()["missing"] == ["student", "bank"]
    papers = Run.open(run, "cpu").distill().student
    assert "embedder" not in papers.embedder.about
    assert not set(papers.taught["distillation"]) & set(wherefrom.TIDE.PAPER)


def test_the_same_seed_gives_the_same_picture(run: Path, world: Path) -> None:
    (run / IMAGE).unlink()
    list(Run.open(run, "cpu").generate([3]))
    assert (run / IMAGE).read_bytes() == (world / "run" / IMAGE).read_bytes()


def test_classes_are_those_of_the_folders_and_a_picture_remembers_its_own(tmp_path: Path) -> None:
    pictures(tmp_path / "pictures")
    network(tmp_path)
    code = (tmp_path / "net.py").read_text()
    code += (
        "\n\ndef classes():\n    from helpers import small_dit\n    return small_dit(classes=10)\n"
    )
    (tmp_path / "net.py").write_text(code)
    torch.save(stirred(small_dit(classes=10)).state_dict(), tmp_path / "classes.pt")
    model = {"factory": f"{tmp_path}/net.py:classes", "weights": f"{tmp_path}/classes.pt"}
    data = {"images": f"{tmp_path}/pictures", "labels": True, "size": 8, "channels": 1}
    given = {"model": model, "data": data, "process": {"kind": "edm"}, **SMALL}
    begin(tmp_path / "run", given)
    run = Run.open(tmp_path / "run", "cpu")
    for cond, words in (("digit 33", "did you mean 'digit 3'"), (None, "trained with classes")):
        with pytest.raises(wherefrom.WherefromError, match=words):
            next(run.generate([0], cond))
    path = next(run.generate([0], "digit 3"))
    kept = run.attribute([path], top_k=2)
    assert kept.conds == ["digit 3"]
    bench = run.bench()
    assert bench.classes == [f"digit {number}" for number in range(10)]
    assert bench.query(Image.open(path), "digit 4")[1] == 4
    with pytest.raises(wherefrom.WherefromError, match="no class 'cat'"):
        run.attribute([path], "cat")


def test_a_lora_of_a_pipeline_goes_all_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    saved_world("pipe", "pictures", "lora", count=6)
    model = {"pipeline": "pipe", "lora": "lora"}
    begin(Path("runs/one"), {"model": model, "data": {"images": "pictures"}, **SMALL})
    assert 'pipeline = "../../pipe"' in Path("runs/one/run.toml").read_text()
    run = Run.open("runs/one", "cpu")
    with pytest.raises(wherefrom.WherefromError, match="generates from a prompt"):
        next(run.generate([0]))
    path = next(run.generate([0], "a dog"))
    kept = run.attribute([path], top_k=2)
    assert kept.conds == ["a dog"]
    rows = kept.described(run.pictures)[0]["most_influential"]
    assert rows[0]["caption"] in [f"a {word}" for word in WORDS]
    assert run.subject.denoiser.tracks.startswith("the LoRA adapter")
    said: list[str] = []
    Run.open("runs/one", "cpu", said.append).attribute([path], top_k=2)
    assert said == ["opening the pipeline ../../pipe"]
    text = Path("pictures/metadata.jsonl").read_text()
    Path("pictures/metadata.jsonl").write_text(text.replace("a cat", "a lion"))
    Run.open("runs/one", "cpu", said.append).attribute([path], top_k=2)
    assert "encoding 6 images anew (the text of the captions was another one)" in said[2]


def test_a_stage_that_failed_goes_on_and_says_so(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed(run, "dim = 64", "dim = 32")
    with monkeypatch.context() as patch:
        patch.setattr(VectorStore, "_fill", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            told(run)
    assert "index" in Run.open(run, "cpu").info()["missing"]
    assert told(run)[0] == "indexing 20 images, of which nothing was kept yet"
    assert Run.open(run, "cpu").info()["missing"] == []


def test_two_at_the_same_stage_do_not_get_in_each_other_s_way(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed(run, "dim = 64", "dim = 32")
    real = VectorStore._fill

    def meanwhile(*given: object) -> None:
        with pytest.raises(wherefrom.WherefromError, match="somebody else is at work in"):
            told(run)
        real(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(VectorStore, "_fill", meanwhile)
    assert len(told(run)) == 2


def test_a_run_is_known_by_its_file_too(run: Path) -> None:
    assert Run.open(run / "run.toml", "cpu").folder == run


def test_damage_is_said_with_the_way_out(run: Path) -> None:
    note = run / folders(run, "index")[0] / "stage.json"
    note.write_text("{}")
    with pytest.raises(
        wherefrom.WherefromError, match=r"stage\.json is damaged or was edited: dele"
    ):
        told(run)
    shutil.rmtree(note.parent)
    assert told(run)[0] == "indexing 20 images"


def test_another_run_s_artefact_is_refused(run: Path) -> None:
    place = run / folders(run, "training")[0] / "network"
    shutil.rmtree(place)
    other = Artefact.claim(place, "network", {"parts": "another"})
    other.finish({}, weights={"x": torch.zeros(1)})
    with pytest.raises(wherefrom.WherefromError, match="holds another network"):
        told(run)
