"""Tables of metrics, by column."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from layerkit import html_display
from layerkit_inputs.extras import MissingExtraError

_SHOWN_ROWS = 20


class MetricsTable(dict[str, list[Any]]):
    """A table of metrics: a dict of columns of equal length, such as `table["loss"]`.

    `pandas.DataFrame(table)` and `table.to_pandas()` are the same. The column `step` has the number
    of completed steps, and `time` Unix time in seconds. A missing value is NaN.
    """

    @classmethod
    def of(cls, records: Iterable[Mapping[str, Any]]) -> MetricsTable:
        """Return the table of records, one for each row."""
        rows = list(records)
        names = dict.fromkeys(name for row in rows for name in row if name != "dataset")
        return cls({name: [row.get(name, math.nan) for row in rows] for name in names})

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(next(iter(self.values()), ()))

    def last(self) -> dict[str, Any]:
        """Return the last row by column; empty if the table is."""
        return {name: column[-1] for name, column in self.items() if column}

    def __repr__(self) -> str:
        """Return the names of the columns and the number of rows."""
        return f"MetricsTable({self.num_rows} rows: {', '.join(self)})"

    def _repr_html_(self) -> str:
        """Return the last rows as a table, which notebooks show."""
        names = [name for name in self if name != "time"]
        first = max(0, self.num_rows - _SHOWN_ROWS)
        rows = [[self[name][row] for name in names] for row in range(first, self.num_rows)]
        caption = f"last {len(rows)} of {self.num_rows} rows" if first else None
        return html_display.table(names, rows, caption=caption)

    def to_pandas(self) -> Any:
        """Return a `pandas.DataFrame`, with the steps as its index.

        Raises:
          MissingExtraError: pandas is not installed.
        """
        try:
            import pandas
        except ModuleNotFoundError as error:
            raise MissingExtraError(
                "MetricsTable.to_pandas needs the package pandas",
                hint="Install it: pip install pandas",
            ) from error
        frame = pandas.DataFrame(dict(self))
        return frame.set_index("step") if "step" in frame else frame
