"""What a plan says against what is then so: operations, bytes, passes; and that planning leaves
nothing behind.

No test looks at a clock of the machine: the one that plans are made with here counts the images
that go through the network, so what a stage takes by it is known to the last image.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Subset
from torch.utils.flop_counter import FlopCounterMode

import wherefrom
from helpers import Noise, UNet, contents, small_dit, stirred
from wherefrom.factors import probe as probing
from wherefrom.planning import Plan, Stage, arithmetic, plan, planner
from wherefrom.planning import rehearsal as rehearsing
from wherefrom.planning.flops import Kernels, counted
from wherefrom.planning.measure import Line, Stopwatch, held
from wherefrom.planning.rehearsal import Rehearsal
from wherefrom.planning.stand_in import Teacher
from wherefrom.search import store as stores
from wherefrom.tid import teacher as teachers
from wherefrom.tid.sketching import Sketcher
from wherefrom.tide import distill as distilling
from wherefrom.tide import student as students

EDM = wherefrom.EDM()
SHAPE = (1, 8, 8)
CPU = torch.device("cpu")


class Mixed(nn.Module):
    """Layers wider than a panel, one of them seen at one position, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.norm = nn.Linear(8, 300), nn.LayerNorm(300)
        self.level, self.leave = nn.Linear(1, 300), nn.Linear(300, 8, bias=False)

    def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
        level = self.level(sigma[:, None].to(x))[:, None, None]
        result: Tensor = self.leave(torch.tanh(self.norm(self.enter(x)) + level))
        return result


def model(network: nn.Module | None = None, **choices: Any) -> wherefrom.Denoiser:
    return wherefrom.Denoiser(network or stirred(small_dit(depth=1)), EDM, **choices)


