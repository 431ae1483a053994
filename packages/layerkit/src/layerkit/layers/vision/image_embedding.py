"""Images among the tokens of a language model: tower, projector, and the places of the vectors.

The ids of a row hold a run of placeholders for each of its images, in the order of the images. The
vectors of the images replace the embeddings of the placeholders (LLaVA; Liu et al., 2023,
arXiv:2304.08485). Shapes are static, and a row reads its own images alone.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp
from flax import struct

from layerkit.base.base_layer import CACHE, BaseLayer
from layerkit.config import Config, sub_config_field
from layerkit.config.checks import check_integers, check_sizes, require
from layerkit.layers.attention.cache import extend_cache, write_cache
from layerkit.layers.basic.elementwise import GELU
from layerkit.layers.basic.normalizations import BaseNormalization
from layerkit.layers.basic.sequential import MLPBlock
from layerkit.layers.vision.vision_transformer import VisionTransformer
from layerkit.ops.patches import image_to_patch

_VECTOR_AXES = ("batch", None, None, None, "act_embed")


@struct.dataclass
class PlacedImages:
    """Vectors of images, and the placeholders among some tokens that they replace.

    Attributes:
      vectors: `[batch, num_images, rows, columns, dims]`.
      before: Number of replaced placeholders before each token in its document, int32 `[batch,
        length]`.
      numbers: Number of each placeholder among those of its row, int32 `[batch, length]`; -1 for
        other tokens and for placeholders beyond the vectors.
      sees_whole_image: See `ImageEmbedding`.
      has_grid_positions: See `ImageEmbedding`.
    """

    vectors: jax.Array
    before: jax.Array
    numbers: jax.Array
    sees_whole_image: bool = struct.field(pytree_node=False)
    has_grid_positions: bool = struct.field(pytree_node=False)

    def put(self, x: jax.Array) -> jax.Array:
        """Return the embeddings `x` `[batch, length, dims]` with the vectors in their places."""
        rows = self.vectors.reshape(len(x), -1, x.shape[-1])
        chosen = jnp.take_along_axis(rows, jnp.maximum(self.numbers, 0)[..., None], axis=1)
        return jnp.where(self.numbers[..., None] >= 0, chosen.astype(x.dtype), x)

    def ends(self, positions: jax.Array) -> jax.Array | None:
        """Return the last position that each token `[batch, length]` sees in a causal model.

        It is that of the last placeholder of the token's image; None if no token sees later ones.

        Args:
          positions: Positions in the row, int32 `[batch, length]`.
        """
        if not self.sees_whole_image:
            return None
        size = math.prod(self.vectors.shape[2:4])
        rest = size - 1 - self.numbers % size
        return positions + jnp.where(self.numbers >= 0, rest, 0)

    def positions(self, positions: jax.Array) -> jax.Array:
        """Return the positions of tokens for the rotation of queries and keys.

        An image takes as many positions as the longer of its sides. Its tokens have the time of its
        first one, to which rows and columns add (Qwen2-VL; arXiv:2409.12191).

        Args:
          positions: Positions in the document, int32 `[batch, length]`.

        Returns:
          `positions`, or int32 `[batch, length, 3]` with `has_grid_positions`.
        """
        if not self.has_grid_positions:
            return positions
        rows, columns = self.vectors.shape[2:4]
        images, inside = jnp.divmod(self.before, rows * columns)
        start = positions - inside - images * (rows * columns - max(rows, columns))
        row, column = jnp.divmod(jnp.where(self.numbers >= 0, inside, 0), columns)
        return jnp.stack([start, start + row, start + column], axis=-1)


class ImageProjector(BaseLayer):
    """A map from the features of patches to the vectors of tokens: norm, merging, linear maps.

    Attributes:
      input_dims: Size of the features of a patch.
      output_dims: Size of the vector of a token.
      merged: Number of rows and of columns of the patches that become one token.
      merge: `mean` of the patches of a token (Gemma 3); `concatenate` for all of their features, in
        reading order (Qwen2-VL).
      norm_tpl: Norm of the merged features; None for none.
      hidden_dims: Sizes between the linear maps. None for one of `output_dims` (LLaVA) or, for
        concatenated patches, of their size (Qwen2-VL); `()` for a single linear map (Gemma 3).
      mlp_tpl: Linear maps, with an activation between them.
    """

    input_dims: int = 0
    output_dims: int = 0
    merged: int = 1
    merge: Literal["mean", "concatenate"] = "mean"
    norm_tpl: Config[BaseNormalization] | None = sub_config_field(None)
    hidden_dims: tuple[int, ...] | None = None
    mlp_tpl: Config[MLPBlock] = sub_config_field(
        MLPBlock.HParams, activation_tpl=GELU.HParams.config(approximate=False)
    )

    def setup(self) -> None:
        """Create the norm and the linear maps."""
        check_sizes(self, merged=self.merged)
        dims = middle = self.input_dims * self.merged**2
        if self.merge == "mean":
            dims, middle = self.input_dims, self.output_dims
        if self.norm_tpl is not None:
            self.create_child("norm", self.norm_tpl, dims=dims)
        hidden = (middle,) if self.hidden_dims is None else self.hidden_dims
        sizes = {"input_dims": dims, "output_dims": self.output_dims}
        self.create_child("mlp", self.mlp_tpl, hidden_dims=hidden, **sizes)

    def fprop(self, patches: jax.Array, *, grid: tuple[int, int]) -> jax.Array:
        """Map the patches of images to tokens in reading order.

        Args:
          patches: `[images, rows · columns, input_dims]`.
          grid: (rows, columns).

        Returns:
          `[images, rows / merged, columns / merged, output_dims]`.

        Raises:
          ConfigError: `merged` does not divide rows and columns.
        """
        size = self.merged
        fits = grid[0] % size == 0 and grid[1] % size == 0
        require(fits, self, "merged", size, f"a divisor of the rows and columns {list(grid)}")
        x = image_to_patch(self.cast(patches).reshape(len(patches), *grid, -1), size)
        if self.merge == "mean":
            x = x.reshape(*x.shape[:2], size**2, self.input_dims)
            x = self.cast(jnp.mean(x, axis=2, dtype=jnp.float32))
        x = x.reshape(len(x), grid[0] // size, grid[1] // size, -1)
        if self.norm_tpl is not None:
            x = self.norm(x)
        vectors: jax.Array = self.mlp(x)
        return vectors


class ImageEmbedding(BaseLayer):
    """A tower and a projector that embed the images of a language model.

    Attributes:
      token_id: Id of a placeholder.
      output_dims: Size of the model dimension of the language model.
      tower_tpl: Network from images `[images, height, width, channels]` to the features of patches.
      projector_tpl: Map from the features to the vectors of tokens.
      sees_whole_image: True to let the placeholders of an image attend to one another, although the
        model is causal (Gemma 3). A window must not be smaller than an image.
      has_grid_positions: True for positions of time, row and column, for rotary embeddings with
        three `sections`; see `PlacedImages.positions`.
    """

    token_id: int | None = None
    output_dims: int = 0
    tower_tpl: Config[VisionTransformer] = sub_config_field(VisionTransformer.HParams)
    projector_tpl: Config[BaseLayer] = sub_config_field(ImageProjector.HParams)
    sees_whole_image: bool = False
    has_grid_positions: bool = False

    def setup(self) -> None:
        """Create the tower and the projector."""
        require(self.token_id is not None, self, "token_id", None, "the id of a placeholder")
        check_integers(self, minimum=0, token_id=self.token_id)
        self.create_child("tower", self.tower_tpl)
        sizes = {"input_dims": self.tower.model_dims, "output_dims": self.output_dims}
        self.create_child("projector", self.projector_tpl, **sizes)

    def fprop(self, images: jax.Array) -> jax.Array:
        """Compute the vectors of images.

        Args:
          images: Normalized pixels `[batch, num_images, height, width, channels]` of a floating
            dtype. Rows of fewer images end in any others, such as zeros, which nothing reads.

        Returns:
          `[batch, num_images, rows, columns, output_dims]`, the tokens in reading order.

        Raises:
          ConfigError: The pixels are integers.
        """
        is_float = jnp.issubdtype(images.dtype, jnp.floating)
        require(
            is_float, self, "dtype of images", images.dtype.name, "floats, of normalized pixels"
        )
        batch, number, *sizes = images.shape
        merged = images.reshape(batch * number, *sizes)
        vectors = self.projector(self.tower(merged), grid=self.tower.grid(merged))
        return self.constrain(vectors.reshape(batch, number, *vectors.shape[1:]), *_VECTOR_AXES)

    def place(self, ids: jax.Array, images: jax.Array, *, positions: jax.Array) -> PlacedImages:
        """Return the vectors of images and their places in rows of tokens.

        Args:
          ids: int32 `[batch, length]`. A packed row has the images of its documents in order.
          images: See `fprop`.
          positions: Position of each token in its document, int32 `[batch, length]`.
        """
        is_image = self._is_image(ids)
        counts = jnp.cumsum(is_image, axis=1)
        placed = self._placed(self(images), is_image, counts)
        first = jnp.maximum(jnp.arange(ids.shape[1]) - positions, 0)
        earlier = jnp.take_along_axis(placed.before, first, axis=1)
        return dataclasses.replace(placed, before=placed.before - earlier)

    def init_cache(self, batch_size: int, max_length: int, images: jax.Array) -> None:
        """Store the vectors of images `[batch, num_images, …]` of prompts in the cache."""
        write_cache(self, "vectors", self(images), _VECTOR_AXES)
        empty = jnp.zeros((batch_size, max_length), bool)
        write_cache(self, "is_image", empty, ("batch", "length"))

    def extend_step(self, ids: jax.Array, *, time_step: jax.Array) -> PlacedImages | None:
        """Return the places of cached vectors in the next tokens; None if prompts have no images.

        Args:
          ids: Tokens at positions time_step …, int32 `[batch, t]`.
          time_step: int32 scalar.
        """
        if not self.has_variable(CACHE, "vectors"):
            return None
        is_image = self._is_image(ids)
        axes = ("batch", "length")
        slots = extend_cache(self, "is_image", is_image, axes, time_step=time_step)
        counts = jnp.cumsum(slots, axis=1)
        counts = jax.lax.dynamic_slice_in_dim(counts, time_step, ids.shape[1], axis=1)
        return self._placed(self.get_variable(CACHE, "vectors"), is_image, counts)

    def _is_image(self, ids: jax.Array) -> jax.Array:
        assert self.token_id is not None
        return jnp.equal(ids, self.token_id)

    def _placed(self, vectors: jax.Array, is_image: jax.Array, counts: jax.Array) -> PlacedImages:
        """Return the places of tokens by the number of placeholders up to each."""
        num_vectors = math.prod(vectors.shape[1:4])
        has_vector = is_image & (counts <= num_vectors)
        return PlacedImages(
            vectors,
            before=jnp.minimum(counts, num_vectors) - has_vector,
            numbers=jnp.where(has_vector, counts - 1, -1).astype(jnp.int32),
            sees_whole_image=self.sees_whole_image,
            has_grid_positions=self.has_grid_positions,
        )
