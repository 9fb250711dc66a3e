"""What a query gets back: its most and its least influential training items, as numbers and as
what people read: a page, a table, a sheet of pictures.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch

from .ends import Ends
from .page import Page
from .pictures import Metadata
from .sheet import draw_sheet
from .told import Told, save_csv, save_told

_FIRST = 3  # queries, and hits of each, that are shown in brief
_PATH = str | os.PathLike[str]


class Attribution(Ends):
    """Per query the most and the least influential training items; see `Ends` for its numbers.

    Where a data set is asked for, it is the one that was attributed to, in the same order; items
    that were appended to an index come after it (torch's ConcatDataset). `Pictures` do as well.
    """

    def __repr__(self) -> str:
        method, (queries, k) = self.about.get("method", "some method"), self.indices.shape
        rows = [
            f"{query}: {', '.join(map(str, row[:_FIRST]))}{', ...' if k > _FIRST else ''}"
            for query, row in enumerate(self.indices[:_FIRST].tolist())
        ]
        more = "; ..." if queries > _FIRST else ""
        count = "1 query" if queries == 1 else f"{queries} queries"
        return f"<Attribution of {count} by {method}, top {k}; {'; '.join(rows)}{more}>"

    def report(
        self,
        path: _PATH,
        dataset: Any,
        queries: Any = None,
        metadata: Metadata | None = None,
        group: str | Sequence[str] | None = None,
        *,
        names: Sequence[str] | None = None,
        title: str = "Which training images made these?",
        model: Any = None,
    ) -> None:
        """Write one HTML file that needs nothing else: each query beside its hits, where they stand
        among all training images, totals by group, how stable the top is, and what all that means.

        Args:
            path: of the file; it is there once it is whole.
            dataset: the training images.
            queries: the generated images, as they were attributed or as pictures; None: numbers
                stand for them.
            metadata: columns that are not beside the pictures; see `Pictures`.
            group: the columns whose groups are counted; None: those that have groups.
            names: what each query is called, a text for each: its file, prompt or class; None:
                they are numbered.
            title: of the page.
            model: the denoiser, or the model of `from_pipeline`, whose fingerprint is noted.
        """
        told = Told(self, dataset, queries, metadata, names)
        Page(told, group, title, model).save(path)

    def to_csv(
        self,
        path: _PATH,
        dataset: Any = None,
        metadata: Metadata | None = None,
        *,
        names: Sequence[str] | None = None,
    ) -> None:
        """Write a row for each hit as CSV in UTF-8, with the mark that spreadsheets know it by;
        with a data set, also the names, captions and columns of its items; with names, those of the
        queries.

        A text that a spreadsheet would take for a formula begins with an apostrophe.
        """
        save_csv(path, Told(self, dataset, None, metadata, names))

    def to_json(
        self,
        path: _PATH,
        dataset: Any = None,
        metadata: Metadata | None = None,
        *,
        names: Sequence[str] | None = None,
    ) -> None:
        """Write everything as JSON; what is not known is null."""
        save_told(path, Told(self, dataset, None, metadata, names))

    def contact_sheet(
        self,
        path: _PATH,
        dataset: Any,
        queries: Any = None,
        *,
        names: Sequence[str] | None = None,
    ) -> None:
        """Write a picture (PNG) with a row for each query: the query, then its most influential
        training images, each with a line of text.
        """
        draw_sheet(path, Told(self, dataset, queries, None, names))


def joined(parts: Sequence[Attribution]) -> Attribution:
    """The attributions of one group of queries after the other, as one."""
    names = [one.name for one in fields(Attribution) if one.name != "about"]
    together = {name: torch.cat([getattr(part, name) for part in parts]) for name in names}
    return Attribution(**together, about=parts[0].about)
