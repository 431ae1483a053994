"""Where compiled programs are kept between runs."""

from __future__ import annotations

import os
from collections.abc import Mapping

# Of --jax_compilation_cache: no folder.
OFF = "off"


def cache_folder(flag: str | None, environ: Mapping[str, str]) -> str | None:
    """The folder, by the flag, else by JAX's variable, else below the user's own cache.

    Args:
      flag: What --jax_compilation_cache says.
      environ: The environment.

    Returns:
      An absolute path, or that of a store; None for no cache.
    """
    folder = flag or environ.get("JAX_COMPILATION_CACHE_DIR") or None
    if folder == OFF:
        return None
    if folder is None:
        cache_home = environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        folder = os.path.join(cache_home, "layerkit", "jax")
    # A shell leaves the ~ of --jax_compilation_cache=~/x as it is.
    return folder if "://" in folder else os.path.abspath(os.path.expanduser(folder))