def plain() -> wherefrom.Denoiser:
    """One that is quick, and has no blocks that a student could read."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return model(Mixed(), layers=["**"])


def draws(count: int = 3) -> wherefrom.Draws:
    return wherefrom.Draws(EDM, SHAPE, count)


def small(denoiser: wherefrom.Denoiser | None = None, **changes: Any) -> Plan:
    """A plan of a small model that takes little time."""
    student = {"batch_size": 8, "dim": 16, "hidden": 16, "heads": 2}
    asked = {"batch_size": 8, "dim": 128, "queries": 2, "epochs": 2, "student": student}
    asked |= {"calibrate": 0.1, **changes}
    dataset = asked.pop("dataset", Noise(40))
    drawn = asked.pop("draws", draws())
    return plan(denoiser or model(), dataset, drawn, **asked)


@cache
def usual() -> Plan:
    """That of the same model for all who only look at it."""
    return small(training={"steps": 5, "batch_size": 4, "lr": 1e-3})


class Passes:
    """A clock that counts the images that a network was given."""

    def __init__(self, network: nn.Module) -> None:
        self.count = 0
        self._handle = network.register_forward_hook(self._seen)

    def _seen(self, module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        self.count += len(arguments[0])

    def __call__(self) -> float:
        return float(self.count)

    def __deepcopy__(self, memo: Any) -> Passes:
        return self  # copies of the network count, too

    def remove(self) -> None:
        self._handle.remove()


@pytest.fixture
def passes() -> Iterator[Callable[[nn.Module], Passes]]:
    made: list[Passes] = []

    def of(network: nn.Module) -> Passes:
        made.append(Passes(network))
        return made[-1]

    yield of
    for one in made:
        one.remove()


# --- what is measured -----------------------------------------------------------------------------


def test_a_line_goes_through_both_measurements_and_never_below_zero() -> None:
    line = Line.through((4, 14.0), (16, 38.0))
    assert (line.fixed, line.each) == (6.0, 2.0)
    assert line(10) == 26.0
    assert line.batches(40, 16) == 2 * 38.0 + (6.0 + 2.0 * 8)
    assert Line.through((4, 20.0), (16, 8.0)) == Line(8.0, 0.0)  # noise: more took less
    assert Line.through((4, 0.5), (16, 8.0)) == Line(0.0, 0.5)  # noise: less took next to nothing
    assert Line.through((8, 4.0), (8, 4.0)) == Line(0.0, 0.5)


def test_a_stopwatch_takes_the_mean_of_as_many_calls_as_there_is_time_for() -> None:
    now, costs = 0.0, [5.0, 1.0, 2.0, 3.0]

    def work() -> None:
        nonlocal now
        now += costs[work.calls % len(costs)]  # type: ignore[attr-defined]
        work.calls += 1  # type: ignore[attr-defined]

    work.calls = 0  # type: ignore[attr-defined]
    watch = Stopwatch(CPU, lambda: now)
    assert watch.once(work) == 5.0
    assert watch.each(work, 3.5) == (1.0 + 2.0 + 3.0) / 3
    assert watch.each(work, 3.5) == 5.0  # longer than there is time for: one call


def test_memory_is_what_lives_at_the_same_time_and_was_not_there_before() -> None:
    before = torch.zeros(1000)

    def work() -> None:
        one = torch.zeros(500)  # 2,000 bytes
        before.add_(1.0)
        two = one + 1  # 4,000
        del one
        three = two.view(50, 10)[3:]  # the same
        four = torch.cat([three, three])  # 2,000 and 3,760
        del two, three, four
        torch.zeros(10)

    assert held(CPU, work) == 2000 + 4 * 940


def test_what_a_backward_pass_keeps_is_counted() -> None:
    layers = nn.Sequential(*[nn.Tanh() for _ in range(5)])
    x = torch.zeros(1000, requires_grad=True)
    with_gradients = held(CPU, lambda: layers(x).sum().backward())
    with torch.no_grad():
        without = held(CPU, lambda: layers(x).sum())
    assert with_gradients >= 5 * 4000
    assert without < 3 * 4000


# --- operations -----------------------------------------------------------------------------------


NETWORKS = {
    "dit": lambda: stirred(small_dit()),
    "unet": UNet,
    "mixed": Mixed,
}


def products(work: Callable[[], object]) -> int:
    """Operations by torch's own counter, which is told of products in place."""

    def in_place(total: Any, x: Any, y: Any, *_: Any, **__: Any) -> int:
        return 2 * x[0] * x[1] * y[1]

    mapping = {torch.ops.aten.addmm_: in_place}
    with FlopCounterMode(display=False, custom_mapping=mapping) as counter:
        work()
    return int(counter.get_total_flops())


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("curvature", ["empirical", "identity"])
def test_the_operations_of_every_pass_are_those_that_torch_counts(
    name: str, curvature: str
) -> None:
    torch.manual_seed(0)
    denoiser = model(NETWORKS[name](), layers=["**"])
    teacher, size, queries = Teacher(denoiser, draws(), curvature=curvature), 6, 4
    x, indices = Noise(8).x[:size], list(range(size))
    positions = teacher.one_pass(x, None, 0)
    parts = teacher.probe.parts
    kernels = Kernels(parts, positions, "cpu", identity=curvature == "identity")
    network = products(lambda: teacher.one_pass(x, None, 0))
    teacher.rehearsed.stand_in()
    sides, mine = teacher.prepared(x[:queries], None, 0)
    sketcher = Sketcher(teacher.curvature, 256, 0)
    planned_and_counted = {
        "fit": (
            size * kernels.fit(),
            products(lambda: teacher.rehearsed.add(x, None, 0, indices)),
        ),
        "prepared": (
            kernels.prepared(queries) + (queries - size) * network // size,
            products(lambda: teacher.prepared(x[:queries], None, 0)),
        ),
        "scored": (
            size * kernels.scored(queries),
            products(lambda: teacher.score(sides, mine, x, None, 0)),
        ),
        "sketched": (
            size * kernels.sketched(256),
            products(lambda: sketcher.sketched(x, None, 0, "train", indices)),
        ),
        "pairwise": (kernels.pairwise(size), products(lambda: teacher.pairwise(x, draws()[0]))),
    }
    for what, (planned, found) in planned_and_counted.items():
        if what == "fit" and curvature == "identity":
            assert planned == 0
            continue
        assert planned + network == pytest.approx(found, rel=0.02), what


def test_the_attention_of_the_cpu_counts() -> None:
    q = torch.zeros(1, 2, 16, 8, requires_grad=True)
    attention = nn.functional.scaled_dot_product_attention
    once = 2 * 2 * 2 * 16 * 16 * 8  # two products for each of two heads
    with torch.no_grad():
        assert counted(lambda: attention(q, q, q)) == once
    assert counted(lambda: attention(q, q, q).sum().backward()) == once + 5 * once // 2


# --- passes, by a clock that counts them ----------------------------------------------------------


