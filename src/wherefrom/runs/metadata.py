"""The metadata beside training images, looked at before anything long begins: what cannot be read
is refused by name, whatever the network takes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..data.lazy import ImageFiles
from ..data.sidecars import table_rows, tables_beside, text_of
from ..errors import WherefromError

_OTHERS = {";": "semicolons", "\t": "tabs", "|": "bars"}


def look_at_metadata(images: Any) -> None:
    """Refuse metadata files beside pictures that say nothing of any."""
    for table in tables_beside(images) if isinstance(images, ImageFiles) else ():
        if table.suffix == ".csv":
            _check_separator(table)
        columns = {str(key) for row in table_rows(table) for key in row}
        if columns and "file_name" not in columns:
            raise WherefromError(
                f"{table} has the columns {', '.join(sorted(columns))}, and no file_name that says "
                "which image a row is of: add it, or move the file elsewhere"
            )


def _check_separator(table: Path) -> None:
    first = text_of(table).split("\n")[0]
    for sign, name in _OTHERS.items():
        if "," not in first and sign in first:
            raise WherefromError(
                f"{table} seems to be separated by {name}: save it with commas between its columns"
            )
