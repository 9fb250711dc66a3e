"""What an evaluation retrains: a network, its data, and how it is trained and sampled; from a
preset, or one's own.

Every random number is a function of a seed, so a run with other images left out shares all others
with the full one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..artefacts.architecture import network_identity
from ..artefacts.identity import fingerprint
from ..data.fingerprint import data_fingerprint
from ..data.items import Cond, Dataset, item_shape, length, map_cond, several, split, stack_conds
from ..diffusion.calling import Call, call_identity
from ..diffusion.denoiser import Denoiser
from ..diffusion.process import Process
from ..diffusion.run import Settings
from ..diffusion.sampling import sample
from ..diffusion.seeds import seed_of
from ..diffusion.together import train_together
from ..diffusion.training import train
from ..errors import WherefromError, number, whole
from ..models.presets import Preset
from ..running.progress import quiet

_SAMPLED = 256  # images generated together


@dataclass(frozen=True)
class Setup:
    """A model to be trained, again and again.

    Args:
        network: makes the untrained network of a seed, where it is to be trained.
        process: what it predicts.
        dataset: the training images.
        training: arguments of `wherefrom.train`: steps, batch_size, lr and any other.
        sampling_steps, guidance: of `wherefrom.sample`.
        conditions: a data set whose items' conditions the queries are generated with; None:
            without.
        call: `call(network, x_sigma, sigma, cond)` adapts any signature.
    """

    network: Callable[[int], nn.Module]
    process: Process
    dataset: Dataset
    training: Mapping[str, Any]
    sampling_steps: int = 32
    guidance: float = 1.0
    conditions: Dataset | None = None
    call: Call | None = None

    def __post_init__(self) -> None:
        whole("sampling_steps", self.sampling_steps, 1)
        number("guidance", self.guidance)
        missing = [name for name in ("steps", "batch_size", "lr") if name not in self.training]
        if missing:
            raise WherefromError(
                f"training says no {' and no '.join(missing)}: give the arguments that "
                "wherefrom.train needs"
            )

    @classmethod
    def of(
        cls,
        preset: Preset,
        dataset: Dataset,
        device: str | torch.device | None = None,
        conditions: Dataset | None = None,
        **changes: Any,
    ) -> Setup:
        """A preset on a data set; `device`: None: a GPU where there is one; `changes`: arguments of
        `wherefrom.train`.
        """
        place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        return cls(
            lambda seed: preset.network(seed).to(place),
            preset.network().process,
            dataset,
            {**preset.training, **changes},
            preset.sampling_steps,
            preset.guidance,
            conditions,
        )

    def denoiser(self, network: nn.Module) -> Denoiser:
        """The model that a trained network is."""
        return Denoiser(network, self.process, self.call)

    def trained(self, seed: int, store: str | os.PathLike[str]) -> nn.Module:
        """The network that saw all images."""
        return train(
            self.network(seed),
            self.process,
            self.dataset,
            seed=seed,
            store=store,
            call=self.call,
            **self.training,
        )

    def retrained(
        self,
        seed: int,
        keeps: Sequence[Tensor],
        store: str | os.PathLike[str],
        coupled: bool,
        together: bool,
    ) -> list[nn.Module]:
        """The networks that saw only some images, [K] indices each, trained as one batched network
        or one after the other.
        """
        network, how = self.network(seed), {**self.training, "seed": seed, "coupled": coupled}
        compile = how.pop("compile", None)
        if together and len(keeps) > 1:
            run, called = Settings(**how), {"call": self.call, "compile": compile}
            return train_together(network, self.process, self.dataset, keeps, run, store, **called)
        how |= {"call": self.call, "compile": compile}
        stores = [Path(store) / fingerprint(keep) for keep in keeps]
        return [
            train(network, self.process, self.dataset, keep=keep, store=place, **how)
            for keep, place in zip(keeps, stores, strict=True)
        ]

    def step_bytes(self) -> int:
        """Bytes that training takes on a GPU, by a step that is made, eagerly; what it made is
        forgotten.
        """
        network = self.network(0)
        device = next(network.parameters()).device
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        how = {**self.training, "steps": 1, "warmup": 0, "decay": 0, "compile": False}
        with quiet():
            train(network, self.process, self.dataset, call=self.call, **how)
        return torch.cuda.max_memory_allocated(device) - before

    def noise(self, seed: int, count: int) -> Tensor:
        """The initial noise of a seed's queries, [count, C, H, W]; the first ones are the same
        whatever the count.
        """
        shape = item_shape(self.dataset)
        generators = [
            torch.Generator().manual_seed(seed_of(seed, "query", index)) for index in range(count)
        ]
        return torch.stack([torch.randn(shape, generator=generator) for generator in generators])

    def query_conditions(self, seed: int, count: int) -> Cond:
        """The conditions of a seed's queries: those of items chosen at random."""
        if self.conditions is None:
            return None
        available = length(self.conditions)
        if count > available:
            raise WherefromError(
                f"{count} queries need as many conditions, and there are {available}: ask for "
                "fewer queries"
            )
        chosen = torch.randperm(
            available, generator=torch.Generator().manual_seed(seed_of(seed, "conditions", 0))
        )[:count]
        places = chosen.tolist()
        items = several(self.conditions, places)
        return stack_conds([split(item)[1] for item in items], places)

    def generated(self, network: nn.Module, seed: int, count: int) -> Tensor:
        """What a network makes of a seed's noise, [count, C, H, W] on the CPU."""
        denoiser = self.denoiser(network)
        noise = self.noise(seed, count)
        cond = self.query_conditions(seed, count)
        parts = []
        for start in range(0, count, _SAMPLED):
            some = slice(start, start + _SAMPLED)
            here = map_cond(cond, lambda value, some=some: value[some].to(denoiser.device))  # type: ignore[misc]
            made = sample(
                denoiser, noise[some].to(denoiser.device), here, self.sampling_steps, self.guidance
            )
            parts.append(made.cpu())
        return torch.cat(parts)

    def identity(self) -> dict[str, Any]:
        """What every result depends on, as JSON can hold it."""
        plain = {name: value for name, value in self.training.items() if name != "compile"}
        return {
            "process": fingerprint(self.process),
            "data": data_fingerprint(self.dataset),
            "images": length(self.dataset),
            "conditions": None if self.conditions is None else data_fingerprint(self.conditions),
            **network_identity(self.network(0)),
            "call": call_identity(self.call),
            **plain,
            "sampling_steps": self.sampling_steps,
            "guidance": self.guidance,
        }
