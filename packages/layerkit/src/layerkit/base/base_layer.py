"""BaseLayer: a Flax Linen module whose annotated fields are its hyperparameters.

A layer creates its weights (`create_variable`) and children (`create_child`) in `setup` and
computes in `fprop`. A child inherits the weight dtype, the compute dtype, the initializer, `train`
and the sharding from its parent, unless it sets its own. Training and evaluation are two variants.

    class Linear(BaseLayer):
        input_dims: int = 0
        output_dims: int = 0

        def setup(self):
            shape = (self.input_dims, self.output_dims)
            self.create_variable("w", WeightHParams(shape, axes=("embed", "mlp")))

        def fprop(self, inputs):
            return inputs @ self.theta.w

Since `setup` creates the weights, `layer.init(key)` needs no inputs and draws the same weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, dataclass_transform

import jax
from flax import linen as nn

from layerkit.base.layer_methods import CACHE as CACHE
from layerkit.base.layer_methods import COLLECTIONS as COLLECTIONS
from layerkit.base.layer_methods import INHERITED_FIELDS as INHERITED_FIELDS
from layerkit.base.layer_methods import INTERMEDIATES as INTERMEDIATES
from layerkit.base.layer_methods import NON_TRAINABLE as NON_TRAINABLE
from layerkit.base.layer_methods import OVERWRITE_WITH_GRADIENT as OVERWRITE_WITH_GRADIENT
from layerkit.base.layer_methods import PARAMS as PARAMS
from layerkit.base.layer_methods import PROMPT_CACHE as PROMPT_CACHE
from layerkit.base.layer_methods import RANDOM as RANDOM
from layerkit.base.layer_methods import LayerMethods, mark_plain_methods
from layerkit.base.sharding import BoundSharding
from layerkit.base.step_reports import AUX_LOSS as AUX_LOSS
from layerkit.base.step_reports import SUMMARIES as SUMMARIES
from layerkit.base.step_reports import SUMMARY_ARRAYS as SUMMARY_ARRAYS
from layerkit.base.weights import WeightHParams as WeightHParams
from layerkit.base.weights import WeightInit
from layerkit.config import BaseHParams, nested_map
from layerkit.config import instance_field as instance_field
from layerkit.config import sub_config_field as sub_config_field
from layerkit.config.config import ShownAsTree
from layerkit.config.hparams import MYPY, Conditions, TypedHParams, adopt_hparams, checking_fields
from layerkit.errors import naming_layer

if TYPE_CHECKING:
    from layerkit.config.hparams import HParamsDescriptor

nested_map.register_pytree()

# Methods whose errors name the layer.
_NAMED_IN_ERRORS = frozenset({"setup", "fprop", "extend_step", "init_cache", "decode"})


# A call of `sub_config_field` is a plain default to type checkers, or they would require the field.
@dataclass_transform(kw_only_default=True, field_specifiers=(dataclasses.field,))
class BaseLayer(LayerMethods, ShownAsTree, nn.Module, metaclass=TypedHParams, kw_only=True):
    """Base of every layer and model.

    Attributes:
      dtype: Dtype of the weights. None inherits it; float32 if no parent sets it.
      fprop_dtype: Dtype of the computation, to which weights and activations are cast. None
        inherits it; float32 if no parent sets it.
      weight_format: Format of weights of products that are stored in integers, such as `int8` or
        `int4:64` (`layerkit.base.weight_formats`). None inherits it; floats without any.
      params_init: Initializer of weights without their own. None inherits it; Xavier without any.
      train: True for the training variant, with dropout, noise, expert capacities and moving
        statistics; set it on a clone, `model.clone(train=True)`. None inherits it. A model without
        a value evaluates, and warns if `aux_loss` is mutable, as in a training step.
      sharding: Mesh and rules, set by the partitioner. Without them nothing is constrained.
      shared_weight_id: Id of shared weights. Children of one model with the same id, created from
        equal configs, are one layer with one set of weights.
    """

    if not TYPE_CHECKING:
        HParams: ClassVar[type[BaseHParams]] = BaseHParams
    elif not MYPY:
        HParams: ClassVar = HParamsDescriptor()
    used_only_if: ClassVar[Conditions] = {}
    """Conditions under which fields have an effect; see `layerkit.config.hparams`."""

    dtype: Any = None
    fprop_dtype: Any = None
    weight_format: str | None = None
    params_init: WeightInit | None = None
    train: bool | None = None
    sharding: BoundSharding | None = None
    shared_weight_id: str | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Add `HParams`, and wrap methods so that fields are checked and errors name the layer."""
        adopt_hparams(cls)
        if "setup" in vars(cls):
            cls.setup = checking_fields(cls.setup)  # type: ignore[method-assign]
        for name in _NAMED_IN_ERRORS & vars(cls).keys():
            setattr(cls, name, naming_layer(getattr(cls, name)))
        mark_plain_methods(cls)
        super().__init_subclass__(kw_only=True, **kwargs)

    # Methods that a subclass defines.

    @checking_fields
    def setup(self) -> None:
        """Create weights and children."""

    def fprop(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the outputs."""
        raise NotImplementedError(f"{type(self).__qualname__} does not define fprop")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run `fprop`."""
        return self.fprop(*args, **kwargs)

    def create_weights(self) -> None:
        """Create the weights of this layer and of all layers below it, without inputs."""
        for child in self._all_children():
            child.create_weights()

    def run_setup(self) -> None:
        """Run `setup` if it has not run yet, which Flax does before any method of a layer.

        A parent may read a weight of a child without having called it.
        """


def visit_layers(network: BaseLayer, visit: Callable[[BaseLayer], None]) -> None:
    """Call `visit` on every bound layer of a network, outer ones first.

    The body of a scan is visited once. Shapes are computed; no weight is made.
    """

    def intercept(
        call: Callable[..., Any], args: Any, kwargs: Any, context: nn.module.InterceptorContext
    ) -> Any:
        # Initialization calls it on every layer, also inside of a scan.
        if isinstance(context.module, BaseLayer) and context.method_name == "create_weights":
            visit(context.module)
        return call(*args, **kwargs)

    with nn.intercept_methods(intercept):
        jax.eval_shape(lambda: network.init_boxed(jax.random.key(0)))