def test_the_time_of_every_stage_is_that_which_it_then_takes(passes, tmp_path: Path) -> None:
    denoiser, data, drawn = model(), Noise(60), draws(4)
    clock = passes(denoiser.network)
    student = {"batch_size": 8, "dim": 16, "hidden": 16, "heads": 2, "draws_per_step": 2}
    asked: dict[str, Any] = {"samples": 21, "batch_size": 8, "queries": 3, "epochs": 2}
    planned = plan(
        denoiser, data, drawn, dim=128, student=student, calibrate=60.0, clock=clock, **asked
    )
    found: dict[str, float] = {}

    def stage(name: str, work: Callable[[], Any]) -> Any:
        before = clock()
        made = work()
        found[name] = clock() - before
        return made

    queries = data.x[:3]
    tid = wherefrom.TID(denoiser, drawn)
    stage("fit", lambda: tid.fit(data, 8, 21, tmp_path / "curvature"))
    stage("attribute", lambda: tid.attribute(queries, data, batch_size=8))
    index = stage("index", lambda: tid.index(data, tmp_path / "index", 128, batch_size=8))
    stage("search the index", lambda: index.search(queries))
    tide = stage("distill", lambda: wherefrom.TIDE.distill(tid, data, 2, **student))
    bank = stage("bank", lambda: tide.index(data, tmp_path / "bank", batch_size=8))
    stage("search the bank", lambda: bank.search(queries))
    # a student's first passes, which look at the network, and one that measures an image
    for name, taken in found.items():
        assert planned[name].seconds == pytest.approx(taken, abs=8, rel=0.02), name
    assert planned["attribute"].passes == found["attribute"] == 4 * (60 + 3)
    assert planned["distill"].passes == 2 * 12 * 8 + 4 * 6  # 6 are held out, and examined
    assert planned["bank"].passes == 4 * 60
    before = clock()
    index.search(queries)  # the first looked at the network, too
    assert planned["search the index"].passes == clock() - before == 4 * 3


def test_training_takes_as_many_passes_as_steps_have_images(passes) -> None:
    denoiser = plain()
    training = {"steps": 50, "batch_size": 4, "lr": 1e-3}
    planned = small(denoiser, training=training, calibrate=60.0, clock=passes(denoiser.network))
    assert planned["train"].passes == 200
    assert planned["train"].seconds == pytest.approx(200, rel=0.01)


def test_more_draws_and_images_take_more_in_proportion(passes) -> None:
    denoiser = model()
    clock = passes(denoiser.network)
    few, many = (
        small(denoiser, dataset=Noise(count), draws=draws(drawn), calibrate=60.0, clock=clock)
        for count, drawn in ((40, 2), (80, 6))
    )
    for name in ("index", "bank"):
        assert many[name].seconds == pytest.approx(6 * few[name].seconds, rel=0.1)
        assert many[name].flops == 6 * few[name].flops
    assert many["fit"].flops > 5 * few["fit"].flops


def test_inverses_grow_with_the_cube_of_their_width_beyond_what_is_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0

    def invert(self: Rehearsal, width: int) -> None:
        nonlocal now
        now += 0.5 + (width / 100) ** 3

    monkeypatch.setattr(Rehearsal, "_root", invert)
    monkeypatch.setattr(rehearsing, "matrices", lambda parts: [3, 40, 40, 300, 700, 2000])
    teacher = Teacher(plain(), draws())
    expected = 6 * 0.5 + sum((width / 100) ** 3 for width in (3, 40, 40, 300, 700, 2000))
    for seconds in (1.0, 12 * 1100.0, 12 * 1e9):  # time for one step, for some, for all
        found = Rehearsal(teacher, Noise(3), Stopwatch(CPU, lambda: now), seconds)._roots()
        assert found == pytest.approx(expected, rel=0.01), seconds


# --- bytes ----------------------------------------------------------------------------------------


def size_of(folder: Path) -> int:
    return sum(len(content) for content in contents(folder).values())


