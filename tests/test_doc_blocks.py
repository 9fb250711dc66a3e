"""Every code block of the documentation does what it says: Python runs, commands parse, quotations
stand in the files they are quoted from, and what cannot be run says so.

A page's Python runs from top to bottom in one namespace, in an empty folder, on a network and
pictures small enough for a test; numbers that make work long are made smaller, and nothing else is
changed.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer
from torch.utils.data import Subset

import research
import wherefrom
from doc_blocks import ROOT, Block, blocks_of, commands, pages
from helpers import small_dit, stirred
from pipelines import noise, saved_world, shared
from wherefrom.adapters.table import TABLE
from wherefrom.attribution.attributor import Attributor
from wherefrom.baselines import Pixel
from wherefrom.cli.app import app
from wherefrom.layers import kinds

PAGES = {page.relative_to(ROOT).as_posix(): blocks_of(page) for page in pages()}
BLOCKS = [block for blocks in PAGES.values() for block in blocks]
USAGE_ERROR: Any = typer.BadParameter.__base__  # of which the class itself is not public
LANGUAGES = {"python", "sh", "toml", "json", "text", "math"}
Names = dict[str, Any]

STUDENT = "epochs=1, batch_size=6, dim=8, hidden=8, heads=2"
# what is made smaller on a page, and to what; each must be there
SMALLER: dict[str, dict[str, str]] = {
    "README.md": {
        "steps=100": "steps=4",
        "dim=96": "dim=16",
        'pipe("a photo of my dog")': 'pipe("a photo of my dog", num_inference_steps=3)',
    },
    "docs/tour.md": {"steps=100": "steps=4", "dim=96": "dim=16"},
    "docs/engines.md": {"epochs=50": STUDENT, "dim=256": "dim=12", "dim=128": "dim=12"},
    "docs/guide.md": {
        "epochs=50": STUDENT,
        '"steps": 4000, "batch_size": 256': '"steps": 2, "batch_size": 8',
        '"lr": 1e-3}': '"lr": 0.1}',
        "**evaluation.standard(draws=32)": '"Pixel": evaluation.standard(draws=1)["Pixel"]',
        "seeds=range(6), queries=20": "seeds=range(1), queries=2",
        "subsets=32": "subsets=3, queries=2",
    },
    "docs/lora.md": {"pipe(prompts)": "pipe(prompts, num_inference_steps=3)"},
}
# the first so many blocks of a page that another file runs, and looks at what came of them
ELSEWHERE = {"docs/your_own_model.md": 4}  # tests/adapters/test_ten_lines.py


# --- the worlds that pages run in -----------------------------------------------------------------


def small_world() -> Names:
    """A network of 8 x 8 digits, and all that pages mean by the usual names."""
    network, process = stirred(small_dit()), wherefrom.EDM()
    denoiser = wherefrom.Denoiser(network, process)
    items = wherefrom.data.digits()
    dataset = torch.stack([items[place] for place in range(48)])
    draws = wherefrom.Draws(process, shape=(1, 8, 8), count=2)
    tid = wherefrom.TID(denoiser, draws).fit(dataset)
    grown = noise(2, 1, 8, 8)
    return {
        "torch": torch,
        "wherefrom": wherefrom,
        "network": network,
        "process": process,
        "denoiser": denoiser,
        "dataset": dataset,
        "digits": dataset,
        "draws": draws,
        "tid": tid,
        "noise": grown,
        "images": wherefrom.sample(denoiser, grown, steps=2).clamp(-1, 1),
        "queries": dataset[:2],
        "artists": ["Ada", "Ben"] * 24,
        "make_network": lambda seed: stirred(small_dit()),
        "MyAttributor": lambda denoiser: Pixel(),
    }


def pipeline_world() -> Names:
    """A saved pipeline, pictures with captions and a LoRA in folders below the current one."""
    saved_world("saved", "pictures", "lora")
    return {
        "folder": "saved",
        "images": "pictures",
        "path": "lora",
        "prompts": ["a cat", "a dog"],
    }


def network_world() -> Names:
    pipe = shared("sd3")
    return {"wherefrom": wherefrom, "network": pipe.transformer, "scheduler": pipe.scheduler}


def readme_world() -> Names:
    saved_world("my-pipeline", "my-pictures", "my-lora")
    return {}


def edm_world() -> Names:
    names = vars(research.example("edm"))
    taken = {name: names[name] for name in ("Any", "Tensor", "nn", "EDMConv2d")}
    return {**taken, "wherefrom": wherefrom, "network": research.EDMPrecond()}


WORLDS: dict[str, Callable[[], Names]] = {
    "README.md": readme_world,
    "docs/layers.md": edm_world,
    "docs/lora.md": pipeline_world,
    "docs/tour.md": dict,  # it makes all that it needs
    "docs/your_own_model.md": network_world,
}


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty folder, fewer digits and a smaller network; what pages register is taken back."""
    monkeypatch.chdir(tmp_path)
    all_digits = wherefrom.data.digits
    monkeypatch.setattr(
        wherefrom.data, "digits", lambda **how: Subset(all_digits(**how), range(80))
    )
    preset = SimpleNamespace(network=lambda: small_dit())
    monkeypatch.setattr(wherefrom, "preset", lambda name: preset)
    monkeypatch.setattr(kinds, "_KINDS", list(kinds._KINDS))
    rows = dict(TABLE)
    yield
    TABLE.clear()
    TABLE.update(rows)


