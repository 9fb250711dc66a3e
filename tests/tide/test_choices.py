"""Claims about the choices of a distillation: its objective, its embedder, a falling learning rate
and the teacher's similarity.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import pipelines
import wherefrom
from forks import killed
from helpers import Noise, UNet, kept, small_dit, stirred
from wherefrom.artefacts.artefact import _checks
from wherefrom.artefacts.pace import Pace
from wherefrom.attribution.agreement import spearman
from wherefrom.diffusion.seeds import seed_of
from wherefrom.tid.angle import Similarity
from wherefrom.tide.distill import LOSSES, Learner, Settings, learn
from wherefrom.tide.embedder import Embedder
from wherefrom.tide.grid import GridEmbedder
from wherefrom.tide.loss import off_diagonal

CHOICES: list[dict[str, Any]] = [
    {"objective": "listwise"},
    {"embedder": "grid"},
    {"objective": "listmle", "embedder": "grid", "decay": 0.5},
]
BEST = CHOICES[-1]
PAPER = wherefrom.TIDE.PAPER


def teacher(similarity: Similarity = "kernel", network: Any = None, **how: Any) -> wherefrom.TID:
    denoiser = wherefrom.Denoiser(network or stirred(small_dit()), wherefrom.EDM(), **how)
    draws = wherefrom.Draws(denoiser.process, (1, 8, 8), 3)
    return wherefrom.TID(denoiser, draws, similarity=similarity).fit(Noise(40), samples=10)


SMALL: dict[str, Any] = {"batch_size": 8, "lr": 1e-3, "dim": 16, "hidden": 8, "heads": 2}


def distilled(tid: wherefrom.TID, epochs: float = 2, **changes: Any) -> wherefrom.TIDE:
    """The paper's student, but for some changes."""
    how = {**SMALL, **PAPER, **changes}
    return wherefrom.TIDE.distill(tid, Noise(60), epochs, **how)


def same(one: wherefrom.TIDE, other: wherefrom.TIDE) -> bool:
    mine, theirs = one.embedder.state_dict(), other.embedder.state_dict()
    return all(torch.equal(mine[name], theirs[name]) for name in mine)


# --- what they are --------------------------------------------------------------------------------


def test_by_default_a_student_keeps_positions_learns_lists_and_slows_down() -> None:
    plain = wherefrom.TIDE.distill(teacher(), Noise(60), 2, **SMALL)
    assert same(plain, distilled(teacher(), **BEST))
    assert BEST.items() <= plain.about["distillation"].items()
    assert BEST.items() <= Settings().about.items()


def test_the_papers_is_one_argument_away_and_is_not_spoken_of(tmp_path: Path) -> None:
    tid = teacher()
    papers = wherefrom.TIDE.distill(tid, Noise(60), 2, store=tmp_path, **SMALL, **PAPER)
    assert PAPER == {"objective": "lambdarank", "embedder": "pool", "decay": 0}
    identity = json.loads((tmp_path / "artefact.json").read_text())["identity"]
    # what was begun before there was a choice has just these
    settings = {"batch_size", "lr", "dim", "hidden", "heads", "seed"}
    assert set(identity) == settings | set(tid.identity()) | {"data"}
    assert set(papers.about["distillation"]) == settings | {"epochs"}
    assert set(papers.embedder.about) == {"dim", "hidden", "heads"}


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_a_choice_is_said_and_makes_another_student(choice: dict[str, Any]) -> None:
    tid = teacher()
    tide = distilled(tid, **choice)
    assert choice.items() <= tide.about["distillation"].items()
    assert not torch.equal(tide.embed(Noise(3).x), distilled(tid).embed(Noise(3).x))
    assert same(tide, distilled(tid, **choice))
    assert tide.about.get("embedder") == choice.get("embedder")


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_a_saved_student_of_any_choice_is_the_same(choice: dict[str, Any], tmp_path: Path) -> None:
    tide = distilled(teacher(), **choice)
    tide.save(tmp_path)
    again = wherefrom.TIDE.load(tmp_path, tide.denoiser)
    assert torch.equal(again.embed(Noise(3).x), tide.embed(Noise(3).x))
    assert (again.history, again.about, again.identity()) == (
        tide.history,
        tide.about,
        tide.identity(),
    )


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_a_store_belongs_to_one_choice(choice: dict[str, Any], tmp_path: Path) -> None:
    tid = teacher()
    distilled(tid, epochs=1, store=tmp_path)
    with pytest.raises(wherefrom.WherefromError, match="holds another distillation"):
        distilled(tid, epochs=2, store=tmp_path, **choice)


