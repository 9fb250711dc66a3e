"""Similarity in the space of an image encoder: CLIP, DINO, the denoiser's own activations, or any
function of an image.

Every training image is embedded once and its unit vector kept; a score is the cosine of two
vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Self, get_args

import torch
from torch import Tensor, nn

from ..artefacts.architecture import network_identity
from ..artefacts.artefact import Artefact, Folder, there
from ..attribution.attributor import Attributor, Chunks, Halved, check_same_data, read_queries
from ..data.batch import for_network
from ..data.items import (
    Cond,
    Dataset,
    batches,
    check_batch_size,
    cond_rows,
    item_shape,
    length,
)
from ..data.manner import Manner, say_misfit
from ..diffusion.denoiser import Denoiser
from ..diffusion.draws import Draws
from ..diffusion.pulse import Pulse, noting
from ..errors import WherefromError, flag
from ..running.progress import bar
from ..search.store import VectorStore
from ..search.vectors import Dtype
from .activations import Activations
from .vision import clip, dino

_SCORES = 2**24  # elements of the largest chunk of the score matrix that is held
_KIND = "table of embeddings"


class Encoder(Attributor):
    """Ranks by the cosine of embeddings.

    Args:
        encode: x [B, C, H, W], in the model's own range, to embeddings [B, d]. A module is
            evaluated where its weights are and in evaluation mode; any other callable gets images
            as the data set has them.
        name: what to call it; a store needs one to tell encoders apart that are no modules.
        conditional: whether it is called encode(x, cond), with the items' condition.
        dtype: in which vectors are kept.
    """

    def __init__(
        self,
        encode: Callable[..., Tensor],
        name: str | None = None,
        *,
        conditional: bool = False,
        dtype: Dtype = "float32",
    ) -> None:
        if not callable(encode):
            raise WherefromError(
                "an encoder is a callable that makes [B, d] of images [B, C, H, W], not "
                f"{type(encode).__name__}"
            )
        if dtype not in get_args(Dtype):
            raise WherefromError(f"dtype is {dtype!r}; choose one of {', '.join(get_args(Dtype))}")
        self.encode, self.name, self.dtype = encode, name, dtype
        self.conditional = flag("conditional", conditional)
        self._store: VectorStore | None = None
        self._pulse: Pulse | None = None  # of the network that the vectors come from
        self._noted = False  # whether what it notes in a pass was looked at

    # --- ready-made -------------------------------------------------------------------------------

    @classmethod
    def clip(
        cls,
        model: Folder = "openai/clip-vit-base-patch32",
        device: str | torch.device | None = None,
    ) -> Self:
        """CLIP's image embedding, after the projection; images in [-1, 1].

        `model`: a name on the Hugging Face hub, or a folder. `device`: None: a GPU where there is
        one.
        """
        return cls(clip(model).to(device or _device()), f"CLIP {model}")

    @classmethod
    def dino(
        cls,
        model: Folder = "facebook/dinov2-base",
        device: str | torch.device | None = None,
    ) -> Self:
        """DINOv2's class token; images in [-1, 1].

        `model`: a name on the Hugging Face hub, or a folder. `device`: None: a GPU where there is
        one.
        """
        return cls(dino(model).to(device or _device()), f"DINOv2 {model}")

    @classmethod
    def activations(cls, denoiser: Denoiser, draws: Draws, dtype: Dtype = "float16") -> Self:
        """The denoiser's own activations, averaged over positions: TIDE with nothing learnt, the
        control for it.

        The cosine is the mean cosine over the draws, which query and training images share, as
        TIDE's is.
        """
        return cls(Activations(denoiser, draws), "activations", conditional=True, dtype=dtype)

    # --- as any other attributor ------------------------------------------------------------------

    def fit(self, dataset: Dataset, batch_size: int = 64, *, store: Folder | None = None) -> Self:
        """Embed a training set, into the folder `store` or into memory; a store that was
        interrupted goes on.
        """
        encode = self.encode
        network = encode.denoiser.network if isinstance(encode, Activations) else encode
        pulse = None
        if isinstance(network, nn.Module):
            pulse = Pulse(network, f"{self._name} was fitted", "fit it again")
        dim = self._dim(dataset, store)
        identity = {**({} if store is None else self.identity()), "dim": dim}
        kept = VectorStore.build(
            _KIND,
            dataset,
            lambda x, cond, places: self._embed(x, cond, places)[:, None],
            dim,
            identity,
            store,
            dtype=self.dtype,
            batch_size=batch_size,
            label="embedding",
        )
        # a shard's vectors are not all of them
        self._store = None if kept.given < kept.images else kept
        self._pulse = pulse
        return self

    def chunks(self, queries: Tensor | Dataset, dataset: Dataset, batch_size: int) -> Chunks:
        """Cosines with the vectors that `fit` kept; before any fit, images are embedded as they
        come.
        """
        found = self.part(queries, dataset, batch_size, range(length(dataset)))
        return ((start, scores) for start, scores, _ in found)

    def part(
        self, queries: Tensor | Dataset, dataset: Dataset, batch_size: int, of: range
    ) -> Halved:
        """`chunks` of some items, or of the shards that begin among them."""
        check_batch_size(batch_size)
        if self._store is not None:
            check_same_data(self._name, self._store.data, dataset)
        if self._pulse is not None:
            self._pulse.check()
        x, cond = read_queries(queries, item_shape(dataset))
        training = Manner.of_dataset(dataset) if self._store is None else self._store.manner
        say_misfit(Manner.of(x, cond), training, self.conditional)
        groups = [slice(start, start + batch_size) for start in range(0, len(x), batch_size)]
        parts = [
            self._embed(x[some], cond_rows(cond, some), range(len(x))[some], "query")
            for some in groups
        ]
        query = torch.cat(parts)  # [Q, d]
        if self._store is not None:
            found = self._kept(query, self._store, of)
        else:
            found = self._streamed(query, dataset, batch_size, of)
        for start, scores in found:
            yield start, scores, None

    def _kept(self, query: Tensor, store: VectorStore, of: range) -> Chunks:
        if query.shape[1] != store.dim:
            raise WherefromError(
                f"queries have embeddings of {query.shape[1]} numbers and the store of "
                f"{store.dim}: give the encoder that it was made with, or choose another folder"
            )
        columns = max(1, _SCORES // len(query))
        for first, rows in store.rows(of):
            here = rows.to(query.device)
            for start in range(0, len(here), columns):
                yield first + start, query @ here[start : start + columns].T

    def _streamed(self, query: Tensor, dataset: Dataset, batch_size: int, of: range) -> Chunks:
        start = of.start
        with bar(len(of), "embedding", "image") as progress:
            for x, cond in batches(dataset, batch_size, of=of):
                yield start, query @ self._embed(x, cond, range(start, start + len(x))).T
                start += len(x)
                progress.update(len(x))

    @property
    def about(self) -> dict[str, Any]:
        """The method, its encoder and every setting that changes a number."""
        how: dict[str, Any] = {}
        if isinstance(self.encode, Activations):
            how = self.encode.about
        elif isinstance(self.encode, nn.Module):
            how = network_identity(self.encode)
        kept = {"conditional": self.conditional, "dtype": self.dtype}
        return {"method": "Encoder", "encoder": self._name, **kept, **how}

    @property
    def _name(self) -> str:
        return str(self.name or getattr(self.encode, "__name__", type(self.encode).__name__))

    def identity(self) -> dict[str, Any]:
        """What the vectors depend on."""
        if isinstance(self.encode, Activations):
            return self.encode.identity()
        if isinstance(self.encode, nn.Module):
            return {**network_identity(self.encode), "conditional": self.conditional}
        if self.name is None:
            raise WherefromError(
                f"a store cannot tell {self._name!r} from other encoders: name it, "
                "Encoder(encode, name=...)"
            )
        return {"encoder": self.name, "conditional": self.conditional}

    # --- embeddings -------------------------------------------------------------------------------

    def _dim(self, dataset: Dataset, store: Folder | None) -> int:
        """How long a vector is: as a finished store says, which needs no encoder, or else as the
        first image's.
        """
        if store is not None and there(store):
            kept = VectorStore(Artefact.open(store, _KIND))
            if kept.given == kept.images:
                return kept.dim
        x, cond = next(batches(dataset, 1))
        return self._embed(x, cond, range(1)).shape[1]

    @torch.no_grad()
    def _embed(self, x: Tensor, cond: Cond, places: Sequence[int], what: str = "item") -> Tensor:
        """Unit vectors [B, d] of images at these places, float32, where the encoder made them."""
        noted: AbstractContextManager[None] = nullcontext()
        if isinstance(self.encode, nn.Module) and not self._noted:
            noted = noting(self.encode)
        self._noted = True
        with _evaluating(self.encode), noted:
            if isinstance(self.encode, nn.Module):
                x, cond = for_network(self.encode, x, cond)
            vectors = self.encode(x, cond) if self.conditional else self.encode(x)
        if not isinstance(vectors, Tensor) or vectors.ndim != 2 or len(vectors) != len(x):
            found = tuple(vectors.shape) if isinstance(vectors, Tensor) else type(vectors).__name__
            raise WherefromError(
                f"the encoder made {found} of {tuple(x.shape)}: it must make one vector for "
                "each image, [B, d]"
            )
        vectors = vectors.float()
        norms = vectors.norm(dim=1, keepdim=True)
        finite = torch.isfinite(norms).flatten()
        if not bool(finite.all()):
            bad = places[int((~finite).nonzero()[0])]
            raise WherefromError(
                f"the embedding of {what} {bad} is not finite: look at that image and at the "
                "encoder"
            )
        return vectors / norms.clamp(min=torch.finfo(torch.float32).tiny)


@contextmanager
def _evaluating(encode: Callable[..., Tensor]) -> Iterator[None]:
    """Inside, a module is in evaluation mode."""
    if not isinstance(encode, nn.Module):
        yield
        return
    modes = [(module, module.training) for module in encode.modules()]
    try:
        for module, _ in modes:
            module.training = False
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
