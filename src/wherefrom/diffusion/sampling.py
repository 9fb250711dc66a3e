"""Sampling: from noise to images along the probability-flow ODE, deterministic from the given
noise.

One solver serves every process: a step recombines the predicted clean image and the predicted noise
at the next level, which is DDIM for DDPM and v-prediction and Euler for EDM and flow matching; Heun
averages the predictions at both ends of the step.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from ..data.batch import check_cond_rows
from ..data.items import Cond
from ..errors import WherefromError, number, whole
from ..running.progress import bar
from .calling import call_plainly
from .denoiser import Denoiser, check_denoiser
from .process import Process, Solver


@torch.no_grad()
def sample(
    denoiser: Denoiser,
    noise: Tensor,
    cond: Cond = None,
    steps: int = 32,
    guidance: float = 1.0,
    *,
    null: Cond = None,
    solver: Solver | None = None,
) -> Tensor:
    """Images [B, C, H, W] from unit-variance noise of the same shape.

    Args:
        denoiser: the model.
        noise: where to start; the same noise gives the same images.
        cond: the condition of each image.
        steps: noise levels of the process's own grid; Heun evaluates the network 2 * steps - 1
            times.
        guidance: classifier-free guidance: g * output(cond) + (1 - g) * output(null); 1 leaves it
            out.
        null: the condition that stands for none, where that is not None.
        solver: "heun" or "euler"; None: Heun for EDM and flow matching, Euler (which is DDIM) for
            DDPM and v-prediction.
    """
    check_denoiser(denoiser)
    process = denoiser.process
    solver = solver or process.solver
    if solver not in ("heun", "euler"):
        raise WherefromError(f"there is no solver {solver!r}: choose heun or euler")
    steps, guidance = whole("steps", steps, 1), number("guidance", guidance)
    if guidance != 1 and cond is None:
        raise WherefromError(
            f"guidance {guidance:g} needs a condition to guide towards: give cond, or guidance=1"
        )
    _check_noise(denoiser, noise)
    check_cond_rows(cond, len(noise), "cond")
    check_cond_rows(null, len(noise), "null")
    cond, null = (denoiser.placed(noise, one)[1] for one in (cond, null))

    def predict(x: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
        output = denoiser(x, sigma, cond)
        if guidance != 1:
            output = guidance * output + (1 - guidance) * denoiser(x, sigma, null)
        return process.clean(output, x, sigma), -_nu(process, sigma) * process.score(
            output, x, sigma
        )

    grid = process.grid(steps)
    with denoiser.frozen(), bar(steps, "sampling", delay=2) as progress:
        x = _nu(process, grid[0]) * noise
        for step in range(steps):
            sigma = grid[step]
            with nullcontext() if step else _taken(denoiser, noise, cond):
                clean, predicted = predict(x, sigma)
            if step + 1 == steps:
                progress.update()
                denoiser.finished(clean, cond)
                return clean  # the last step goes to the image itself, where mu = 1 and nu = 0
            following = grid[step + 1]
            mu, nu = (
                float(coefficient(following) - coefficient(sigma))
                for coefficient in (process.mu, process.nu)
            )
            end = x + mu * clean + nu * predicted
            if solver == "heun":
                clean2, predicted2 = predict(end, following)
                end = x + mu * (clean + clean2) / 2 + nu * (predicted + predicted2) / 2
            x = end
            progress.update()
    raise AssertionError("a grid has at least one level")


def _check_noise(denoiser: Denoiser, noise: Tensor) -> None:
    """Refuse what is no noise for this network."""
    if not isinstance(noise, Tensor):
        raise WherefromError(
            f"noise is a tensor [B, C, H, W], not {type(noise).__name__}: make it with torch.randn"
        )
    if noise.ndim < 2 or len(noise) == 0:
        raise WherefromError(
            f"noise is [B, C, H, W] with at least one image, not {tuple(noise.shape)}"
        )
    own = next((p.dtype for p in denoiser.network.parameters() if p.is_floating_point()), None)
    half = noise.dtype in (torch.float16, torch.bfloat16)
    # a call of one's own may take what the network alone would not
    adapted = denoiser.call is not call_plainly and not half
    if not noise.is_floating_point() or (noise.dtype != own and own is not None and not adapted):
        raise WherefromError(
            f"the noise is of {noise.dtype}, the network of {own}: make noise of that type"
        )
    if not bool(torch.isfinite(noise).all()):
        raise WherefromError("the noise holds NaN or infinity")


@contextmanager
def _taken(denoiser: Denoiser, noise: Tensor, cond: Cond) -> Iterator[None]:
    """Inside, what the network cannot take is said of the noise and the condition given."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        why = str(error).split("\n")[0]
        if not re.search("size|shape|dtype|channels|dimension", why):
            raise  # nothing that was given is at fault
        given = f"noise of shape {tuple(noise.shape)}"
        given += "" if cond is None else " with this condition"
        raise WherefromError(
            f"{type(denoiser.network).__name__} does not take {given} ({why}): give both as in "
            "training"
        ) from error


def _nu(process: Process, sigma: Tensor) -> float:
    return float(process.nu(sigma))