def test_one_that_was_killed_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    tid = teacher()
    killed(
        lambda: distilled(tid, epochs=5, store=tmp_path, **BEST),
        lambda: kept(tmp_path).get("step", 0) >= 12,
    )
    assert 12 <= kept(tmp_path)["step"] < 30
    resumed = distilled(tid, epochs=5, store=tmp_path, **BEST)
    straight = distilled(teacher(), epochs=5, **BEST)
    assert same(resumed, straight)
    assert resumed.history == straight.history


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_one_that_broke_off_goes_on_to_the_same_bits(
    choice: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tid, straight = teacher(), distilled(teacher(), **choice)
    left = iter(range(7))

    def breaking(*arguments: Any) -> Tensor:
        if next(left, None) is None:
            raise RuntimeError("power cut")
        return learn(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr("wherefrom.tide.distill.learn", breaking)
        for name in ("seconds", "times"):  # every look is kept
            patch.setattr(Pace, name, 0.0)
        with pytest.raises(RuntimeError, match="power cut"):
            distilled(tid, store=tmp_path, **choice)
    assert kept(tmp_path)["step"] == 7
    resumed = distilled(tid, store=tmp_path, **choice)
    assert same(resumed, straight)
    assert resumed.history == straight.history


# --- the learning rate ----------------------------------------------------------------------------


def rates(monkeypatch: pytest.MonkeyPatch, decay: float) -> list[float]:
    """Those of a distillation of 12 steps."""
    found: list[float] = []
    step = torch.optim.AdamW.step

    def noted(self: torch.optim.AdamW, *arguments: Any) -> Any:
        (rate,) = {group["lr"] for group in self.param_groups}
        found.append(rate)
        return step(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", noted)
        distilled(teacher(), epochs=2, decay=decay)
    return found


def test_the_learning_rate_falls_to_0_over_the_last_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rates(monkeypatch, 0) == [1e-3] * 12
    half = rates(monkeypatch, 0.5)
    assert half[:7] == [1e-3] * 7
    torch.testing.assert_close(half[6:], [1e-3 * left / 6 for left in range(6, 0, -1)])
    whole = rates(monkeypatch, 1)
    torch.testing.assert_close(whole, [1e-3 * left / 12 for left in range(12, 0, -1)])


def test_one_that_falls_does_not_go_on_to_more_epochs(tmp_path: Path) -> None:
    tid = teacher()
    done = distilled(tid, epochs=1, decay=0.5, store=tmp_path)
    assert same(done, distilled(tid, epochs=1, decay=0.5, store=tmp_path))
    with pytest.raises(wherefrom.WherefromError, match="epochs was 1 and is now 2"):
        distilled(tid, epochs=2, decay=0.5, store=tmp_path)


# --- what it learns -------------------------------------------------------------------------------


class Digits:
    """Some digits, as a data set of their own."""

    def __init__(self, count: int) -> None:
        self._all, self._count = wherefrom.data.digits(), count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        return self._all[index]


@pytest.mark.parametrize("embedder", [Embedder, GridEmbedder])
@pytest.mark.parametrize("objective", list(LOSSES))
def test_a_learner_comes_nearer_to_what_it_is_taught(objective: Any, embedder: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    streams = [torch.randn(24, 4, 8, generator=generator)]
    hidden = torch.randn(24, 3, generator=generator) + streams[0][:, 1, :3]
    tau = (-torch.cdist(hidden, hidden)).exp()
    size = {"dim": 16, "hidden": 32} | ({"size": (9, 9)} if embedder is GridEmbedder else {})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        learner = Learner(embedder([(4, 8)], **size), LOSSES[objective])
    optimizer = torch.optim.AdamW(learner.parameters(), 3e-3)
    others = ~torch.eye(24, dtype=torch.bool)

    def found() -> tuple[float, float]:
        """The loss, and the agreement of the order."""
        with torch.no_grad():
            vectors = learner.embedder(streams)
            rho = (vectors @ vectors.T)[others].view(24, 23)
            agreement = spearman(rho, tau[others].view(24, 23)).mean()
            return float(learner(streams, tau)), float(agreement)

    loss, agreement = found()
    for _ in range(120):
        learner(streams, tau).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert found()[0] < 0.5 * loss
    assert found()[1] > agreement + 0.2


@pytest.mark.parametrize("similarity", ["kernel", "relative", "cosine"])
@pytest.mark.parametrize("choice", [{}, BEST], ids=str)
def test_it_learns_of_every_similarity_and_says_which(
    similarity: Similarity, choice: dict[str, Any], tmp_path: Path
) -> None:
    tide = distilled(teacher(similarity), store=tmp_path / "run", **choice)
    tide.save(tmp_path / "student")
    again = wherefrom.TIDE.load(tmp_path / "student", tide.denoiser)
    for one in (tide, again):
        assert one.taught["teacher"].get("similarity", "kernel") == similarity
    others = {"kernel": "cosine", "relative": "kernel", "cosine": "relative"}
    with pytest.raises(wherefrom.WherefromError, match="similarity was"):
        distilled(teacher(others[similarity]), store=tmp_path / "run", **choice)  # type: ignore[arg-type]


def test_kernel_and_angle_have_two_students_and_both_angles_rank_alike() -> None:
    """An anchor's own self-kernel is a constant of its list, whose order it does not change."""
    kernel, relative, cosine = (teacher(one) for one in ("kernel", "relative", "cosine"))
    assert not same(distilled(kernel, **BEST), distilled(cosine, **BEST))
    x = Noise(8).x
    lists = [off_diagonal(one.pairwise(x, one.draws[1])).argsort(1) for one in (relative, cosine)]
    assert torch.equal(*lists)


# --- looks ----------------------------------------------------------------------------------------


def test_a_look_has_the_share_of_the_top() -> None:
    tid, data = teacher(), Digits(160)
    how: dict[str, Any] = {"batch_size": 24, "lr": 3e-3, "dim": 16, "hidden": 16, **BEST}
    tide = wherefrom.TIDE.distill(tid, data, epochs=5, **how)
    generator = torch.Generator().manual_seed(seed_of(0, "held out", 0))
    held = torch.randperm(160, generator=generator)[:16].tolist()
    x = torch.stack([data[index] for index in held])
    tau = torch.stack([tid.pairwise(x, draw) for draw in tid.draws]).mean(0)
    vectors = tide.embed(x)  # [16, 3, dim]
    rho = torch.einsum("imd,jmd->ij", vectors, vectors) / 3

    def shared(top: int) -> float:
        total = 0
        for i in range(16):
            others = [j for j in range(16) if j != i]
            best = [
                set(sorted(others, key=lambda j, s=scores, i=i: -float(s[i, j]))[:top])
                for scores in (tau, rho)
            ]
            total += len(best[0] & best[1])
        return total / (16 * top)

    last = tide.history[-1]
    assert last.top_percent == pytest.approx(shared(1))  # 1 % of 15 others is one, at least
    assert last.top_8 == pytest.approx(shared(8))


def test_too_few_to_have_a_top_8_have_none() -> None:
    assert {look.top_8 for look in distilled(teacher()).history} == {None}  # 6 are held out


def test_a_history_of_before_the_top_was_looked_at_still_loads(tmp_path: Path) -> None:
    tid = teacher()
    straight = distilled(tid, epochs=4)
    distilled(tid, epochs=2, store=tmp_path / "run")
    straight.save(tmp_path / "student")

    def aged(path: Path, *place: str) -> None:
        """Take the new values out, as an older library has written it."""
        manifest = path / "artefact.json"
        content = json.loads(manifest.read_text())
        inner = content["state"]
        for name in place[:-1]:
            inner = inner[name]
        inner[place[-1]] = [values[:3] for values in inner[place[-1]]]
        manifest.write_text(json.dumps({**content, "checks": _checks(content)}))

    aged(tmp_path / "student", "history")
    aged(tmp_path / "run", "notes", "looks")
    plain = [(look.step, look.loss, look.spearman) for look in straight.history]
    loaded = wherefrom.TIDE.load(tmp_path / "student", tid.denoiser)
    assert [(look.step, look.loss, look.spearman) for look in loaded.history] == plain
    assert loaded.history[0].top_percent is None
    resumed = distilled(tid, epochs=4, store=tmp_path / "run")
    assert same(resumed, straight)
    assert [(look.step, look.loss, look.spearman) for look in resumed.history][12:] == plain[12:]


# --- UNets and pipelines --------------------------------------------------------------------------


def test_a_unet_has_such_a_student_too(tmp_path: Path) -> None:
    tide = distilled(teacher(network=UNet(), blocks=["down", "middle", "up"]), **BEST)
    assert tide.embedder.grids == [(4, 4), (2, 2), (8, 8)]  # type: ignore[union-attr]
    vectors = tide.embed(Noise(3).x)
    torch.testing.assert_close(vectors.norm(dim=2), torch.ones(3, 3))
    tide.save(tmp_path)
    assert torch.equal(wherefrom.TIDE.load(tmp_path, tide.denoiser).embed(Noise(3).x), vectors)


@pytest.mark.parametrize("name", ["ddpm", "sd", "sd3"])
def test_so_has_a_pipeline(name: str) -> None:
    model = wherefrom.from_pipeline(pipelines.shared(name))
    texts = None if name == "ddpm" else [f"picture {place}" for place in range(8)]
    data = model.dataset(pipelines.noise(8, *model.shape).clamp(-1, 1), texts)
    tid = wherefrom.TID(model.denoiser, model.draws(2)).fit(data)
    tide = wherefrom.TIDE.distill(tid, data, epochs=1, batch_size=4, dim=8, hidden=8, **BEST)
    found = tide.index(data, dtype="float32").search(data, top_k=1)
    assert torch.equal(found.indices[:, 0], torch.arange(8))  # an image is most like itself


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"objective": "pairwise"}, "objective is 'pairwise'; choose one of 'listmle'"),
        ({"embedder": "mean"}, "embedder is 'mean'; choose one of 'pool', 'grid'"),
        ({"decay": 1.5}, "decay must be at least 0 and at most 1"),
        ({"decay": -0.1}, "decay must be at least 0"),
    ],
)
def test_choices_that_are_none_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(wherefrom.WherefromError, match=words):
        Settings(**changes)


@pytest.mark.parametrize("objective", list(LOSSES))
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_a_teacher_whose_scores_are_not_finite_is_said(
    objective: str, wrong: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    tid = teacher()
    honest = tid.pairwise_and_streams

    def spoiled(*arguments: Any) -> Any:
        tau, streams = honest(*arguments)
        tau[0, 1] = wrong
        return tau, streams

    monkeypatch.setattr(tid, "pairwise_and_streams", spoiled)
    with pytest.raises(wherefrom.WherefromError, match=r"tid\.pairwise of a batch is finite"):
        distilled(tid, objective=objective)
