"""Claims about baselines and evaluations of several processes: they find what one finds, nobody
does what another did, a process that dies is named, and any number goes on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import dealt_work as work
from several import together
from wherefrom.cli import evaluate
from wherefrom.evaluation import Results, parallel
from wherefrom.evaluation.study import Evaluation
from wherefrom.running.ranks import Share, alone, own_part, shard, share

NETWORKS = 2 * (1 + 3 + 1) + 3  # of two seeds: the full one's, methods' and controls'; of subsets
Found = list[dict[str, Any]]  # of each process


def found(world: int, place: Path) -> Found:
    names = (place / f"found-{rank}-of-{world}.pt" for rank in range(world))
    return [torch.load(name, weights_only=False) for name in names]


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a process alone finds."""
    place = tmp_path_factory.mktemp("one")
    assert together(1, place / "meeting", "dealt_work", "everything", str(place)) == [""]
    return found(1, place)[0]


class Killed(NamedTuple):
    """Where one of two was killed, what each said, and the networks that they had trained."""

    place: Path
    said: list[str]
    trained: int


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Killed:
    place = tmp_path_factory.mktemp("killed")
    said = together(2, place / "meeting", "dealt_work", "everything", str(place), "killed")
    seeds = place / "evaluation"
    done = [*seeds.glob("*/queries/artefact.json"), *seeds.glob("*/regenerated/*/artefact.json")]
    return Killed(place, said, len(done))


@pytest.fixture(scope="module")
def three(killed: Killed) -> Found:
    """What three find that go on there."""
    said = together(3, killed.place / "meeting", "dealt_work", "everything", str(killed.place))
    assert said == [""] * 3
    return found(3, killed.place)


@pytest.fixture(params=[2, 3])
def baselines(request: pytest.FixtureRequest, killed: Killed, three: Found) -> list[dict[str, Any]]:
    """What each of several finds by every baseline."""
    return [here["baselines"] for here in found(request.param, killed.place)]


def test_several_find_what_one_finds_by_every_baseline(
    baselines: list[dict[str, Any]], one: dict[str, Any], killed: Killed
) -> None:
    assert not list(killed.place.rglob("parts")), "parts are taken away once they are joined"
    for here in baselines:
        for name, ours in one["baselines"].items():
            theirs = here[name]
            if name in work.KEPT:
                assert torch.equal(theirs["vectors"], ours["vectors"]), name
            for what in ("indices", "least", "percentiles"):
                assert torch.equal(theirs[what], ours[what]), (name, what)
            scale = float(ours["all"].abs().max())
            for what in ("scores", "all"):
                assert torch.allclose(theirs[what], ours[what], rtol=0, atol=1e-5 * scale), name
            assert torch.equal(theirs["all"], baselines[0][name]["all"]), "all have the same"
            # several know which data set it is, as they have compared theirs
            assert theirs["about"].keys() == ours["about"].keys() | {"data"}
        unlearned = here["MUCS"]["all"], one["baselines"]["MUCS"]["all"]
        assert torch.equal(*unlearned), "each query by one process, to the bit"


def test_an_evaluation_by_several_has_the_rows_of_one_bit_for_bit(
    three: Found, one: dict[str, Any], killed: Killed
) -> None:
    assert len({row.similarity for row in one["rows"]}) > 20  # the networks differ
    for here in three:
        assert here["rows"] == one["rows"]
        for name in work.METHODS:
            assert torch.equal(here["lds"][name].queries[0], one["lds"][name].queries[0])
            assert here["lds"][name].interval == one["lds"][name].interval
    assert Results.load(Evaluation(killed.place / "evaluation").table).rows == one["rows"]


def test_one_that_dies_is_named_and_nothing_is_trained_twice_by_another_number_that_goes_on(
    killed: Killed, three: Found, one: dict[str, Any]
) -> None:
    assert "process 1 of 2 ended before the retraining was done" in killed.said[0]
    assert "run the same command again" in killed.said[0]
    assert killed.said[1] == "killed"
    trained = [here["trained"] for here in three]
    assert one["trained"] == killed.trained + sum(trained) == NETWORKS
    assert max(trained) - min(trained) <= 2  # of two stages
    assert not list(killed.place.rglob("retraining/*")), "nothing is left of their training"


def test_queries_that_do_not_depend_on_each_other_are_dealt_out(
    killed: Killed, three: Found
) -> None:
    parts = {path.parent.name for path in killed.place.rglob("scores/mucs-*/part-*/artefact.json")}
    assert parts == {"part-0-of-2", "part-1-of-2"}
    assert not list(killed.place.rglob("scores/tid-*/part-*"))


# --- a process of a group, as if it were alone ----------------------------------------------------


def test_alone_a_process_has_all_of_the_work() -> None:
    with shard(1, 3):
        assert own_part(7) == range(7), "a shard joins nothing, and so scores everything"
        with alone():
            assert share().alone
        assert share().apart


def test_an_evaluation_in_a_shard_is_refused(tmp_path: Path) -> None:
    with pytest.raises(work.wherefrom.WherefromError, match="not made in shards"), shard(1, 3):
        work.evaluated(tmp_path)


def test_one_process_of_a_group_prints_tables_and_none_starts_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Evaluated:
        def run(self, *asked: Any) -> None: ...
        def lds(self, *asked: Any) -> None: ...

    for module in (evaluate, parallel):
        monkeypatch.setattr(module, "share", lambda: Share(1, 2, joined=True))
    one: Any = Evaluated()
    evaluate.run_evaluation(one, tmp_path, None, [0], None, 1)
    evaluate.run_lds(one, tmp_path, None, [0], None, 3)
    assert capsys.readouterr().out == ""
    assert not list(tmp_path.iterdir())
    with pytest.raises(work.wherefrom.WherefromError, match="leave --processes away"):
        evaluate.run_evaluation(one, tmp_path, None, [0], None, 2)


@pytest.mark.filterwarnings("ignore:query . is not unlearned")
@pytest.mark.parametrize("name", ["D-TRAK", "DAS", "MUCS"])
def test_the_shards_of_a_baseline_are_joined_by_whoever_comes_last(
    name: str, tmp_path: Path
) -> None:
    data, queries = work.Noise(work.IMAGES), torch.zeros(1, 1, 8, 8)
    for number in (1, 0):
        part = work.baselines()[name]
        with shard(number, 2):
            part.fit(data, 4, store=tmp_path)
        with pytest.raises(work.wherefrom.WherefromError, match="call fit"):
            part.scores(queries, data)
    joined = work.baselines()[name].fit(data, 4, store=tmp_path)
    whole = work.baselines()[name].fit(data, 4)
    scores = [method.scores(queries, data, 4) for method in (joined, whole)]
    assert torch.allclose(*scores, rtol=0, atol=1e-5 * float(scores[1].abs().max()))


def test_what_a_shard_has_embedded_is_not_taken_for_all(tmp_path: Path) -> None:
    data, queries = work.Noise(work.IMAGES), torch.ones(1, 1, 8, 8)
    with shard(0, 2):
        part = work.baselines()["encoder"].fit(data, 4, store=tmp_path)
    expected = work.baselines()["streamed"].scores(queries, data, 4)
    assert torch.equal(part.scores(queries, data, 4), expected)
