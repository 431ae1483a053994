"""Embeddings of tokens for each layer of a stack, and the branch of a layer that reads them.

`LayerInputs` of a model embeds each token once for all layers, and `GatedInput` of each layer adds
its part to the residual (Gemma 3n, Gemma 4). The table is large, but a step reads few of its rows.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from layerkit.base.base_layer import BaseLayer
from layerkit.config import Config, sub_config_field
from layerkit.config.checks import check_sizes
from layerkit.layers.basic.elementwise import GELU, BaseActivation
from layerkit.layers.basic.embeddings import Embedding
from layerkit.layers.basic.linears import Linear
from layerkit.layers.basic.normalizations import BaseNormalization, RmsNorm


class LayerInputs(BaseLayer):
    """Vectors of each token for each layer: (norm(x·w / √input_dims) + √dims · table[id]) / √2.

    Attributes:
      num_classes: Number of token ids.
      input_dims: Size of the model dimension.
      num_layers: Number of layers.
      dims: Size of the vector for a layer.
      embedding_tpl: Table `[num_classes, num_layers * dims]`.
      linear_tpl: Projection w of the embedded tokens to num_layers * dims.
      norm_tpl: Norm of the projection to each layer.
    """

    num_classes: int = 0
    input_dims: int = 0
    num_layers: int = 0
    dims: int = 0
    embedding_tpl: Config[BaseLayer] = sub_config_field(Embedding.HParams)
    linear_tpl: Config[BaseLayer] = sub_config_field(Linear.HParams)
    norm_tpl: Config[BaseNormalization] = sub_config_field(RmsNorm.HParams)

    def setup(self) -> None:
        """Create the table, the projection and the norm."""
        check_sizes(self, num_layers=self.num_layers, dims=self.dims)
        width = self.num_layers * self.dims
        table = {"num_classes": self.num_classes, "input_dims": width}
        self.create_child("embedding", self.embedding_tpl, **table)
        linear = {"input_dims": self.input_dims, "output_dims": width}
        self.create_child("projection", self.linear_tpl, **linear)
        self.create_child("norm", self.norm_tpl, dims=self.dims)

    def fprop(self, ids: jax.Array, x: jax.Array) -> jax.Array:
        """Compute the vectors `[num_layers, batch, length, dims]`.

        Args:
          ids: Token ids int32 `[batch, length]`.
          x: Embedded tokens `[batch, length, input_dims]`.
        """
        shape = (*ids.shape, self.num_layers, self.dims)
        embedded = self.cast(self.embedding(ids)).reshape(shape) * math.sqrt(self.dims)
        projected = self.projection(x) * (1.0 / math.sqrt(self.input_dims))
        vectors = (self.norm(projected.reshape(shape)) + embedded) * math.sqrt(0.5)
        vectors = jnp.moveaxis(self.cast(vectors), 2, 0)
        return self.constrain(vectors, None, "batch", "length", None)


class GatedInput(BaseLayer):
    """A branch that reads the layer's vectors: norm(output(activation(gate(x)) · layer_input)).

    Attributes:
      input_dims: Size of the model dimension.
      dims: Size of the vector of a token for a layer; see `LayerInputs`.
      linear_tpl: Projections.
      activation_tpl: Activation of the gate.
      norm_tpl: Norm of the output.
    """

    input_dims: int = 0
    dims: int = 0
    linear_tpl: Config[BaseLayer] = sub_config_field(Linear.HParams)
    activation_tpl: Config[BaseActivation] = sub_config_field(GELU.HParams)
    norm_tpl: Config[BaseNormalization] = sub_config_field(RmsNorm.HParams)

    def setup(self) -> None:
        """Create the projections, the activation and the norm."""
        outer, inner = self.input_dims, self.dims
        self.create_child("gate", self.linear_tpl, input_dims=outer, output_dims=inner)
        output = {"input_dims": inner, "output_dims": outer, "weight_axes": ("mlp", "embed")}
        self.create_child("output", self.linear_tpl, **output)
        self.create_child("activation", self.activation_tpl)
        self.create_child("norm", self.norm_tpl, dims=outer)

    def fprop(self, x: jax.Array, layer_input: jax.Array) -> jax.Array:
        """Return the branch `[batch, length, input_dims]`.

        Args:
          x: Residual `[batch, length, input_dims]`.
          layer_input: `[batch, length, dims]`.
        """
        gated = self.activation.gate(self.gate(x), layer_input)
        output: jax.Array = self.norm(self.output(gated))
        return output
