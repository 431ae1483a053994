"""Where compiled programs are kept between runs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from layerkit_runner.files.atomic_write import private_folder

# Of --jax_compilation_cache: no folder.
OFF = "off"


def cache_folder(flag: str | None, environ: Mapping[str, str]) -> str | None:
    """Return the folder, by the flag, else by JAX's variable, else below the user's own cache.

    Args:
      flag: Value of --jax_compilation_cache.
      environ: The environment.

    Returns:
      An absolute path, or that of a store; None for no cache.
    """
    folder = flag or environ.get("JAX_COMPILATION_CACHE_DIR") or _default_folder(environ)
    if folder == OFF:
        return None
    # A shell leaves the ~ of --jax_compilation_cache=~/x as it is.
    return folder if "://" in folder else os.path.abspath(os.path.expanduser(folder))


def make_private(folder: str, environ: Mapping[str, str]) -> None:
    """Create the default folder for this user alone; leave a folder that was chosen as it is.

    JAX runs the programs that it finds there, so whoever can write them can run code in a job.

    Args:
      folder: What `cache_folder` returned.
      environ: The environment.

    Raises:
      UnsafePathError: The default folder belongs to another user.
      OSError: The default folder cannot be created.
    """
    if folder == os.path.abspath(_default_folder(environ)):
        Path(folder).parent.mkdir(parents=True, exist_ok=True)
        private_folder(Path(folder))


def _default_folder(environ: Mapping[str, str]) -> str:
    cache_home = environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.path.join(cache_home, "layerkit", "jax")
