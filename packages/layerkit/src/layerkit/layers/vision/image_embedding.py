"""Images among the tokens of a language model: tower, projector, and the places of the vectors.

The ids of a row hold a run of placeholders for each of its images, in the order of the images. The
vectors of the images replace the embeddings of the placeholders (LLaVA; Liu et al., 2023,
arXiv:2304.08485). Shapes are static, and a row reads its own images alone.
"""

from __future__ import annotations

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

_VECTOR_AXES = ("batch", None, None, "act_embed")


@struct.dataclass
class PlacedImages:
    """Vectors of images, and the placeholders among some tokens that they replace.

    Attributes:
      vectors: `[batch, num_images, tokens_per_image, dims]`.
      numbers: Number of each placeholder among those of its row, int32 `[batch, length]`; -1 for
        other tokens and for placeholders beyond the vectors.
      sees_whole_image: See `ImageEmbedding`.
    """

    vectors: jax.Array
    numbers: jax.Array
    sees_whole_image: bool = struct.field(pytree_node=False)

    def put(self, x: jax.Array) -> jax.Array:
        """Return the embeddings `x` `[batch, length, dims]` with the vectors in their places."""
        batch, _, _, dims = self.vectors.shape
        rows = self.vectors.reshape(batch, -1, dims)
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
        size = self.vectors.shape[2]
        rest = size - 1 - self.numbers % size
        return positions + jnp.where(self.numbers >= 0, rest, 0)


class ImageProjector(BaseLayer):
    """A map from the features of patches to the vectors of tokens: norm, merging, linear maps.

    Attributes:
      input_dims: Size of the features of a patch.
      output_dims: Size of the vector of a token.
      merged: Number of rows and of columns of the patches that become one token, whose mean is
        taken (Gemma 3).
      norm_tpl: Norm of the means; None for none.
      hidden_dims: Sizes between the linear maps. None for one of `output_dims` (LLaVA); `()` for a
        single linear map (Gemma 3).
      mlp_tpl: Linear maps, with an activation between them.
    """

    input_dims: int = 0
    output_dims: int = 0
    merged: int = 1
    norm_tpl: Config[BaseNormalization] | None = sub_config_field(None)
    hidden_dims: tuple[int, ...] | None = None
    mlp_tpl: Config[MLPBlock] = sub_config_field(
        MLPBlock.HParams, activation_tpl=GELU.HParams.config(approximate=False)
    )

    def setup(self) -> None:
        """Create the norm and the linear maps."""
        check_sizes(self, merged=self.merged)
        if self.norm_tpl is not None:
            self.create_child("norm", self.norm_tpl, dims=self.input_dims)
        hidden = (self.output_dims,) if self.hidden_dims is None else self.hidden_dims
        sizes = {"input_dims": self.input_dims, "output_dims": self.output_dims}
        self.create_child("mlp", self.mlp_tpl, hidden_dims=hidden, **sizes)

    def fprop(self, patches: jax.Array, *, grid: tuple[int, int]) -> jax.Array:
        """Map the patches of images to tokens in reading order.

        Args:
          patches: `[images, rows · columns, input_dims]`.
          grid: (rows, columns).

        Returns:
          `[images, tokens, output_dims]`.

        Raises:
          ConfigError: `merged` does not divide rows and columns.
        """
        size = self.merged
        fits = grid[0] % size == 0 and grid[1] % size == 0
        require(fits, self, "merged", size, f"a divisor of the rows and columns {list(grid)}")
        x = self.cast(patches)
        if size > 1:
            shape = (len(x), grid[0] // size, size, grid[1] // size, size, self.input_dims)
            means = jnp.mean(x.reshape(shape), axis=(2, 4), dtype=jnp.float32)
            x = self.cast(means).reshape(len(x), -1, self.input_dims)
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
    """

    token_id: int | None = None
    output_dims: int = 0
    tower_tpl: Config[VisionTransformer] = sub_config_field(VisionTransformer.HParams)
    projector_tpl: Config[BaseLayer] = sub_config_field(ImageProjector.HParams)
    sees_whole_image: bool = False

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
          `[batch, num_images, tokens_per_image, output_dims]`.

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
        return self.constrain(vectors.reshape(batch, number, -1, self.output_dims), *_VECTOR_AXES)

    def place(self, ids: jax.Array, images: jax.Array) -> PlacedImages:
        """Return the vectors of `images` and their places in rows of `ids` int32 `[batch, length]`.

        A packed row has the images of its documents in order.
        """
        is_image = self._is_image(ids)
        return self._placed(self(images), is_image, jnp.cumsum(is_image, axis=1))

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
        has_vector = is_image & (counts <= vectors.shape[1] * vectors.shape[2])
        numbers = jnp.where(has_vector, counts - 1, -1).astype(jnp.int32)
        return PlacedImages(vectors, numbers, sees_whole_image=self.sees_whole_image)
