"""The folder of the compilation cache, and its permissions."""

from __future__ import annotations

import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from layerkit_runner.distributed.devices import cache_folder, enable_compilation_cache, make_private
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


def test_each_run_of_a_process_has_its_own_folder_or_none(tmp_path: Path):
    before = {name: value for name, value in jax.config.values.items() if "_cache" in name}
    folders, found = [tmp_path / "a", tmp_path / "b"], []
    jax.block_until_ready(jnp.arange(3) + 1)  # JAX has compiled before the first run
    try:
        for size, flag in enumerate([str(folders[0]), "off", str(folders[1])], start=1000):
            enable_compilation_cache(flag)
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
            jax.jit(lambda x: jnp.sin(x) * 3)(np.ones(size)).block_until_ready()
            found.append([len(list(folder.glob("*lambda*-cache"))) for folder in folders])
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
    assert found == [[1, 0], [1, 0], [1, 1]]
