"""Attribution while generating: the sampler's own evaluations are listened to, so the answer is
there when the image is.

A sampler's states hold its own noise, not the bank's. So what it has made in the end is compared at
the bank's own draws; what the states themselves say is kept step by step, by noise level.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..adapters.following import Evaluation, following
from ..attribution.result import Attribution
from ..attribution.top import both_ends, check_top_k
from ..data.conditions import Cond, cond_form, form_words
from ..data.manner import Manner
from ..diffusion.denoiser import Denoiser
from ..diffusion.draws import Draws
from ..diffusion.streams import Streams, Taps, listening
from ..errors import WherefromError, say

_DRAWS = "searched_draws"


class Searched(Protocol):
    """What a trace asks of the vectors that it compares with; a `Collection` has it."""

    denoiser: Denoiser
    draws: Draws

    @property
    def ids(self) -> Tensor: ...

    @property
    def manner(self) -> Manner: ...

    @property
    def carried(self) -> dict[str, Any]: ...

    def __len__(self) -> int: ...

    def check_unchanged(self) -> None: ...

    def query_vectors(self, x: Tensor, cond: Cond, places: Sequence[int]) -> Tensor: ...

    def nearest(self, vectors: Tensor, top_k: int) -> Attribution: ...

    def overheard(self, m: int, streams: Streams) -> Tensor | None:
        """What activations of a sampler's own evaluation score at draw m, [B, N]; None: nothing
        can be told from them.
        """
        ...


class Step(NamedTuple):
    """Who mattered at one noise level of the sampler."""

    sigma: float
    hits: Attribution


class Moment(NamedTuple):
    """What there is when the sampler leaves a noise level."""

    sigma: float
    # [B, C, H, W]: what the network takes for the images; of a pipeline, its latents, still noisy
    images: Tensor
    hits: Attribution | None  # who mattered at this level, where the sampler's states can tell


Each = Callable[[Moment], None]


class Trace:
    """What was found while generating; `hits` and `by_step` are there once the images are."""

    def __init__(
        self,
        bank: Searched,
        denoiser: Denoiser,
        top_k: int,
        aligned: bool,
        each: Each | None = None,
    ) -> None:
        self.by_step: list[Step] = []  # noisiest first
        self._each = each
        self._forming: Tensor | None = None  # the images as far as they are
        self._bank, self._denoiser, self._top_k, self._aligned = bank, denoiser, top_k, aligned
        self._shape = bank.draws.shape
        self._levels = denoiser.process.noise_level(bank.draws.sigmas).log()  # [M]
        self._last: Tensor | None = None  # what the network was evaluated at last
        self._sigma: float | None = None
        self._level = float("inf")
        self._here: list[Tensor] = []  # cosines [B, N] of the evaluations at the current level
        self._nearest = 0  # the bank's draw of about that level
        self._total: Tensor | None = None  # the sum over levels
        self._made: tuple[Tensor, Cond] | None = None  # the images, or the last estimate of them
        self._hits: Attribution | None = None

    @property
    def hits(self) -> Attribution:
        """The most and the least influential training items of the generated images."""
        if self._hits is None and self._sigma is not None:
            raise WherefromError(
                "no image was finished inside this trace: generate to the end within the "
                "with-block, and look at hits when it is over"
            )
        if self._hits is None:
            raise WherefromError(
                "nothing was generated inside this trace: generate within the with-block, and "
                "look at hits when it is over"
            )
        return self._hits

    @property
    def made(self) -> tuple[Tensor, Cond]:
        """The generated images [B, C, H, W] in the network's space, and their condition: what a
        search can be asked for again.
        """
        if self._made is None:
            raise WherefromError(
                "no image was finished inside this trace: generate to the end within the with-block"
            )
        return self._made

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Inside, every evaluation of the denoiser is followed."""
        taps = Taps(self._denoiser, self._shape)

        def watcher(x_sigma: Tensor, sigma: Tensor, cond: Cond, output: Tensor) -> None:
            streams, taps.streams = taps.streams, []
            self._sampled(x_sigma, sigma, cond, output, streams)

        def made(images: Tensor, cond: Cond) -> None:
            self._made, self._forming = (images, cond), images

        with listening(taps), self._denoiser.watched(watcher, made):
            yield
        self._over()

    @contextmanager
    def generating(self, pipe: Any) -> Iterator[None]:
        """Inside, a pipeline's own evaluations of the network are followed."""

        def seen(evaluation: Evaluation) -> None:
            self._seen(*evaluation)
            self._forming = None if followed.finished is None else followed.finished.latents

        with following(pipe, self._denoiser, self._shape, seen) as followed:
            yield
        made = followed.finished
        if made is not None and followed.whole:
            self._made = made.latents, made.cond
        self._over()
        if self._aligned and made is not None and not followed.whole:
            of_states = "the hits are of its states alone, as with aligned=False"
            say(
                "the generation ended before the scheduler's last step, and what it made still has "
                f"noise: {'there are no hits' if self._hits is None else of_states}"
            )

    def _sampled(
        self, x_sigma: Tensor, sigma: Tensor, cond: Cond, output: Tensor, streams: Streams
    ) -> None:
        if x_sigma is self._last:
            return  # guidance asks again without the condition
        self._last = x_sigma
        if sigma.ndim:
            raise WherefromError(
                "a trace follows wherefrom.sample, where all images have one sigma at a time"
            )
        self._seen(sigma, cond, streams)
        # where a loop of one's own ends without a word, its last step goes here
        self._made = self._denoiser.process.clean(output, x_sigma, sigma), cond
        self._forming = self._made[0]

    def _seen(self, sigma: Tensor, cond: Cond, streams: Streams) -> None:
        """One evaluation of all images at a level."""
        if self._sigma is None and cond_form(cond) != self._bank.manner.cond:
            say(
                f"the images are generated with {form_words(cond_form(cond))}, the bank's items "
                f"have {form_words(self._bank.manner.cond)}: generate with conditions as in "
                "training"
            )
        noise_level = float(self._denoiser.process.noise_level(sigma))
        if noise_level > self._level * (1 + 1e-6):
            raise WherefromError(
                "a trace follows one generation: open another one for the next images"
            )
        if noise_level < self._level * (1 - 1e-6):
            self._close_level()
        self._level, self._sigma = noise_level, float(sigma)
        self._nearest = int((self._levels - torch.tensor(noise_level).log()).abs().argmin())
        found = self._bank.overheard(self._nearest, streams)
        if found is not None:
            self._here.append(found)

    def _over(self) -> None:
        """The generation is over: the images are compared at the bank's own draws; without that,
        their states say who mattered.
        """
        self._close_level()
        if self._aligned and self._made is not None:
            x, cond = self._made
            vectors = self._bank.query_vectors(x, cond, range(len(x)))
            self._hits = self._bank.nearest(vectors, self._top_k)
        elif self._total is not None:
            draws = [draw for step in self.by_step for draw in step.hits.about[_DRAWS]]
            self._hits = self._ranked(self._total / len(self.by_step), draws)

    def _close_level(self) -> None:
        """The evaluations at one level are over: Heun has two at most."""
        if self._sigma is None:
            return
        hits = None
        if self._here:
            scores = torch.stack(self._here).mean(0)
            self._here = []
            self._total = scores if self._total is None else self._total + scores
            hits = self._ranked(scores, [self._nearest])
            self.by_step.append(Step(self._sigma, hits))
        if self._each is not None and self._forming is not None:
            self._each(Moment(self._sigma, self._forming, hits))

    def _ranked(self, scores: Tensor, draws: Sequence[int]) -> Attribution:
        """By the sampler's own states, compared at these draws of the bank."""
        about = {**self._bank.carried, _DRAWS: sorted(set(draws)), "aligned": False}
        return both_ends(scores, self._top_k, self._bank.ids, about)


@contextmanager
def traced(
    bank: Searched, source: Any, top_k: int, aligned: bool, each: Each | None = None
) -> Iterator[Trace]:
    """See `Collection.trace`."""
    check_top_k(top_k, len(bank))  # before anything is generated
    bank.check_unchanged()
    own = bank.denoiser
    if not isinstance(source, Denoiser):
        trace = Trace(bank, own, top_k, aligned, each)
        with trace.generating(source):
            yield trace
        return
    if source.network is not own.network and source.identity() != own.identity():
        raise WherefromError(
            "this denoiser's weights are not those that the bank was made with: trace with the "
            "bank's own model"
        )
    trace = Trace(bank, source, top_k, aligned, each)
    with trace.sampling():
        yield trace
