"""Texts of byte counts, in powers of ten."""

from __future__ import annotations


def size_text(size: float) -> str:
    """Return bytes as a text of three digits, such as `0 B`, `12.3 kB` or `1.54 GB`.

    >>> size_text(1_540_000_000)
    '1.54 GB'
    """
    if size < 1000:
        return f"{size:.0f} B"
    value = float(size)
    for unit in ("kB", "MB", "GB", "TB"):
        value /= 1000
        # A value that would be rounded to 1000 of a unit is 1 of the next.
        if value < 999.5 or unit == "TB":
            break
    return f"{value:.3g} {unit}" if value < 999.5 else f"{value:.0f} {unit}"


def megabytes(size: float) -> str:
    """Return bytes as MB or, from a billion on, as GB."""
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
