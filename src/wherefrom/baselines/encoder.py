"""Similarity in the space of an image encoder: CLIP, DINO, the denoiser's own activations, or any
function of an image.

Every training image is embedded once and its unit vector kept; a score is the cosine of two
vectors.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..artefacts.files import fingerprint
from ..attribution.attributor import Attributor, Pieces, read_queries
from ..data.items import Cond, Dataset, batches, cond_rows, item_shape, length, map_cond
from ..data.pretrained import pretrained
from ..diffusion.batches import data_fingerprint
from ..diffusion.denoiser import Denoiser
from ..diffusion.draws import Draws
from ..diffusion.streams import Taps, listening
from ..errors import WherefromError
from ..running.progress import bar
from ..search.rows import Rows
from ..search.shards import Dtype, Manifest

_SCORES = 2**24  # elements of the largest piece of the score matrix that is held
# noised images in one evaluation of the denoiser, so that a single query need not go draw by draw
_TOGETHER = 64

_CLIP = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_DINO_SIZE = 224  # the network takes any; its configuration names the size it was trained at last


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
        self.encode, self.name, self.conditional, self.dtype = encode, name, conditional, dtype
        self._rows: Rows | None = None

    # --- ready-made -------------------------------------------------------------------------------

    @classmethod
    def clip(
        cls,
        model: str | os.PathLike[str] = "openai/clip-vit-base-patch32",
        device: str | torch.device | None = None,
    ) -> Self:
        """CLIP's image embedding, after the projection; images in [-1, 1].

        `model`: a name on the Hugging Face hub, or a folder. `device`: None: a GPU where there is
        one.
        """
        network, (mean, std), _ = _pretrained(model, "CLIP", ("clip",), _CLIP)
        size = int(network.config.vision_config.image_size)
        vision = Vision(network.vision_model, network.visual_projection, size, mean, std)
        return cls(vision.to(device or _device()), f"CLIP {model}")

    @classmethod
    def dino(
        cls,
        model: str | os.PathLike[str] = "facebook/dinov2-base",
        device: str | torch.device | None = None,
    ) -> Self:
        """DINOv2's class token; images in [-1, 1].

        `model`: a name on the Hugging Face hub, or a folder. `device`: None: a GPU where there is
        one.
        """
        network, (mean, std), size = _pretrained(
            model, "DINOv2", ("dinov2", "dinov2_with_registers"), _IMAGENET
        )
        vision = Vision(network, nn.Identity(), size or _DINO_SIZE, mean, std)
        return cls(vision.to(device or _device()), f"DINOv2 {model}")

    @classmethod
    def activations(cls, denoiser: Denoiser, draws: Draws, dtype: Dtype = "float16") -> Self:
        """The denoiser's own activations, averaged over positions: TIDE with nothing learnt, the
        control for it.

        The cosine is the mean cosine over the draws, which query and training images share, as
        TIDE's is.
        """
        return cls(Activations(denoiser, draws), "activations", conditional=True, dtype=dtype)

    # --- as any other attributor ------------------------------------------------------------------

    def fit(
        self, dataset: Dataset, batch_size: int = 64, *, store: str | os.PathLike[str] | None = None
    ) -> Self:
        """Embed a training set, into the folder `store` or into memory; a store that was
        interrupted goes on.
        """
        identity = {} if store is None else self.identity()
        dim = self._dim(dataset, store)
        made_by = {**identity, "dim": dim}
        self._rows = Rows.build(
            dataset, self._embed, dim, made_by, store, batch_size, "embedding", self.dtype
        )
        return self

    def pieces(self, queries: Tensor | Dataset, dataset: Dataset, batch_size: int) -> Pieces:
        """Cosines with the vectors that `fit` kept; images of another data set are embedded as they
        come.
        """
        if batch_size < 1:
            raise WherefromError(f"batch_size must be at least 1, not {batch_size}")
        x, cond = read_queries(queries, item_shape(dataset))
        groups = [slice(start, start + batch_size) for start in range(0, len(x), batch_size)]
        parts = [
            self._embed(x[some], cond_rows(cond, some), range(len(x))[some], "query")
            for some in groups
        ]
        query = torch.cat(parts)  # [Q, d]
        if self._rows is not None and self._rows.data == data_fingerprint(dataset):
            return self._kept(query, self._rows)
        return self._streamed(query, dataset, batch_size)

    def _kept(self, query: Tensor, rows: Rows) -> Pieces:
        if query.shape[1] != rows.dim:
            raise WherefromError(
                f"queries have embeddings of {query.shape[1]} numbers and the store of {rows.dim}: "
                "give the encoder that it was made with, or choose another store"
            )
        columns = max(1, _SCORES // len(query))
        for first, block in rows.blocks(query.device):
            for start in range(0, len(block), columns):
                yield first + start, query @ block[start : start + columns].T

    def _streamed(self, query: Tensor, dataset: Dataset, batch_size: int) -> Pieces:
        start = 0
        with bar(length(dataset), "embedding", "image") as progress:
            for x, cond in batches(dataset, batch_size):
                yield start, query @ self._embed(x, cond, range(start, start + len(x))).T
                start += len(x)
                progress.update(len(x))

    @property
    def about(self) -> dict[str, Any]:
        """The method and its encoder."""
        return {
            "method": "Encoder",
            "encoder": self.name or getattr(self.encode, "__name__", type(self.encode).__name__),
        }

    def identity(self) -> dict[str, Any]:
        """What the vectors depend on."""
        if isinstance(self.encode, Activations):
            return self.encode.identity()
        if isinstance(self.encode, nn.Module):
            layers, weights = (
                fingerprint(repr(self.encode)),
                fingerprint(dict(self.encode.state_dict())),
            )
            return {"encoder": type(self.encode).__name__, "layers": layers, "weights": weights}
        if self.name is None:
            raise WherefromError(
                f"a store cannot tell {self.about['encoder']!r} from other encoders: name it, "
                "Encoder(encode, name=...)"
            )
        return {"encoder": self.name}

    # --- embeddings -------------------------------------------------------------------------------

    def _dim(self, dataset: Dataset, store: str | os.PathLike[str] | None) -> int:
        """How long a vector is: as a finished store says, which needs no encoder, or else as the
        first image's.
        """
        if store is not None and (Path(store) / "bank.json").exists():
            manifest = Manifest.load(Path(store))
            if manifest.given == manifest.images:
                return manifest.dim
        x, cond = next(batches(dataset, 1))
        return self._embed(x, cond, range(1)).shape[1]

    @torch.no_grad()
    def _embed(self, x: Tensor, cond: Cond, places: range, what: str = "item") -> Tensor:
        """Unit vectors [B, d] of images at these places, float32, where the encoder made them."""
        with _evaluating(self.encode) as like:
            if like is not None:
                x, cond = x.to(like), map_cond(cond, lambda value: value.to(like.device))
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
def _evaluating(encode: Callable[..., Tensor]) -> Iterator[Tensor | None]:
    """Inside, a module is in evaluation mode; yields a tensor whose device and type its images
    should have, if it has any.
    """
    if not isinstance(encode, nn.Module):
        yield None
        return
    modes = [(module, module.training) for module in encode.modules()]
    try:
        for module, _ in modes:
            module.training = False
        yield next((weight for weight in encode.parameters() if weight.is_floating_point()), None)
    finally:
        for module, mode in modes:
            module.training = mode


class Activations:
    """`activations(x, cond)`: the mean-pooled streams of the denoiser's blocks, a unit vector for
    each draw, [B, M * w].
    """

    def __init__(self, denoiser: Denoiser, draws: Draws) -> None:
        self.denoiser, self.draws = denoiser, draws
        self._taps = Taps(denoiser)

    def __call__(self, x: Tensor, cond: Cond = None) -> Tensor:
        if tuple(x.shape[1:]) != self.draws.shape:
            raise WherefromError(
                f"the images have shape {tuple(x.shape[1:])}, the draws {self.draws.shape}: "
                "they must be alike"
            )
        like = next(self.denoiser.network.parameters())
        x, cond = x.to(like), map_cond(cond, lambda value: value.to(like.device))
        parts = []
        with torch.no_grad(), self.denoiser.frozen():
            for some in torch.arange(len(self.draws)).split(max(1, _TOGETHER // len(x))):
                vectors = self._at(x, cond, some)  # [draws * B, w]
                parts.append(F.normalize(vectors, dim=1).unflatten(0, (len(some), len(x))))
        return torch.cat(parts).transpose(0, 1).flatten(1)

    def _at(self, x: Tensor, cond: Cond, draws: Tensor) -> Tensor:
        """The pooled streams at some draws, all images at the first, all at the second, ..."""
        item, draw = (
            torch.arange(len(x)).repeat(len(draws)).to(x.device),
            draws.repeat_interleave(len(x)),
        )
        sigma, noise = self.draws.sigmas[draw], self.draws.noises[draw].to(x)
        x_sigma = self.denoiser.process.add_noise(x[item], sigma, noise)
        with (
            torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda),
            listening(self._taps) as streams,
        ):  # as TIDE does
            self.denoiser(x_sigma, sigma, map_cond(cond, lambda value: value[item]))
        return torch.cat(
            [
                stream.mean(1) if stream.ndim == 3 else stream.flatten(2).mean(2)
                for stream in streams
            ],
            1,
        )

    def identity(self) -> dict[str, Any]:
        """What the activations depend on."""
        draws, blocks = (
            fingerprint(self.draws.sigmas, self.draws.noises),
            list(self.denoiser.blocks),
        )
        return {
            "encoder": "activations",
            **self.denoiser.identity(),
            "draws": draws,
            "blocks": blocks,
        }


# --- pretrained networks --------------------------------------------------------------------------


class Vision(nn.Module):
    """A pretrained image encoder behind the preprocessing that it expects; forward(x) takes images
    in [-1, 1].

    Args:
        trunk: a vision model of transformers.
        head: what its pooled output goes through.
        size: of the images it gets, in pixels.
        mean, std: of the colours it was trained on, images being in [0, 1].
    """

    def __init__(
        self,
        trunk: nn.Module,
        head: nn.Module,
        size: int,
        mean: Sequence[float],
        std: Sequence[float],
    ) -> None:
        super().__init__()
        self.trunk, self.head, self.size = trunk, head, size
        self.mean, self.std = (
            nn.Buffer(torch.tensor(colour).view(3, 1, 1)) for colour in (mean, std)
        )
        self.eval().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] not in (1, 3):
            raise WherefromError(
                f"CLIP and DINO take grey or colour images, of 1 or 3 channels, not of {x.shape[1]}"
            )
        x = (x / 2 + 0.5).clamp(0, 1).expand(-1, 3, -1, -1)
        x = F.interpolate(x, (self.size, self.size), mode="bicubic", antialias=True).clamp(
            0, 1
        )  # bicubic overshoots
        vectors: Tensor = self.head(
            self.trunk(pixel_values=(x - self.mean) / self.std).pooler_output
        )
        return vectors

    def extra_repr(self) -> str:
        return f"size={self.size}"


Colours = tuple[Sequence[float], Sequence[float]]  # mean and standard deviation of the channels


def _pretrained(
    model: str | os.PathLike[str], what: str, kinds: tuple[str, ...], published: Colours
) -> tuple[Any, Colours, int | None]:
    """A network of transformers in float32, the colours it expects, and the image size that its
    preprocessor names, if any.
    """
    network, prepared = pretrained(model, what, kinds, _preprocessor)
    colours = prepared.get("image_mean", published[0]), prepared.get("image_std", published[1])
    return network, colours, _size(prepared)


def _preprocessor(transformers: Any, place: str) -> dict[str, Any]:
    """What a model says of its preprocessing; nothing, if it does not."""
    path = transformers.utils.cached_file(
        place, "preprocessor_config.json", _raise_exceptions_for_missing_entries=False
    )
    return {} if path is None else json.loads(Path(path).read_text())


def _size(prepared: Mapping[str, Any]) -> int | None:
    """The side of the square image that a preprocessor ends with; older ones hold a number, newer
    ones its name too.
    """
    size = prepared.get("crop_size" if prepared.get("do_center_crop", True) else "size")
    if isinstance(size, Mapping):
        size = size.get("height", size.get("shortest_edge"))
    return None if size is None else int(size)


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
