"""Conversion between images and their patches, and between grids of positions."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from layerkit.config.checks import require


def image_to_patch(images: jax.Array, patch_size: int) -> jax.Array:
    """Cut images `[batch, height, width, channels]` into square patches, in reading order.

    Returns:
      `[batch, height/patch_size · width/patch_size, patch_size² · channels]`, the pixels of a patch
      in reading order.

    Raises:
      ConfigError: `patch_size` does not divide height and width.
    """
    batch, height, width, channels = images.shape
    is_valid, expected = (
        not (height % patch_size or width % patch_size),
        f"multiples of {patch_size}",
    )
    require(is_valid, None, "height and width of images", (height, width), expected)
    rows, columns = height // patch_size, width // patch_size
    split = images.reshape(batch, rows, patch_size, columns, patch_size, channels)
    return split.swapaxes(2, 3).reshape(batch, rows * columns, patch_size**2 * channels)


def patch_to_image(patches: jax.Array, grid: tuple[int, int], patch_size: int) -> jax.Array:
    """Put the patches of `image_to_patch` together.

    Args:
      patches: `[batch, rows · columns, patch_size² · channels]`.
      grid: (rows, columns) of patches.
      patch_size: Height and width of a patch in pixels.

    Returns:
      `[batch, rows · patch_size, columns · patch_size, channels]`.
    """
    batch, (rows, columns) = len(patches), grid
    split = patches.reshape(batch, rows, columns, patch_size, patch_size, -1)
    images = split.swapaxes(2, 3)
    return images.reshape(batch, rows * patch_size, columns * patch_size, images.shape[-1])


def resize_grid(vectors: jax.Array, grid: tuple[int, int], new_grid: tuple[int, int]) -> jax.Array:
    """Interpolate the vectors of a grid bilinearly, with antialiasing if the new one is smaller.

    Args:
      vectors: `[rows · columns, dims]`, in reading order.
      grid: (rows, columns) of the vectors.
      new_grid: (rows, columns) of the result.

    Returns:
      `[new rows · new columns, dims]`; the vectors themselves if the grids are equal.
    """
    if grid == new_grid:
        return vectors
    dims = vectors.shape[-1]
    shape = (*new_grid, dims)
    resized = jax.image.resize(vectors.reshape(*grid, dims), shape, method="bilinear")
    return jnp.reshape(resized, (-1, dims))
