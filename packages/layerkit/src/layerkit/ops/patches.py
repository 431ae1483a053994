"""Patches of images, and interpolation between grids of positions."""

from __future__ import annotations

import jax

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
    rows, columns = height // patch_size, width // patch_size
    is_valid = (rows * patch_size, columns * patch_size) == (height, width)
    expected = f"multiples of {patch_size}"
    require(is_valid, None, "height and width of images", (height, width), expected)
    split = images.reshape(batch, rows, patch_size, columns, patch_size, channels)
    return split.swapaxes(2, 3).reshape(batch, rows * columns, patch_size**2 * channels)


def patch_to_image(patches: jax.Array, grid: tuple[int, int], patch_size: int) -> jax.Array:
    """Put the patches of `image_to_patch` together, `grid` = (rows, columns) of them.

    Returns:
      `[batch, rows · patch_size, columns · patch_size, channels]`.
    """
    rows, columns = grid
    split = patches.reshape(len(patches), rows, columns, patch_size, patch_size, -1)
    shape = (len(patches), rows * patch_size, columns * patch_size, split.shape[-1])
    return split.swapaxes(2, 3).reshape(shape)


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
    table = vectors.reshape(*grid, dims)
    return jax.image.resize(table, (*new_grid, dims), method="bilinear").reshape(-1, dims)
