"""The examples of models that are trained where they stand, and the notebook, at a tiny size.

Each trains what it tells wherefrom it trained: the noised image and the target of its loop are
those of the process.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import nbformat
import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell
from torch import Tensor

import wherefrom
from forks import Fork
from pipelines import WORDS, saved_world
from research import EXAMPLES, example

TINY = {"steps": 3, "count": 70, "width": 8, "draws": 2}


@pytest.mark.filterwarnings("ignore:.*range")  # what an untrained network makes is no image
@pytest.mark.filterwarnings("ignore:.*of the network's parameters")
@pytest.mark.parametrize(
    ("name", "size"),
    [("plain_edm", {}), ("flow_matching", {}), ("ddpm_unet", {"inference": 2})],
)
def test_the_script_prints_five_training_digits_of_each_image_the_farthest_first(
    name: str, size: dict[str, int], capsys: pytest.CaptureFixture[str]
) -> None:
    example(name).main(**TINY, **size)
    lines = capsys.readouterr().out.splitlines()
    found = [
        re.fullmatch(r"image (\d): digit (\d+), a (\d), (\S+) deviations", one) for one in lines
    ]
    assert [match and match[1] for match in found] == ["0"] * 5 + ["1"] * 5
    labels = wherefrom.data.digits(labels=True)
    for match in found:
        assert match is not None
        assert int(match[2]) < TINY["count"]
        assert int(match[3]) == labels[int(match[2])][1]
    far = [float(match[4]) for match in found if match is not None]
    assert far[:5] == sorted(far[:5], reverse=True)


@pytest.fixture
def images() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, noise = torch.randn(2, 3, 1, 8, 8, generator=generator)
    return x, noise


def test_the_plain_network_sees_what_edm_says(images: tuple[Tensor, Tensor]) -> None:
    x, noise = images
    sigma = torch.tensor([0.01, 1.0, 40.0])
    seen = example("plain_edm").noised(x, sigma, noise)
    torch.testing.assert_close(seen, wherefrom.EDM().add_noise(x, sigma, noise))


def test_the_flow_s_line_and_velocity_are_the_process_s(images: tuple[Tensor, Tensor]) -> None:
    x, noise = images
    t = torch.tensor([0.1, 0.5, 0.9])
    script, process = example("flow_matching"), wherefrom.FlowMatching()
    torch.testing.assert_close(script.noised(x, t, noise), process.add_noise(x, t, noise))
    torch.testing.assert_close(script.velocity(x, noise), process.target(x, t, noise))


def test_the_flow_s_sampler_ends_at_the_image_of_an_ideal_network(
    images: tuple[Tensor, Tensor],
) -> None:
    x, noise = images
    made = example("flow_matching").sampled(lambda seen, t: noise - x, noise, steps=4)
    torch.testing.assert_close(made, x)


def test_the_unet_s_scheduler_noises_as_its_process(images: tuple[Tensor, Tensor]) -> None:
    x, noise = images
    scheduler, t = diffusers.DDPMScheduler(), torch.tensor([3, 400, 900])
    process = wherefrom.from_scheduler(scheduler)
    torch.testing.assert_close(scheduler.add_noise(x, noise, t), process.add_noise(x, t, noise))
    torch.testing.assert_close(process.target(x, t, noise), noise)


def losses_of(train: Callable[[], Any]) -> list[float]:
    """The losses that a loop takes its steps by."""
    losses: list[float] = []
    backward = Tensor.backward

    def noted(loss: Tensor, *rest: Any, **how: Any) -> None:
        losses.append(float(loss.detach()))
        backward(loss, *rest, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "backward", noted)
        train()
    return losses


@pytest.mark.parametrize("name", ["plain_edm", "flow_matching", "ddpm_unet"])
def test_the_loop_of_the_script_learns(name: str) -> None:
    script = example(name)
    digits = wherefrom.data.digits()
    x = torch.stack([digits[place] for place in range(16)])
    more = (diffusers.DDPMScheduler(),) if name == "ddpm_unet" else ()
    losses = losses_of(lambda: script.trained(x, *more, steps=40, width=16, batch_size=32))
    assert len(losses) == 40
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])


@pytest.mark.filterwarnings("ignore:.*range")
@pytest.mark.filterwarnings("ignore:.*of the network's parameters")
def test_the_lora_script_names_the_fine_tuning_images_by_their_influence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    saved_world("pipeline", "pictures", "lora")
    capsys.readouterr()
    example("lora").main("pipeline", "lora", "pictures", "a cat", draws=2, inference=2)
    lines = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    assert {name for _, name, _ in lines} == {f"{place:02d}.png" for place in range(12)}
    assert all(caption == f"a {WORDS[int(name[:2])]}" for _, name, caption in lines)
    far = [float(above) for above, _, _ in lines]
    assert far == sorted(far, reverse=True)


@pytest.fixture(scope="module")
def notebook() -> Any:
    return nbformat.read(EXAMPLES / "tour.ipynb", as_version=4)


def test_the_notebook_is_kept_without_outputs(notebook: Any) -> None:
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in cells)


def test_the_notebook_runs_from_top_to_bottom(
    notebook: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOUR_STEPS", "3")
    monkeypatch.setenv("TOUR_DIGITS", "70")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.chdir(tmp_path)

    def run() -> None:
        """Every cell in a shell of its own, as a kernel does, and what it shows is shown."""
        shell = InteractiveShell.instance()
        for cell in notebook.cells:
            if cell.cell_type == "code":
                shell.run_cell(cell.source).raise_error()

    status, said = Fork(run).end()
    assert status == 0, said
