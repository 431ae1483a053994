"""The folder of the compilation cache, and its permissions."""

from __future__ import annotations

import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from layerkit_runner.distributed.devices import enable_compilation_cache


@pytest.fixture(autouse=True)
def _unchanged_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    before = {name: value for name, value in jax.config.values.items() if "_cache" in name}
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def test_default_folder_is_for_this_user_alone(tmp_path: Path):
    enable_compilation_cache(None)
    folder = tmp_path / "layerkit" / "jax"
    assert jax.config.jax_compilation_cache_dir == str(folder)
    assert folder.stat().st_mode & 0o777 == 0o700


def test_chosen_folder_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "team"))
    enable_compilation_cache(None)
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "team")
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files to another user")
def test_default_folder_of_another_user_is_not_used(tmp_path: Path):
    folder = tmp_path / "layerkit" / "jax"
    folder.mkdir(parents=True)
    os.chown(folder, 65534, 65534)
    enable_compilation_cache(None)
    assert jax.config.jax_compilation_cache_dir is None


def test_each_run_of_a_process_has_its_own_folder_or_none(tmp_path: Path):
    folders, sizes = [tmp_path / "a", tmp_path / "b"], []
    jax.block_until_ready(jnp.arange(3) + 1)  # JAX has compiled before the first run
    for size, flag in enumerate([str(folders[0]), "off", str(folders[1])], start=1000):
        enable_compilation_cache(flag)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.jit(lambda x: jnp.sin(x) * 3)(np.ones(size)).block_until_ready()
        sizes.append([len(list(folder.glob("*lambda*-cache"))) for folder in folders])
    assert sizes == [[1, 0], [1, 0], [1, 1]]
