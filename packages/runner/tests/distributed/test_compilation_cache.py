"""The folder of the compilation cache, and its permissions."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from layerkit_runner.distributed.devices import cache_folder, make_private
from layerkit_runner.files.atomic_write import UnsafePathError


def test_default_folder_is_for_this_user_alone(tmp_path: Path):
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    folder = cache_folder(None, environ)
    assert folder is not None
    make_private(folder, environ)
    assert Path(folder).stat().st_mode & 0o777 == 0o700


def test_chosen_folder_is_left_as_it_is(tmp_path: Path):
    environ = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "team")}
    folder = cache_folder(None, environ)
    assert folder == str(tmp_path / "team")
    make_private(folder, environ)
    assert not Path(folder).exists()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files to another user")
def test_default_folder_of_another_user_is_not_used(tmp_path: Path):
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    folder = tmp_path / "layerkit" / "jax"
    folder.mkdir(parents=True)
    os.chown(folder, 65534, 65534)
    with pytest.raises(UnsafePathError):
        make_private(str(folder), environ)
