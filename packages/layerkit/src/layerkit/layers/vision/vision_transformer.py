"""Vision Transformers: an image as a sequence of patches (Dosovitskiy et al., 2020).

The attention is bidirectional, and the layers are those of any stack: `StackedTransformer`,
`StackedTransformerRepeated` or a pipeline. Sources: ViT (arXiv:2010.11929); attention pooling
(Zhai et al., 2021, arXiv:2106.04560; SigLIP); registers (Darcet et al., 2023, arXiv:2309.16588).
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from layerkit.base.base_layer import BaseLayer
from layerkit.base.weights import WeightHParams, WeightInit
from layerkit.config import Config, fields_of, sub_config_field, target_of
from layerkit.config.checks import check_integers, check_last_axis, check_sizes, require
from layerkit.config.config import walk_configs
from layerkit.config.hparams import Conditions
from layerkit.layers.attention.cross import CrossAttention
from layerkit.layers.attention.multi_head import MultiHeadAttention
from layerkit.layers.basic.dots import Dot, add_bias, create_dot, matmul
from layerkit.layers.basic.elementwise import GELU, Dropout
from layerkit.layers.basic.normalizations import BaseNormalization, LayerNorm
from layerkit.layers.basic.positions import PositionalEmbedding2D, TrainablePositionalEmbedding
from layerkit.layers.transformer.stacks import StackedTransformer
from layerkit.layers.transformer.transformer import Transformer, TransformerFeedForward
from layerkit.ops.attention.masks import AttentionMask, row_positions
from layerkit.ops.patches import image_to_patch, resize_grid, sort_by_windows

_FEED_FORWARD: Any = {"has_bias": True, "activation_tpl": GELU.HParams.config(approximate=False)}
VIT_LAYER = Transformer.HParams.config(
    norm_tpl=LayerNorm.HParams.config(epsilon=1e-6),
    attention_tpl=MultiHeadAttention.HParams.config(use_bias=True),
    feed_forward_tpl=TransformerFeedForward.HParams.config(**_FEED_FORWARD),
)
"""Layer of vision Transformers, to be cloned: biases, norms before branches, and GELU."""


class PatchEmbedding(BaseLayer):
    """A linear map of square patches: images `[batch, height, width, channels]` → vectors.

    It is a convolution whose strides equal its kernel, computed as a product.

    Attributes:
      channels: Number of channels of the images.
      patch_size: Height and width of a patch in pixels.
      output_dims: Size of a vector.
      num_frames: Number of frames of a patch of video, all of which show the image (Qwen2-VL); None
        for a patch without time.
      remainder: Number of rows and columns of pixels at the ends that belong to no patch, such as 6
        of 384 for patches of 14 (SigLIP).
      use_bias: True to add `b` `[output_dims]`, which starts at 0.
      weight_axes: Logical axes of `w` `[patch_size, patch_size, channels, output_dims]`. With
        `num_frames`, an axis of frames comes before.
      dot_tpl: `Dot` that multiplies; None for the plain product.
    """

    channels: int = 3
    patch_size: int = 16
    output_dims: int = 0
    num_frames: int | None = None
    remainder: int = 0
    use_bias: bool = True
    weight_axes: tuple[str | None, ...] = (None, None, None, "embed")
    dot_tpl: Config[Dot] | None = sub_config_field(None)

    def setup(self) -> None:
        """Create the weights."""
        sizes = {"channels": self.channels, "patch_size": self.patch_size}
        check_sizes(self, **sizes, output_dims=self.output_dims, num_frames=self.num_frames)
        check_integers(self, minimum=0, remainder=self.remainder)
        shape: tuple[int, ...] = (self.patch_size,) * 2 + (self.channels, self.output_dims)
        weight = WeightHParams(shape, self.weight_axes, fan_in_dims=(0, 1, 2), fan_out_dims=(3,))
        create_dot(self, weight)
        if self.num_frames is not None:
            weight = WeightHParams(
                (self.num_frames, *shape),
                (None, *self.weight_axes),
                fan_in_dims=(0, 1, 2, 3),
                fan_out_dims=(4,),
            )
        self.create_variable("w", weight)
        if self.use_bias:
            axes, zeros = self.weight_axes[-1:], WeightInit.Constant(0.0)
            self.create_variable("b", WeightHParams(shape[-1:], axes, init=zeros))

    def fprop(self, images: jax.Array) -> jax.Array:
        """Map images `[batch, height, width, channels]` to `[batch, patches, output_dims]`.

        Raises:
          ConfigError: `patch_size` does not divide height and width.
        """
        check_last_axis(self, images, channels=self.channels)
        height, width = (size - self.remainder for size in images.shape[1:3])
        patches = image_to_patch(self.cast(images[:, :height, :width]), self.patch_size)
        w = self.theta.w if self.num_frames is None else jnp.sum(self.theta.w, axis=0)
        vectors = matmul(self, patches, w.reshape(-1, self.output_dims))
        return add_bias(vectors, self.theta.b) if self.use_bias else vectors


class AttentionPooling(BaseLayer):
    """The attention of a learned query to all patches, and a feed-forward block (SigLIP).

    Attributes:
      input_dims: Size of the model dimension.
      hidden_dims: Size of the hidden dimension of the feed-forward block.
      num_heads: Number of heads.
      attention_tpl: Attention of the query.
      norm_tpl: Norm before the feed-forward block.
      feed_forward_tpl: Feed-forward block, with a residual.
    """

    input_dims: int = 0
    hidden_dims: int = 0
    num_heads: int = 0
    attention_tpl: Config[BaseLayer] = sub_config_field(CrossAttention.HParams, use_bias=True)
    norm_tpl: Config[BaseNormalization] = sub_config_field(LayerNorm.HParams, epsilon=1e-6)
    feed_forward_tpl: Config[BaseLayer] = sub_config_field(
        TransformerFeedForward.HParams, **_FEED_FORWARD
    )

    def setup(self) -> None:
        """Create the query, the attention and the feed-forward block."""
        dims, init = self.input_dims, WeightInit.Gaussian(0.02)
        self.create_variable("probe", WeightHParams((dims,), ("embed",), init=init))
        heads, wide = {"num_heads": self.num_heads}, {"hidden_dims": self.hidden_dims}
        self.create_child("attention", self.attention_tpl, input_dims=dims, **heads)
        self.create_child("norm", self.norm_tpl, dims=dims)
        self.create_child("feed_forward", self.feed_forward_tpl, input_dims=dims, **wide)

    def fprop(self, inputs: jax.Array) -> jax.Array:
        """Map `[batch, length, input_dims]` to `[batch, input_dims]`."""
        batch, length, dims = inputs.shape
        query = jnp.broadcast_to(self.theta.probe, (batch, 1, dims))
        mask = AttentionMask.cross_mask(batch, 1, length)
        pooled = self.attention(query, memory=inputs, mask=mask)
        return (pooled + self.feed_forward(self.norm(pooled)))[:, 0]


class VisionTransformer(BaseLayer):
    """A Transformer over the patches of images `[batch, height, width, channels]`.

    Patches + positions → dropout → (class token, registers) → norm → stack → norm → output.

    Attributes:
      model_dims: Size of the model dimension.
      hidden_dims: Size of the hidden dimension of the feed-forward blocks.
      num_layers: Depth of the stack.
      num_heads: Number of heads of a layer.
      patch_tpl: Embedding of patches.
      position_tpl: Positions: a learned table, or `PositionalEmbedding2D` for sinusoids of rows and
        columns; None for none, as where the attention encodes positions.
      position_grid: (rows, columns) of the learned positions. Images of another size have
        interpolated ones. The learned positions begin with that of the class token, if there is
        one.
      aligns_corners: True to interpolate positions between those of the corners; see `resize_grid`.
      has_grid_positions: True to give the stack positions of three axes: window, row and column.
        The `sections` of rotary embeddings have 0 pairs for the window (Qwen2-VL).
      window_size: Number of rows and of columns of windows, in which layers whose `chunk` is
        window_size² attend (Qwen2.5-VL). None for no windows.
      has_class_token: True for a learned vector before the patches.
      num_registers: Number of further learned vectors, which have no positions.
      embedding_norm_tpl: Norm before the stack (CLIP); None for none.
      stack_tpl: Stack of layers.
      final_norm_tpl: Norm after the stack; None for none, as after layers that end in a norm.
      output: `patches` for the features of the patches; `class_token` for that of the class token,
        `[batch, dims]`.
      pool_tpl: Layer from the features of the patches to `[batch, dims]`: `AttentionPooling` or
        `GlobalPooling`; None for all of them, `[batch, patches, dims]`.
      dropout_rate: Dropout rate of patches and positions in training.

    Raises:
      ConfigError: Learned positions without a grid or a grid without them, an output that is
        missing, positions of a grid with other vectors than those of patches, or no layer or not
        all with a `chunk` attend within windows.
    """

    used_only_if: ClassVar[Conditions] = {
        "position_grid": "position_tpl",
        "aligns_corners": "position_grid",
        "window_size": "has_grid_positions",
    }

    model_dims: int = 0
    hidden_dims: int = 0
    num_layers: int = 1
    num_heads: int = 0
    patch_tpl: Config[PatchEmbedding] = sub_config_field(PatchEmbedding.HParams)
    position_tpl: Config[BaseLayer] | None = sub_config_field(
        TrainablePositionalEmbedding.HParams, weight_init=WeightInit.Gaussian(0.02)
    )
    position_grid: tuple[int, int] | None = None
    aligns_corners: bool = False
    has_grid_positions: bool = False
    window_size: int | None = None
    has_class_token: bool = False
    num_registers: int = 0
    embedding_norm_tpl: Config[BaseNormalization] | None = sub_config_field(None)
    stack_tpl: Config[BaseLayer] = sub_config_field(StackedTransformer.HParams, layer_tpl=VIT_LAYER)
    final_norm_tpl: Config[BaseNormalization] | None = sub_config_field(
        LayerNorm.HParams, epsilon=1e-6
    )
    output: Literal["patches", "class_token"] = "patches"
    pool_tpl: Config[BaseLayer] | None = sub_config_field(None)
    dropout_rate: float = 0.0

    def setup(self) -> None:
        """Create the embeddings, the stack, the norms and the pooling."""
        dims = self.model_dims
        check_sizes(self, model_dims=dims, window_size=self.window_size)
        check_integers(self, minimum=0, num_registers=self.num_registers)
        is_valid = self.output == "patches" or self.has_class_token
        require(is_valid, self, "has_class_token", self.has_class_token, "a class token")
        is_valid = not (self.has_grid_positions and (self.has_class_token or self.num_registers))
        expected = "False with a class token or registers, which have no row and column"
        require(is_valid, self, "has_grid_positions", self.has_grid_positions, expected)
        if self.has_grid_positions:
            layers: Any = {getattr(layer, "chunk", None) for layer in walk_configs(self.stack_tpl)}
            chunks = sorted(layers - {None})
            fitting = [] if self.window_size is None else [self.window_size**2]
            expected = f"{fitting}, window_size² of some layers"
            require(chunks == fitting, self, "chunk of layers", chunks, expected)
        self.create_child("patches", self.patch_tpl, output_dims=dims)
        self._create_positions()
        for name, rows, init in (
            ("class_token", int(self.has_class_token), WeightInit.Constant(0.0)),
            ("registers", self.num_registers, WeightInit.Gaussian(0.02)),
        ):
            if rows:
                token = WeightHParams((rows, dims), (None, "embed"), init=init, decays=False)
                self.create_variable(name, token)
        sizes = {"input_dims": dims, "hidden_dims": self.hidden_dims, "num_heads": self.num_heads}
        self.create_child("stack", self.stack_tpl, num_layers=self.num_layers, **sizes)
        for name in ("embedding_norm", "final_norm"):
            if (norm_tpl := getattr(self, f"{name}_tpl")) is not None:
                self.create_child(name, norm_tpl, dims=dims)
        if self.pool_tpl is not None:
            self.create_child("pool", self.pool_tpl, **fields_of(self.pool_tpl, **sizes))
        self.create_child("dropout", Dropout.HParams.config(rate=self.dropout_rate))

    def fprop(self, images: jax.Array) -> jax.Array:
        """Map images `[batch, height, width, channels]` to features.

        Returns:
          `[batch, patches, dims]` in reading order, or `[batch, dims]`, by `output` and `pool_tpl`.
        """
        x = self.tokens(images)
        if self.output == "class_token":
            return x[:, 0]
        x = x[:, int(self.has_class_token) + self.num_registers :]
        return x if self.pool_tpl is None else self.pool(x)

    def grid(self, images: jax.Array) -> tuple[int, int]:
        """Return (rows, columns) of the patches of images `[batch, height, width, channels]`."""
        height, width = (size - self.patches.remainder for size in images.shape[1:3])
        return height // self.patches.patch_size, width // self.patches.patch_size

    def tokens(self, images: jax.Array) -> jax.Array:
        """Map images `[batch, height, width, channels]` to the features of all tokens.

        Returns:
          `[batch, tokens, dims]`: of the class token, the registers and the patches.
        """
        x = self._add_positions(self.patches(images), self.grid(images))
        if self.embedding_norm_tpl is not None:
            x = self.embedding_norm(x)
        batch, length, _ = x.shape
        mask = AttentionMask.bidirectional_mask(batch, length)
        if self.has_grid_positions:
            x = self._attend_on_grid(x, mask, self.grid(images))
        else:
            x = self.stack(x, mask=mask, positions=row_positions(batch, length))
        return x if self.final_norm_tpl is None else self.final_norm(x)

    def _attend_on_grid(self, x: Any, mask: AttentionMask, grid: tuple[int, int]) -> jax.Array:
        """Apply the stack to patches `[batch, patches, dims]` in the order of windows."""
        size = self.window_size or max(grid)
        order, windows = sort_by_windows(grid, size)
        rows, columns = np.divmod(order, grid[1])
        # The chunk of a position is its quotient by size².
        axes = np.stack([windows * size**2, rows, columns], axis=-1).astype(np.int32)
        positions = jnp.broadcast_to(axes, (len(x), *axes.shape))
        sorted_x: jax.Array = self.stack(x[:, order], mask=mask, positions=positions)
        return sorted_x[:, np.argsort(order)]

    def _create_positions(self) -> None:
        grid, template = self.position_grid, self.position_tpl
        is_learned = template is not None and not issubclass(
            target_of(template), PositionalEmbedding2D
        )
        expected = "(rows, columns) for learned positions, and None for others"
        require(is_learned == (grid is not None), self, "position_grid", grid, expected)
        length = {"max_length": int(self.has_class_token) + math.prod(grid)} if grid else {}
        if template is not None:
            self.create_child("position", template, dims=self.model_dims, **length)

    def _add_positions(self, patches: jax.Array, grid: tuple[int, int]) -> jax.Array:
        """Return `[batch, tokens, dims]`, with positions and the vectors before the patches."""
        first: list[Any] = [self.theta.class_token] if self.has_class_token else []
        if self.position_grid is not None:
            vectors = self.position(row_positions(1, self.position.max_length))[0]
            if first:
                first, vectors = [first[0] + vectors[:1]], vectors[1:]
            corners = {"aligns_corners": self.aligns_corners}
            patches = patches + resize_grid(vectors, self.position_grid, grid, **corners)
        elif self.position_tpl is not None:
            rows, columns = jnp.divmod(jnp.arange(patches.shape[1])[None], grid[1])
            patches = patches + self.position(rows, columns)
        if self.num_registers:
            first.append(self.theta.registers)
        batch, _, dims = patches.shape
        before = [jnp.broadcast_to(part, (batch, len(part), dims)) for part in first]
        x = self.dropout(jnp.concatenate([*before, patches], axis=1) if before else patches)
        return self.constrain(x, "batch", "residual_length", "act_embed")
