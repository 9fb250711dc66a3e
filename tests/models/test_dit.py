"""The paper's backbone."""

from __future__ import annotations

import pytest
import torch

import wherefrom
from helpers import small_dit, stirred
from wherefrom.models import DiT


def parameters(network: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


@pytest.mark.parametrize(
    ("name", "count"), [("cifar10", 99_787_890), ("artbench10", 99_975_788), ("coco", 146_574_690)]
)
def test_the_networks_of_the_paper_have_exactly_its_parameters(name, count):
    with torch.device("meta"):
        assert parameters(getattr(DiT, name)()) == count


def test_untrained_it_outputs_c_skip_times_its_input(process):
    network = small_dit(process=process)
    x, sigma = torch.randn(5, 1, 8, 8), process.grid(5)
    skip = process.preconditioning(process.check(sigma))[0].float()
    assert torch.allclose(network(x, sigma), skip[:, None, None, None] * x, rtol=1e-6)
    assert torch.equal(network.raw(x, torch.randn(5, 1, 16)), torch.zeros_like(x))


def test_the_paper_s_networks_have_288_tokens():
    for build in (DiT.cifar10, DiT.artbench10):
        with torch.device("meta"):
            network = build()
        assert len(network.position) + len(network.registers) == 288


def test_the_stem_may_change_the_resolution():
    network = stirred(small_dit(image_size=16, stem=(2, 4), resample=(1, 2)))
    assert len(network.position) == 16
    assert network(torch.randn(2, 1, 16, 16), torch.ones(2)).shape == (2, 1, 16, 16)


def test_without_a_stem_patches_are_cut_from_the_image_itself():
    network = small_dit(stem=(), resample=())
    assert {name.split(".")[0] for name, _ in network.named_parameters()}.isdisjoint(
        {"encoder", "decoder", "last"}
    )
    assert network.patchify.in_channels == network.unpatchify.out_channels == 1
    x, c = torch.randn(2, 1, 8, 8), torch.randn(2, 1, 16)
    assert torch.equal(network.raw(x, c), torch.zeros_like(x))  # untrained, as with a stem
    assert stirred(network).raw(x, c).abs().min() > 0


def test_images_of_a_batch_do_not_touch_each_other():
    network = stirred(small_dit()).eval()
    x, sigma = torch.randn(4, 1, 8, 8), torch.tensor([0.1, 1.0, 5.0, 70.0])
    alone = torch.cat([network(x[i : i + 1], sigma[i : i + 1]) for i in range(4)])
    assert torch.allclose(network(x, sigma), alone, atol=1e-5)


def test_noise_level_condition_and_augmentation_bit_all_reach_the_output():
    network = stirred(small_dit(classes=3)).eval()
    x, sigma, cond = torch.randn(2, 1, 8, 8), torch.ones(2), torch.tensor([0, 1])
    base = network(x, sigma, cond)
    assert not torch.allclose(base, network(x, sigma, torch.tensor([0, 2]))[:2])
    assert not torch.allclose(base, network(x, sigma, cond, augmented=torch.tensor([1, 1])))
    assert torch.equal(base, network(x, sigma, cond, augmented=torch.tensor([0, 0])))


def test_a_class_is_its_one_hot_vector_and_no_condition_is_the_null_one():
    network = stirred(small_dit(classes=3)).eval()
    x, sigma = torch.randn(2, 1, 8, 8), torch.ones(2)
    assert torch.equal(
        network(x, sigma, torch.tensor([2, 0])), network(x, sigma, torch.eye(3)[[2, 0]])
    )
    assert torch.equal(network(x, sigma), network(x, sigma, torch.zeros(2, 3)))
    assert not torch.allclose(network(x, sigma), network(x, sigma, torch.tensor([2, 0])))


def test_in_training_a_tenth_of_the_conditions_is_dropped():
    network = stirred(small_dit(cond_dim=5, dropout=0.0))
    vectors = torch.ones(4000, 5)
    dropped = (network.train()._cond_vector(vectors, vectors) != 1).all(1).float().mean()
    assert dropped.item() == pytest.approx(0.1, abs=0.02)
    assert (network.eval()._cond_vector(vectors, vectors) == 1).all()


def test_position_codes_are_sines_and_cosines_of_column_and_row():
    from wherefrom.models.dit import position_code

    code = position_code(3, 16)  # [9, 16]
    column, row, frequency = 2, 1, 10000 ** (-2 / 4)
    patch = code[row * 3 + column]
    assert patch[2].item() == pytest.approx(torch.tensor(column * frequency).sin().item(), abs=1e-6)
    assert patch[8 + 4 + 2].item() == pytest.approx(
        torch.tensor(row * frequency).cos().item(), abs=1e-6
    )


def test_its_weights_outlive_a_move_between_processes():
    # tables of a process are no weights: the same checkpoint fits every process
    assert (
        small_dit(process=wherefrom.DDPM.linear()).state_dict().keys()
        == small_dit().state_dict().keys()
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"classes": 3, "cond_dim": 4}, "not both"),
        ({"image_size": 9}, "image_size 9"),
        ({"heads": 3}, "multiple of heads 3"),
        ({"stem": (2, 2)}, "stem"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(arguments, words):
    with pytest.raises(wherefrom.WherefromError, match=words):
        small_dit(**arguments)


def test_inputs_that_do_not_fit_are_refused():
    x, sigma = torch.randn(2, 1, 8, 8), torch.ones(2)
    with pytest.raises(wherefrom.WherefromError, match="takes images"):
        small_dit()(torch.randn(2, 3, 8, 8), sigma)
    with pytest.raises(wherefrom.WherefromError, match="without a condition"):
        small_dit()(x, sigma, torch.zeros(2, 3))
    with pytest.raises(wherefrom.WherefromError, match="not on class indices"):
        small_dit(cond_dim=3)(x, sigma, torch.tensor([0, 1]))
    with pytest.raises(wherefrom.WherefromError, match=r"\[2, 3\]"):
        small_dit(cond_dim=3)(x, sigma, torch.zeros(2, 4))


@pytest.mark.parametrize(
    ("label", "dtype"), [(3, torch.int64), (-1, torch.int32), (9, torch.uint8)]
)
def test_a_class_that_it_does_not_have_is_refused_by_its_number(label, dtype):
    network, labels = small_dit(classes=3), torch.tensor([0, label], dtype=dtype)
    for use in (
        lambda: network(torch.randn(2, 1, 8, 8), torch.tensor(1.0), labels),
        lambda: network.check_cond(labels),
    ):
        with pytest.raises(
            wherefrom.WherefromError, match=f"there is no class {label}: this DiT has 3"
        ):
            use()


@pytest.mark.parametrize("cond", ["a cat", {"label": torch.tensor([0, 1])}, [0, 1]])
def test_a_condition_that_is_no_tensor_is_refused(cond):
    with pytest.raises(wherefrom.WherefromError, match="takes a tensor as its condition"):
        small_dit(classes=3)(torch.randn(2, 1, 8, 8), torch.tensor(1.0), cond)


def test_weights_of_classes_in_float64_are_those_in_float32():
    network, x = stirred(small_dit(classes=3)).eval(), torch.randn(2, 1, 8, 8)
    weights = torch.tensor([[0.2, 0.3, 0.5], [0.0, 1.0, 0.0]])
    plain = network(x, torch.tensor(1.0), weights)
    assert torch.equal(network(x, torch.tensor(1.0), weights.double()), plain)
