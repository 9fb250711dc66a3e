"""Pictures and captions as a latent diffusion model sees them: encoded once, kept in a folder, read
item by item from there.

Work that is killed at any moment goes on where it was. Every different caption is encoded and kept
once, however many pictures have it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from torch import Tensor

from ..artefacts.artefact import Artefact, Folder
from ..artefacts.identity import fingerprint
from ..artefacts.parts import PartFolders
from ..data.described import Described, LazyColumn
from ..data.fingerprint import data_fingerprint
from ..data.items import Dataset, check_batch_size, length
from ..data.pictures import Again
from ..data.sidecars import Captions, check_captions
from ..errors import WherefromError
from ..running.ranks import Share, share
from .encoding import CONDITIONS, KEY, LATENTS, ONE, Encoder, Work, files_of, shard_name

_KIND = "encoded data set"


class Encoded:
    """A data set of latents, or of pairs (latent, condition); `encoded` makes one.

    Conditions of one caption share their memory: they are for reading.

    Attributes:
        source: the pictures.
        captions: of each of them; None where there are none.
        part: the shard that has encoded its part, where others' are to be joined with it before
            there are items; None: all are there.
    """

    def __init__(
        self,
        source: Dataset,
        captions: Captions | None,
        artefact: Artefact,
        part: Share | None = None,
    ) -> None:
        self.source, self.captions, self.part = source, captions, part
        self._artefact = artefact
        # of each picture, where its caption is among the different ones
        different = {caption: row for row, caption in enumerate(_different(captions))}
        self._rows = [different[caption] for caption in captions or ()]
        self._ends = {
            what: list(accumulate(artefact.state.get(what, ()))) for what in (LATENTS, CONDITIONS)
        }

    @property
    def names(self) -> Sequence[str]:
        """What each item is called: its file, below the folder that was given, or its place."""
        source = self.source.source if isinstance(self.source, Again) else self.source
        if isinstance(source, Described):
            return LazyColumn(len(source), source.name_of)
        root, files = getattr(self.source, "root", None), files_of(self.source)
        if files is None:
            return [str(index) for index in range(len(self))]
        return [_below(file, root, index) for index, file in enumerate(files)]

    def __repr__(self) -> str:
        kept = self._artefact.folder or "in memory"
        if self.part is not None:
            return f"Encoded(the part {self.part.name} of {len(self.source)} items, {kept})"
        shape = tuple(self._read(LATENTS, 0)[LATENTS].shape)
        return f"Encoded({len(self)} items of {shape}, {kept})"

    def check_whole(self) -> None:
        """Refuse what a shard has made before it is joined with the others' parts."""
        if self.part is not None:
            raise WherefromError(
                f"shard {self.part.rank} of {self.part.world} has encoded its pictures in "
                f"{self._artefact.folder}: when all shards have, run it once more without a shard"
            )

    def __len__(self) -> int:
        self.check_whole()
        return self._ends[LATENTS][-1]

    def __getitem__(self, index: int) -> Any:
        index = range(len(self))[index]  # counts negative indices from the end, ends an iteration
        latent = self._read(LATENTS, index)[LATENTS].clone()
        if self.captions is None:
            return latent
        kept = self._read(CONDITIONS, self._rows[index])
        if ONE in kept:
            return latent, kept[ONE]
        return latent, {name.removeprefix(KEY): value for name, value in kept.items()}

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        return [self[index] for index in indices]

    def _read(self, what: str, row: int) -> dict[str, Tensor]:
        number = bisect_right(self._ends[what], row)
        first = self._ends[what][number - 1] if number else 0
        kept = self._artefact.read(shard_name(what, number))
        return {name: tensor[row - first] for name, tensor in kept.items()}

    def fingerprint(self) -> str:
        """What all items are: the pictures, the captions and the encoder; nothing is read."""
        return fingerprint(self._artefact.identity)

    def __getstate__(self) -> dict[str, Any]:
        """A copy sent to another process carries the folder's name, not what it holds."""
        self.check_whole()
        folder = self._artefact.folder
        if folder is None:
            return self.__dict__
        return {**self.__dict__, "_artefact": (folder, self._artefact.identity)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if isinstance(state["_artefact"], tuple):
            folder, identity = state["_artefact"]
            self._artefact = Artefact.open(folder, _KIND)
            self._artefact.check(identity, "data set")


def encoded(
    source: Dataset,
    captions: Captions | None,
    encoder: Encoder,
    folder: Folder | None = None,
    batch_size: int = 16,
) -> Encoded:
    """Encode pictures and captions, or go on with what a folder holds of them, or read it.

    Into a folder, the processes of a group encode a part each, and all get the whole; a shard
    encodes its part, and gives items once all are there.

    Args:
        source: the pictures, [3, H, W] in [-1, 1].
        captions: one for each, or class indices; None: items are latents alone.
        encoder: what encodes them.
        folder: where to keep them, in files of up to 64 MiB; one that was made of other pictures,
            captions or with another encoder is refused. None: in memory.
        batch_size: pictures, or captions, that are encoded at once; work that goes on keeps the one
            that it began with.
    """
    batch_size, count = check_batch_size(batch_size), length(source)
    root = getattr(source, "root", None)
    if folder is not None and root is not None and Path(folder).resolve() == Path(root).resolve():
        raise WherefromError(
            f"{folder} is the folder of the pictures: choose another to keep them in"
        )
    known = None if captions is None else check_captions(captions, count)
    identity = {
        "pictures": data_fingerprint(source),
        "images": count,
        "captions": None if known is None else fingerprint(known),
        **{f"{name} of the encoder": value for name, value in encoder.identity().items()},
    }
    artefact = Artefact.claim(folder, _KIND, identity)
    work = Work(artefact, source, _different(known), encoder, batch_size)
    if work.done:
        PartFolders(artefact).clear_late()
    else:
        work.go_on()
    return Encoded(source, known, work.artefact, None if work.done else share())


def _different(captions: Captions | None) -> list[Any]:
    """The different captions, in the order of their first pictures."""
    return list(dict.fromkeys(captions or ()))


def _below(file: Any, root: Path | None, index: int) -> str:
    if not isinstance(file, str | Path):
        return str(index)
    path = Path(file)
    return path.relative_to(root).as_posix() if root and path.is_relative_to(root) else str(path)