def to_run(page: str) -> list[Block]:
    runnable = [
        block
        for block in PAGES[page]
        if block.language == "python" and not block.marked and block.title is None
    ]
    return runnable[ELSEWHERE.get(page, 0) :]


def run(page: str) -> Names:
    """All that a page has made by its end."""
    smaller = dict(SMALLER.get(page, {}))
    names = WORLDS.get(page, small_world)()
    for block in to_run(page):
        code = block.text
        for much, little in list(smaller.items()):
            if much in code:
                code = code.replace(much, little)
                del smaller[much]
        exec(compile("\n" * block.line + code, str(ROOT / page), "exec"), names)
    assert not smaller, f"{page} no longer has {', '.join(smaller)}"
    return names


@pytest.mark.filterwarnings("ignore:.*of the network's parameters")
@pytest.mark.filterwarnings("ignore:.*range")  # what an untrained network makes is no image
@pytest.mark.parametrize(
    "page", [page for page in PAGES if to_run(page) and page != "CONTRIBUTING.md"]
)
def test_the_python_of_a_page_runs_from_top_to_bottom(page: str, small: None) -> None:
    run(page)


def test_the_worked_examples_of_contributing_come_to_what_they_say(small: None) -> None:
    names = run("CONTRIBUTING.md")
    # the layer of one's own: the kernel of plain gradients, by the layer's own formula
    network, x = names["Network"](), names["dataset"]
    denoiser = wherefrom.Denoiser(network, wherefrom.EDM(), layers=["layer"])
    draws = wherefrom.Draws(wherefrom.EDM(), (1, 8, 8), count=1)
    tid = wherefrom.TID(denoiser, draws, curvature="identity", normalize="none").fit(x)
    seen = wherefrom.EDM().add_noise(x, draws.sigmas[0], draws.noises[0]).flatten(1)
    expected = (64 * seen @ seen.T) ** 2  # the gradient at the sum of 64 outputs is one for each
    torch.testing.assert_close(tid.scores(x[:2], x), expected[:2], rtol=1e-4, atol=1e-2)
    # the row: the blocks of a UNet are found, and its scheduler's process
    assert type(names["model"].denoiser.process) is wherefrom.DDPM
    assert len(names["model"].denoiser.blocks) == 5
    # the method: the image itself is the nearest in brightness
    method = names["Brightness"]()
    assert isinstance(method, Attributor)
    assert method.fit(x).attribute(x[:3], x, top_k=1).indices.flatten().tolist() == [0, 1, 2]