@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_what_is_kept_on_disk_is_as_large_as_planned(dtype: Any, tmp_path: Path) -> None:
    network = stirred(small_dit(width=32, cond_width=32))
    denoiser, data, drawn = model(network), Noise(120), draws(2)
    student = {"batch_size": 16, "dim": 64, "hidden": 128, "heads": 2}
    training = {"steps": 2, "batch_size": 8, "lr": 1e-3}
    planned = plan(
        denoiser,
        data,
        drawn,
        dim=256,
        dtype=dtype,
        batch_size=16,
        epochs=1,
        student=student,
        training=training,
        calibrate=0,
    )
    wherefrom.train(network, EDM, data, store=tmp_path / "train", **training)
    tid = wherefrom.TID(denoiser, drawn).fit(data, 16, store=tmp_path / "fit")
    tid.index(data, tmp_path / "index", 256, dtype, 16)
    tide = wherefrom.TIDE.distill(tid, data, 1, store=tmp_path / "distill" / "run", **student)
    tide.save(tmp_path / "distill" / "student")
    tide.index(data, tmp_path / "bank", dtype)
    for name in ("train", "fit", "index", "distill", "bank"):
        assert planned[name].disk == pytest.approx(size_of(tmp_path / name), rel=0.05), name
        assert planned[name].seconds is None


def test_the_peak_of_a_fit_is_what_lives_in_one() -> None:
    denoiser, data, drawn = model(stirred(small_dit(width=64))), Noise(64), draws(2)
    planned = small(denoiser, dataset=data, draws=drawn, batch_size=32)
    tid = wherefrom.TID(denoiser, drawn)
    tid.fit(data, 32)  # has looked at the network
    found = held(CPU, lambda: tid.fit(data, 32))
    weights = sum(one.nbytes for one in denoiser.network.parameters())
    # the curvature before is still there, and so not counted
    assert planned["fit"].memory - weights == pytest.approx(found, rel=0.15)


