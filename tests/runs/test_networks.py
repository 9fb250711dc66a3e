"""Claims about the networks that a run names: weights are data, never code, and what does not fit
is refused by name.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import wherefrom
from tiny_runs import network
from wherefrom.runs.networks import made_network, made_process, opened_pipeline
from wherefrom.runs.settings import ModelTable, ProcessTable


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return network(tmp_path_factory.mktemp("net"))


def named(weights: str, **others: object) -> ModelTable:
    given = {"factory": "net.py:make", **others}
    return ModelTable(weights=weights, **given)  # type: ignore[arg-type]


def test_safetensors_and_plain_checkpoints_give_the_same_weights(
    place: Path, weights_equal
) -> None:
    one = made_network(named("net.safetensors"), place).made
    for other in (named("net.pt"), named("nested.pt", entry="ema")):
        assert weights_equal(one, made_network(other, place).made)
    assert not one.training


def test_a_factory_may_give_a_denoiser_and_takes_arguments(place: Path) -> None:
    made = made_network(named("net.pt", factory="net.py:wrapped"), place).made
    assert isinstance(made, wherefrom.Denoiser)
    with pytest.raises(wherefrom.WherefromError, match=r"first.weight is \(8, 1, 3, 3\) there"):
        made_network(named("net.pt", arguments={"width": 4}), place)


def test_a_pickle_is_refused_and_never_run(place: Path) -> None:
    import os

    class Code:
        def __reduce__(self):
            return os.mkdir, (str(place / "was-run"),)

    torch.save(Code(), place / "whole.pt")
    with pytest.raises(
        wherefrom.WherefromError, match=r"whole.pt holds more than weights, and ope"
    ):
        made_network(named("whole.pt"), place)
    assert not (place / "was-run").exists()


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (named("none.pt"), "there is no file"),
        (named("nested.pt"), 'name the entry with the weights, entry = "..." in [model]; it has e'),
        (named("nested.pt", entry="model"), "has no entry 'model': it has ema, step"),
        (named("net.safetensors", entry="ema"), "has no entries"),
        (named("net.py"), "net.py is no checkpoint: give a .safetensors"),
        (named("list.pt"), "holds list and no weights"),
        (named("text.safetensors"), "cannot be read as safetensors"),
        (named("foreign.pt"), "not of Net: it lacks first.weight, first.bias, blocks.0.weight and"),
        (named("net.pt", factory="net.py"), "not of the form file.py:function"),
        (named("net.pt", factory="nowhere.py:make"), "there is no file"),
        (named("net.pt", factory="net.py:maker"), "no function maker in"),
        (named("net.pt", factory="net.py:nothing"), "net.py:nothing gives int"),
        (named("net.pt", factory="net.pt:make"), "is no Python file"),
        (named("net.pt", factory="broken.py:make"), "broken.py cannot be imported (ZeroDivision"),
        (named("net.pt", arguments={"depth": 3}), "net.py:make fails (TypeError"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(place: Path, table: ModelTable, words: str) -> None:
    (place / "broken.py").write_text("1 / 0\n")
    (place / "text.safetensors").write_text("hello")
    torch.save([1, 2], place / "list.pt")
    torch.save(torch.nn.Linear(2, 2).state_dict(), place / "foreign.pt")
    before = list(sys.path)
    with pytest.raises(wherefrom.WherefromError) as refused:
        made_network(table, place)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)
    assert sys.path == before


def test_processes_are_those_that_are_named(tmp_path: Path) -> None:
    import diffusers

    def process(**given: object) -> wherefrom.Process | None:
        return made_process(ProcessTable(**given), tmp_path)  # type: ignore[arg-type]

    assert process(kind="edm", sigma_data=0.3) == wherefrom.EDM(sigma_data=0.3)
    assert process(kind="flow", shift=3.0) == wherefrom.FlowMatching(shift=3.0)
    assert process(kind="ddpm", steps=100) == wherefrom.DDPM.linear(100)
    assert process(kind="v", schedule="cosine") == wherefrom.VPrediction.cosine()
    assert process() is None
    diffusers.DDPMScheduler(prediction_type="v_prediction").save_pretrained(tmp_path)
    found = process(scheduler="scheduler_config.json")
    assert isinstance(found, wherefrom.VPrediction)
    (tmp_path / "other.json").write_text('{"_class_name": "Nothing"}')
    with pytest.raises(wherefrom.WherefromError, match="of no scheduler that diffusers has"):
        process(scheduler="other.json")


def test_what_is_no_pipeline_is_refused_by_name(tmp_path: Path) -> None:
    cpu = torch.device("cpu")
    with pytest.raises(
        wherefrom.WherefromError, match=r"nowhere is no folder: name what pipe\.sav"
    ):
        opened_pipeline(ModelTable(pipeline="nowhere"), tmp_path, cpu)
    with pytest.raises(wherefrom.WherefromError, match=r"holds no model_index\.json"):
        opened_pipeline(ModelTable(pipeline="."), tmp_path, cpu)
    (tmp_path / "model_index.json").write_text('{"_class_name": "NoPipeline"}')
    with pytest.raises(wherefrom.WherefromError, match="cannot be opened"):
        opened_pipeline(ModelTable(pipeline="."), tmp_path, cpu)
