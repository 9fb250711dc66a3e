"""The package as a stranger meets it: what importing takes, what the README says, what a missing
extra says.
"""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

import wherefrom
from wherefrom.errors import need

ROOT = Path(__file__).parents[1]


def run(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout


@pytest.fixture(scope="module")
def stranger() -> list[str]:
    """What a process says that imports the package with all its connections refused."""
    code = (
        "import socket\ndef no(*a, **k): raise SystemExit('network')\n"
        "socket.socket.connect = no\n"
        "import sys, wherefrom, wherefrom.errors, wherefrom.cli.app\n"
        "print('torch' in sys.modules, wherefrom.__version__)\n"
        "from wherefrom import TID\nprint('torch' in sys.modules, TID is wherefrom.TID)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return [*done.stdout.split(), done.stderr]


def test_importing_takes_the_core_alone():
    # everything that is no core dependency is made impossible to import
    optional = [
        "torchvision",
        "typer",
        "rich",
        "sklearn",
        "PIL",
        "matplotlib",
        "datasets",
        "transformers",
        "diffusers",
        "faiss",
        "fastapi",
        "uvicorn",
    ]
    code = (
        f"import sys\nfor name in {optional}: sys.modules[name] = None\n"
        "import wherefrom; print(wherefrom.TID.__name__)"
    )
    assert run(code).strip() == "TID"


def test_torch_is_imported_by_the_first_name_that_needs_it_and_not_before(stranger: list[str]):
    assert stranger[:-1] == ["False", wherefrom.__version__, "True", "True"]


def test_every_public_name_is_listed_and_a_wrong_one_is_refused():
    assert set(wherefrom.__all__) < set(dir(wherefrom))
    with pytest.raises(AttributeError, match="'wherefrom' has no attribute 'TDI'"):
        wherefrom.TDI  # noqa: B018
    everything: dict[str, object] = {}
    exec("from wherefrom import *", everything)
    assert set(wherefrom.__all__) <= set(everything)


def test_importing_opens_no_connection(stranger: list[str]):
    assert "network" not in stranger[-1]
    assert len(stranger) == 5, stranger[-1]  # it came to its end


def test_a_missing_extra_is_named():
    with pytest.raises(
        wherefrom.WherefromError, match=r"'no_such_package'.*pip install 'wherefrom\[search\]'"
    ):
        need("no_such_package.inner", "search")


def test_the_command_without_its_extra_says_so_in_one_sentence():
    code = "import sys; sys.modules['typer'] = None\nfrom wherefrom.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert (
        done.stderr.strip()
        == "wherefrom: this needs the package 'typer', which is not installed: pip install "
        "'wherefrom[cli]'"
    )


def test_the_package_is_typed():
    assert files("wherefrom").joinpath("py.typed").is_file()


def test_no_example_of_the_readme_has_more_than_ten_lines():
    text = (ROOT / "README.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)  # test_doc_blocks.py runs them
    assert blocks
    for block in blocks:
        assert len(block.strip().splitlines()) <= 10


def test_the_readme_names_the_two_commands():
    text = (ROOT / "README.md").read_text()
    assert "make demo" in text
    assert "make test" in text


def test_every_public_name_exists_and_has_words():
    for name in wherefrom.__all__:
        assert getattr(wherefrom, name).__doc__, name
