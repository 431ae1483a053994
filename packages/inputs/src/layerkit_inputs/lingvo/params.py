"""The params of a Lingvo input generator: their type, and the batch size that they set."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class LingvoParams(Protocol):
    """Params that build a Lingvo input generator, which are Lingvo's `InstantiableParams`."""

    def Copy(self) -> Any:  # noqa: N802 - the names of Lingvo
        """Return params with the same values."""

    def Get(self, name: str) -> Any:  # noqa: N802
        """Return the value of a param."""

    def Instantiate(self) -> Any:  # noqa: N802
        """Return the generator."""


def rows_of_params(params: Any) -> int | None:
    """Return the batch size in Lingvo params, or None if they have none."""
    if not hasattr(params, "Get"):
        return None  # invalid params, which raise an error when the input is built
    limits = params.Get("bucket_batch_limit") if "bucket_batch_limit" in params else None
    if limits:
        return int(max(limits))
    rows = params.Get("batch_size") if "batch_size" in params else None
    return int(rows) if rows else None