def test_a_smaller_budget_makes_smaller_batches_and_groups(passes) -> None:
    denoiser = model()
    tid = wherefrom.TID(denoiser, draws(), memory=2**20)
    planned = small(denoiser, batch_size=64, queries=40, memory=2**20, calibrate=0)
    each = tid.probe.image_bytes(Noise(3))
    assert planned["fit"].batch == tid.budget.fitting(64, each) < 64
    groups = -(-40 // tid.budget.fitting(40, tid.probe.query_bytes))
    assert groups > 1
    assert planned["attribute"].passes == 3 * (groups * 40 + 40)


def test_what_other_rooms_keep_to_themselves_is_still_so() -> None:
    worth = {"pass": probing._WORTH, "embed": students._WORTH, "learn": distilling._WORTH}
    assert worth == arithmetic.WORTH
    assert arithmetic.SHARD == stores._SHARD
    assert (arithmetic.SCORES, arithmetic.PIXELS) == (teachers._SCORES, teachers._PIXELS)
    assert (arithmetic.LOOKS, arithmetic.LEVELS) == (distilling._LOOKS, distilling._LEVELS)


# --- nothing is left ------------------------------------------------------------------------------


def test_planning_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    network = stirred(small_dit(dropout=0.1)).train()
    frozen = next(network.parameters()).requires_grad_(False)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    hooks = _hooks(network)
    state = torch.get_rng_state()
    training = {"steps": 5, "batch_size": 4, "lr": 1e-3}
    small(model(network), training=training, folder=tmp_path / "runs")
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert all(one.grad is None for one in network.parameters())
    assert network.training
    assert not frozen.requires_grad
    assert sum(one.requires_grad for one in network.parameters()) == len(before) - 1
    assert _hooks(network) == hooks
    assert list(tmp_path.iterdir()) == []


def _hooks(network: nn.Module) -> int:
    return sum(
        len(module._forward_hooks) + len(module._forward_pre_hooks) + len(module._backward_hooks)
        for module in network.modules()
    )


def test_a_plan_is_the_same_inside_inference_mode() -> None:
    denoiser = plain()
    outside = small(denoiser)
    with torch.inference_mode():
        inside = small(denoiser)
    assert [stage.flops for stage in inside.stages] == [one.flops for one in outside.stages]


# --- what does not fit ----------------------------------------------------------------------------


def test_an_index_that_the_disk_cannot_hold_says_which_would_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = small(dim=512, calibrate=0)
    assert whole.fits
    room = whole["index"].disk // 2
    monkeypatch.setattr(planner, "_disk", lambda folder: room)
    short = small(dim=512, calibrate=0)
    assert short["index"].lacks == ("disk",)
    assert not short.fits
    said = short["index"].advice[0]
    dim = int(said.split("dim=")[1].split()[0])
    assert 64 <= dim < 512
    assert small(dim=dim, calibrate=0)["index"].disk <= room
    assert small(dim=2 * dim, calibrate=0)["index"].lacks == ("disk",)
    assert "draws=1" in said
    assert said in str(short)


def test_a_curvature_that_does_not_fit_is_not_timed_and_says_which_layers_to_leave_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(planner, "free_memory", lambda device: 1000)
    short = small()
    assert short["fit"].seconds is None
    assert short["fit"].lacks == ("memory",)
    assert "layers=[...]" in short["fit"].advice[0]
    assert short.calibrated == 0
    assert short.seconds is None


def test_a_batch_of_a_student_that_does_not_fit_says_which_would(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    student = {"batch_size": 32, "dim": 16, "hidden": 16, "heads": 2}
    asked: dict[str, Any] = {"student": student, "memory": 2**22}
    weights = sum(one.nbytes for one in model().network.parameters())
    planned = small(**asked)
    others = max(one.memory for one in planned.stages if one.name != "distill")
    room = max(others, planned["distill"].memory - 200_000)
    monkeypatch.setattr(planner, "free_memory", lambda device: room - weights)
    short = small(**asked)
    assert short["distill"].lacks == ("memory",)
    assert "a student of batch_size" in short["distill"].advice[0]


def test_a_plan_that_takes_too_long_says_what_would_not(passes) -> None:
    denoiser = plain()
    clock = passes(denoiser.network)
    asked: dict[str, Any] = {"calibrate": 60.0, "clock": clock, "draws": draws(8)}
    whole = small(denoiser, **asked)
    assert whole.advice == ()
    short = small(denoiser, seconds=whole.seconds / 2, **asked)
    assert short.advice
    assert not short.fits
    fewer = int(short.advice[0].removeprefix("draws="))
    asked["draws"] = draws(fewer)
    assert small(denoiser, **asked).seconds <= 1.1 * whole.seconds / 2
    nothing = small(denoiser, seconds=1e-9, **asked)
    assert "lower several" in nothing.advice[0]


def test_a_method_needs_its_own_stages_and_no_others() -> None:
    whole = usual()
    taken = {stage.name: stage.seconds or 0.0 for stage in whole.stages}
    first = taken["train"] + taken["fit"]
    assert whole.totals == pytest.approx(
        {
            "index": first + taken["index"] + taken["search the index"],
            "tid": first + taken["attribute"],
            "tide": first + taken["distill"] + taken["bank"] + taken["search the bank"],
        }
    )
    chosen = replace(whole, method="tid")
    assert chosen.seconds == whole.totals["tid"]
    totals = [line for line in str(chosen).split("\n") if ": train + fit + " in line]
    assert [line.split()[0] for line in totals] == ["tid", "index", "tide"]
    known = replace(chosen, done=("train", "fit"))
    assert known.seconds == taken["attribute"]


def test_the_time_is_that_of_the_method_without_what_is_done(passes) -> None:
    denoiser = plain()
    asked: dict[str, Any] = {"calibrate": 60.0, "clock": passes(denoiser.network)}
    whole = small(denoiser, **asked)
    enough = 1.2 * whole.totals["tid"]
    assert enough < whole.seconds
    assert small(denoiser, seconds=enough, **asked).fits is False  # everything takes longer
    assert small(denoiser, seconds=enough, method="tid", **asked).fits is True
    less = 1.2 * whole["attribute"].seconds
    assert less < whole.totals["tid"]
    assert small(denoiser, seconds=less, method="tid", **asked).fits is False
    assert small(denoiser, seconds=less, method="tid", done=["fit"], **asked).fits is True


def test_what_another_method_lacks_is_no_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    room = small(dim=2048, calibrate=0)["index"].disk - 1
    monkeypatch.setattr(planner, "_disk", lambda folder: room)
    assert small(dim=2048, calibrate=0, method="index").fits is False
    assert small(dim=2048, calibrate=0, method="tid").fits is True
    assert small(plain(), calibrate=0, method="tide").fits is False  # there can be no student


def test_without_times_it_is_not_known_whether_the_time_is_enough() -> None:
    planned = small(calibrate=0, seconds=600)
    assert planned.fits is None
    assert json.loads(planned.to_json())["fits"] is None
    assert "nothing was timed: whether it takes 10.0 min is not known" in str(planned)
    assert small(calibrate=0, seconds=float("inf")).fits is True  # any time will do


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"method": "best"}, "method is 'best'"),
        ({"done": ["fitting"]}, "done has 'fitting'; the stages are fit, attribute"),
        ({"seconds": float("nan")}, "seconds must be"),
    ],
)
def test_a_method_or_a_stage_that_is_none_is_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(wherefrom.errors.WherefromError, match=said):
        small(calibrate=0, **wrong)


