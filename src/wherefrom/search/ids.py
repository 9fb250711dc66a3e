"""Which items a store has: ids are given once, in order, and some are deleted again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from ..errors import WherefromError


class Items(NamedTuple):
    """The items of a store."""

    counts: tuple[int, ...]  # of each shard, deleted ones among them
    deleted: tuple[int, ...]  # ids, ascending
    appended: tuple[tuple[int, str], ...]  # length and fingerprint of each set that came later

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> Self:
        """From what was kept of them."""
        appended = tuple((int(count), str(data)) for count, data in state.get("appended", []))
        return cls(tuple(state["counts"]), tuple(state["deleted"]), appended)

    def state(self) -> dict[str, Any]:
        """As JSON can hold them."""
        later = {"appended": [list(one) for one in self.appended]} if self.appended else {}
        return {"counts": list(self.counts), "deleted": list(self.deleted), **later}

    @property
    def given(self) -> int:
        """How many ids were given so far: 0, 1, ..., those of deleted items among them."""
        return sum(self.counts)

    def alive(self) -> Tensor:
        """Whether each id that was given is still that of an item: [given] bool."""
        alive = torch.ones(self.given, dtype=torch.bool)
        alive[list(self.deleted)] = False
        return alive

    def known(self, ids: Tensor | Iterable[int], kind: str) -> Tensor:
        """Ids as [n] int64, each of an item that is there; `kind`: of what they are."""
        wanted, alive = whole_ids(ids), self.alive()
        outside = wanted[(wanted < 0) | (wanted >= len(alive))]
        if len(outside):
            raise WherefromError(
                f"the {kind} has no item {int(outside[0])}: its ids go from 0 to {len(alive) - 1}"
            )
        gone = wanted[~alive[wanted]]
        if len(gone):
            raise WherefromError(
                f"item {int(gone[0])} was deleted from the {kind} before: `ids` lists those that "
                "are there"
            )
        return wanted


def whole_ids(ids: Tensor | Iterable[int]) -> Tensor:
    """Ids as [n] int64."""
    try:
        wanted = torch.as_tensor(ids if isinstance(ids, Tensor) else list(ids)).flatten().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise WherefromError(
            f"ids are a list of whole numbers, not {ids!r:.40}: `ids` lists those that are there"
        ) from error
    if len(wanted) and (wanted.is_floating_point() or wanted.dtype == torch.bool):
        raise WherefromError(
            f"ids are whole numbers, not {wanted.dtype}: `ids` lists those that are there"
        )
    return wanted.long()
