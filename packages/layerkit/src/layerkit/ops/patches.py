"""Patches of images, and interpolation between grids of positions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

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


def resize_grid(
    vectors: jax.Array,
    grid: tuple[int, int],
    new_grid: tuple[int, int],
    *,
    aligns_corners: bool = False,
) -> jax.Array:
    """Interpolate the vectors of a grid bilinearly.

    Args:
      vectors: `[rows · columns, dims]`, in reading order.
      grid: (rows, columns) of the vectors.
      new_grid: (rows, columns) of the result.
      aligns_corners: True to keep the vectors at the corners, without antialiasing (Qwen3-VL);
        False to align the edges of the images, with antialiasing if the new grid is smaller.

    Returns:
      `[new rows · new columns, dims]`; the vectors themselves if the grids are equal.
    """
    if grid == new_grid:
        return vectors
    dims = vectors.shape[-1]
    table = vectors.reshape(*grid, dims)
    if aligns_corners:
        rows, columns = map(_taps, grid, new_grid)
        resized = jnp.einsum("xr,yc,rcd->xyd", rows, columns, table, precision="highest")
        return resized.astype(vectors.dtype).reshape(-1, dims)
    return jax.image.resize(table, (*new_grid, dims), method="bilinear").reshape(-1, dims)


def _taps(size: int, new_size: int) -> np.ndarray:
    """Return the weights float32 `[new_size, size]` of linear interpolation between the ends."""
    places = np.arange(new_size) * (size - 1) / max(new_size - 1, 1)
    distances = np.abs(places[:, None] - np.arange(size))
    return np.maximum(1.0 - distances, 0.0).astype(np.float32)


def sort_by_windows(grid: tuple[int, int], size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the order of a grid's patches by windows, and the number of each one's window.

    Windows are squares of `size` rows and columns from the first patch on. Those at the ends are
    smaller if `size` does not divide the grid.

    Args:
      grid: (rows, columns) of the patches.
      size: Rows and columns of a window.

    Returns:
      (places in reading order, numbers of windows), both int `[rows · columns]` in the new order.
    """
    rows, columns = np.divmod(np.arange(grid[0] * grid[1]), grid[1])
    windows = rows // size * -(-grid[1] // size) + columns // size
    order = np.argsort(windows, kind="stable")
    return order, windows[order]