def test_a_small_network_has_more_than_no_parameters() -> None:
    count = sum(one.numel() for one in model().network.parameters())
    assert count < 100_000
    assert f", {count:,} parameters, " in small(calibrate=0).model


# --- what is shown --------------------------------------------------------------------------------


def test_a_plan_shows_what_is_tracked_and_what_every_stage_takes() -> None:
    planned = usual()
    text = str(planned)
    assert "left out registers" in text
    assert f"{100 * planned.share:.2f} % of the parameters" in text
    assert planned.left_out == model().coverage().left_out
    for stage in planned.stages:
        assert stage.what in text
        assert stage.seconds is not None
        assert stage.seconds > 0
        assert stage.memory > 0
        assert stage.flops > 0
    names = [stage.name for stage in planned.stages]
    assert names == [
        "train",
        "fit",
        "attribute",
        "index",
        "search the index",
        "distill",
        "bank",
        "search the bank",
    ]
    assert planned.seconds == sum(stage.seconds for stage in planned.stages)


def test_a_plan_goes_through_json() -> None:
    planned = small(calibrate=0)
    read = json.loads(planned.to_json())
    stages = [
        Stage(**{**one, "lacks": tuple(one["lacks"]), "advice": tuple(one["advice"])})
        for one in read["stages"]
    ]
    assert tuple(stages) == planned.stages
    assert read["seconds"] is None
    assert read["left_out"] == planned.left_out


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.034, "0.034 s"), (9.96, "10 s"), (61, "61 s"), (270, "4.5 min"), (9000, "2.5 h")],
)
def test_durations_are_read_at_a_glance(seconds: float, shown: str) -> None:
    assert planner.duration(seconds) == shown


def test_a_network_without_blocks_is_planned_without_a_student() -> None:
    planned = small(plain(), calibrate=0)
    assert [one.name for one in planned.stages][-1] == "search the index"
    assert planned.notes[0].startswith("no student is planned: ")


def test_pictures_that_must_be_encoded_are_a_stage_of_their_own() -> None:
    made: list[int] = []

    def encode(items: list[int]) -> Any:
        made.append(len(items))
        return Subset(Noise(100), items)

    planned = small(plain(), dataset=list(range(90)), encode=encode)
    assert planned.stages[0].name == "encode"
    assert planned["encode"].disk == pytest.approx(90 * 4 * 64, abs=4000)
    assert planned["index"].passes == 90 * 3
    assert max(made) <= 16


def test_a_plan_without_a_curvature_has_none_on_disk() -> None:
    bare = small(plain(), tid={"curvature": "identity"})
    assert bare["fit"].disk < 10_000
    assert bare["fit"].memory < small(plain())["fit"].memory


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"calibrate": -1}, "calibrate must be at least 0"),
        ({"samples": 0}, "samples must be at least 1"),
        ({"dim": 1}, "dim must be at least 2"),
        ({"queries": 2.5}, "queries must be a whole number"),
        ({"seconds": 0}, "seconds must be above 0"),
        ({"dtype": "float8"}, "dtype is 'float8'; choose one of"),
        ({"student": {"store": "here"}}, "student has 'store'; what is planned is epochs, "),
        ({"training": {"keep": [1]}}, "training has 'keep'"),
        ({"tid": {"memory": 5}}, "tid has 'memory'"),
        ({"draws": wherefrom.Draws(EDM, (1, 4, 4), 2)}, r"the draws \(1, 4, 4\)"),
    ],
)
def test_what_cannot_be_planned_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(wherefrom.WherefromError, match=words):
        small(**changes)


def test_a_network_without_weights_is_refused_with_the_way_out() -> None:
    with pytest.raises(wherefrom.WherefromError, match=r"wherefrom\.needs says"):
        small(model(small_dit().to("meta")))


def test_a_stage_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(wherefrom.WherefromError, match="no stage 'encode'; it has fit, "):
        small(calibrate=0)["encode"]
