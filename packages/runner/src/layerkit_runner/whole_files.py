"""Small files that are there in whole or not at all, whenever the process is killed.

They are written under another name and renamed. A store without rename copies instead, and there a
single file appears in whole by itself.
"""

from __future__ import annotations

from etils import epath


def write_whole(path: epath.Path, content: str | bytes) -> None:
    """Writes `content` to `path`, making its folder, and replaces what was there at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.parent / f"{path.name}.partial"
    if isinstance(content, str):
        partial.write_text(content)
    else:
        partial.write_bytes(content)
    partial.replace(path)
