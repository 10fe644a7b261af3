"""Results as plain records, and as a table of pandas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from miles_async.errors import ConfigurationError
from miles_async.types import JsonObject


class Records(list[JsonObject]):
    """A list of dictionaries."""

    def to_pandas(self) -> Any:
        """A ``pandas.DataFrame`` with a row per record."""
        return data_frame(self)


def data_frame(rows: Sequence[JsonObject]) -> Any:
    """A ``pandas.DataFrame`` of ``rows``. Raises ConfigurationError if pandas is not installed."""
    try:
        import pandas
    except ModuleNotFoundError as error:
        raise ConfigurationError("to_pandas() needs pandas: pip install pandas") from error
    return pandas.DataFrame(list(rows))