# --- what is not run ------------------------------------------------------------------------------


def test_every_block_says_its_language() -> None:
    for block in BLOCKS:
        assert block.language in LANGUAGES, f"{block}: {block.language!r}"


@pytest.mark.parametrize(
    "block", [block for block in BLOCKS if block.title is not None], ids=lambda block: str(block)
)
def test_a_quotation_stands_in_its_file(block: Block) -> None:
    """Line by line, in its order; lines between may be left out."""
    lines = (ROOT / str(block.title)).read_text().splitlines()
    bare = [line.split("  #")[0].strip() for line in lines]
    place = 0
    for line in block.text.splitlines():
        wanted = line.split("  #")[0].strip()
        assert wanted in bare[place:], f"{block}: {wanted!r} is not in {block.title}"
        place = bare.index(wanted, place) + 1


def test_data_blocks_can_be_read() -> None:
    for block in BLOCKS:
        if block.language == "toml":
            tomllib.loads(block.text)
        elif block.language == "json":
            json.loads(block.text)


def check_wherefrom(words: list[str]) -> None:
    group: Any = typer.main.get_command(app)
    if words and words[0].startswith("--"):
        assert words[0] in {option for one in group.params for option in one.opts}
        return
    assert words[0] in group.commands, f"`wherefrom {words[0]}` is no command"
    try:
        group.commands[words[0]].make_context(words[0], list(words[1:]))
    except typer.BadParameter as error:  # files of the reader's are not here
        if "does not exist" not in str(error):
            raise


def check_python(words: list[str]) -> None:
    script = (ROOT / words[0]).read_text()
    for word in words[1:]:
        if word.startswith("--"):
            assert word in script, f"{words[0]} has no {word}"


def check_make(words: list[str]) -> None:
    for target in words:
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M), target


def check_pip(words: list[str]) -> None:
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert words[0] == "install"
    for extras in re.findall(r"\[([\w,-]+)\]", " ".join(words)):
        assert set(extras.split(",")) <= set(known), extras


def check_pytest(words: list[str]) -> None:
    for word in words:
        assert not word.startswith("tests/") or (ROOT / word).exists(), word


COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "wherefrom": check_wherefrom,
    "python": check_python,
    "make": check_make,
    "pip": check_pip,
    "pytest": check_pytest,
}


@pytest.mark.parametrize(
    "block", [block for block in BLOCKS if block.language == "sh"], ids=lambda block: str(block)
)
def test_the_commands_of_a_block_exist_and_their_options_too(block: Block) -> None:
    for words in commands(block.text):
        assert words[0] in COMMANDS, f"{block}: nobody knows what {words[0]!r} is"
        COMMANDS[words[0]](words[1:])


def test_commands_in_the_text_exist_too() -> None:
    group: Any = typer.main.get_command(app)
    for page in pages():
        for verb in re.findall(r"`wherefrom ([a-z]\w*)", page.read_text()):
            assert verb in group.commands, f"{page.name}: `wherefrom {verb}` is no command"


@pytest.mark.parametrize(
    "broken",
    [
        "wherefrom evaluate digits --out runs --no-such-option",
        "wherefrom no-such-command",
        "make no-such-target",
        "pip install '.[no-such-extra]'",
        "python benchmarks/index.py --no-such-option",
    ],
)
def test_a_command_that_is_not_there_is_noticed(broken: str) -> None:
    words = commands(broken)[0]
    with pytest.raises((AssertionError, USAGE_ERROR)):
        COMMANDS[words[0]](words[1:])


def test_lines_that_go_on_comments_and_variables_of_a_shell_block_are_understood() -> None:
    text = 'RUN="a --b c"\nwherefrom x $RUN \\\n    --d 1 ...  # and more\n# nothing\n'
    assert commands(text) == [["wherefrom", "x", "a", "--b", "c", "--d", "1"]]
