"""Experiments for GPUs that paxml registers after its release 1.4.0, made of that release's layers.

`scripts/pax_reference.py` records them. The classes follow `paxml/tasks/lm/params/nvidia.py` and
`praxis/layers/grok.py` of the repositories google/paxml and google/praxis. They describe weights,
settings and losses. Sharding, which changes none of these, is left out.
"""

from __future__ import annotations

from typing import Any

from paxml.tasks.lm.params import c4, lm_cloud, nvidia
from praxis import layers, pax_fiddle
from praxis.layers import embedding_softmax, multi_query_attention, normalizations

AXES = ("stage", "replica", "data", "data_expert", "mdl")


def on_mesh(task: Any, ici: tuple[int, ...], dcn: tuple[int, ...] | None) -> Any:
    """Return the task on a mesh with an axis for experts, and with one of stages if it has 5."""
    for layer in (task.model, task.model.lm_tpl):
        layer.ici_mesh_shape, layer.dcn_mesh_shape = ici, dcn
        layer.mesh_axis_names = AXES[-len(ici) :]
    return task


class GLaM64B64EProxy_EP(nvidia.GLaM64B64EProxy):  # noqa: N801 - the names in Pax
    """The proxy of GLaM with eight experts."""

    NUM_EXPERTS = 8
    MESH_SHAPE = (1, 16, 8, 1)

    def task(self) -> Any:
        """Return the task with the mesh of this experiment."""
        return on_mesh(super().task(), self.MESH_SHAPE, None)


def grok_layers(experiment: Any, num_layers: int) -> Any:
    """Return the config of a stack of Grok's layers, each with experts."""
    stack = pax_fiddle.Config(
        layers.StackedTransformer,
        name="decoder_block",
        packed_input=True,
        num_layers=num_layers,
        moe_layers=list(range(num_layers)),
        model_dims=experiment.MODEL_DIMS,
        hidden_dims=experiment.HIDDEN_DIMS,
        num_heads=experiment.NUM_HEADS,
        dim_per_head=experiment.MODEL_DIMS // experiment.NUM_HEADS,
        num_experts=experiment.NUM_EXPERTS,
        num_groups=experiment.NUM_GROUPS,
        mask_self_attention=True,
        use_cross_attention=False,
    )
    layer = stack.transformer_layer_params_tpl
    layer.ln_tpl = pax_fiddle.Config(normalizations.RmsNorm, direct_scale=True)
    layer.tr_atten_tpl = pax_fiddle.Config(
        multi_query_attention.MultiQueryDotProductAttention,
        num_kv_heads=experiment.NUM_KV_HEADS,
        use_rotary_position_emb=True,
    )
    stack.moe_layer_tpl.set(
        input_dims=experiment.MODEL_DIMS,
        hidden_dims=experiment.HIDDEN_DIMS,
        ln_tpl=pax_fiddle.Config(normalizations.RmsNorm, direct_scale=True),
        activation_tpl=pax_fiddle.Config(layers.GELU),
        use_gated_activation=True,
        num_experts=experiment.NUM_EXPERTS,
        num_groups=experiment.NUM_GROUPS,
        expert_capacity_dim=None,
        unadjusted_expert_capacity_factor=2.0,
        moe_load_balance_loss_weight=0.01,
        gating_func="top2",
    )
    return stack


def grok_lm(experiment: Any) -> Any:
    """Return the config of Grok's TransformerLm without its stack."""
    return pax_fiddle.Config(
        layers.TransformerLm,
        name="grok_lm",
        packed_input=True,
        model_dims=experiment.MODEL_DIMS,
        vocab_size=experiment.VOCAB_SIZE,
        position_emb_tpl=None,
        model_type=layers.transformer_models.LanguageModelType.CAUSAL,
        final_ln_tpl=pax_fiddle.Config(
            normalizations.RmsNorm, name="rms_norm", dim=experiment.MODEL_DIMS
        ),
        softmax_tpl=pax_fiddle.Config(
            embedding_softmax.GShardSharedEmbeddingSoftmax,
            name="emb",
            input_dims=experiment.MODEL_DIMS,
            num_classes=experiment.VOCAB_SIZE,
            z_loss_weight=1e-4,
            use_tgt_labels_size_as_loss_denominator=True,
        ),
    )


class GrokSizes:
    """Sizes of Grok-1 and of its runs."""

    NUM_LAYERS = 64
    NUM_HEADS = 48
    NUM_KV_HEADS = 8
    DIMS_PER_HEAD = 128
    MODEL_DIMS = 6144
    HIDDEN_DIMS = 32_768
    VOCAB_SIZE = 131_072
    MAX_SEQ_LEN = 8192
    NUM_EXPERTS = 8
    PERCORE_BATCH_SIZE = 1
    MAX_STEPS = 10


class Grok(GrokSizes, nvidia.NVIDIA1_3B):
    """Grok-1 on 256 GPUs."""

    NUM_GROUPS = 256
    MESH_SHAPE = (1, 1, 8, 1)
    SLICES = (1, 32, 1, 1)

    def task(self) -> Any:
        """Return the task."""
        task = super().task()
        task.train.num_train_steps = self.MAX_STEPS
        task.model.lm_tpl = grok_lm(self)
        task.model.lm_tpl.stacked_transformer_tpl = pax_fiddle.Config(
            layers.StackedTransformerRepeated,
            name="decoder",
            block=grok_layers(self, 1),
            x_times=self.NUM_LAYERS,
            checkpoint_policy=layers.AutodiffCheckpointType.SAVE_QKV_OUT_PROJ,
        )
        return on_mesh(task, self.MESH_SHAPE, self.SLICES)


class Grok_Proxy(Grok):  # noqa: N801
    """16 layers of Grok-1 on 64 GPUs."""

    NUM_LAYERS = 16
    NUM_GROUPS = 64
    SLICES = (1, 8, 1, 1)


class Grok_Proxy_PP(GrokSizes, nvidia.NVIDIA5B):  # noqa: N801
    """16 layers of Grok-1 in eight stages on 512 GPUs."""

    NUM_LAYERS = 16
    NUM_GROUPS = 8
    NUM_STAGES = 8
    NUM_MICROBATCHES = 32
    MICROBATCH_SIZE = None
    ICI_MESH_SHAPE = (8, 1, 1, 1)
    MESH_SHAPE = (1, 1, 1, 8, 1)
    SLICES = (8, 1, 8, 1, 1)

    def task(self) -> Any:
        """Return the task."""
        task = super().task()
        task.train.num_train_steps = self.MAX_STEPS
        task.model.lm_tpl = grok_lm(self)
        task.model.lm_tpl.stacked_transformer_tpl = pax_fiddle.Config(
            layers.PipelinedTransformer,
            pipeline_stage=grok_layers(self, self.NUM_LAYERS // self.NUM_STAGES),
            num_pipeline_stages=self.NUM_STAGES,
            num_pipeline_microbatches=self.NUM_MICROBATCHES,
            stream_io=True,
            checkpoint_policy=layers.AutodiffCheckpointType.SAVE_QKV_OUT_PROJ,
        )
        return on_mesh(task, self.MESH_SHAPE, self.SLICES)


class Grok_PP(Grok_Proxy_PP):  # noqa: N801
    """Grok-1 in eight stages on 512 GPUs."""

    NUM_LAYERS = 64


class NVIDIA_CIRCULAR_REPEAT(  # noqa: N801
    c4.TransformerLmSpmdPipelineAdam, lm_cloud.SyntheticDataset
):
    """32 layers in eight stages that each microbatch passes four times."""

    CHECKPOINT_POLICY = layers.AutodiffCheckpointType.SAVE_DOT_ONLY
    USE_REPEATED_LAYER = False
    DCN_MESH_SHAPE = (1, 1, 1, 1)
    ICI_MESH_SHAPE = (8, 1, 1, 1)
    NUM_STAGES = 8
    NUM_MICROBATCHES = 8
    PERCORE_BATCH_SIZE = 1
    CIRCULAR_REPEAT = 4
    MAX_STEPS = 2000
    NUM_LAYERS = 32
    NUM_HEADS = 32
    MODEL_DIMS = 4096
    HIDDEN_DIMS = 16_384
    DIMS_PER_HEAD = 128
    LEARNING_RATE = 1.6e-4
    CHECKPOINT_EVERY_N_STEPS = 250
    SUMMARY_INTERVAL_STEPS = 10


EXPERIMENTS = (
    GLaM64B64EProxy_EP,
    Grok,
    Grok_Proxy,
    Grok_Proxy_PP,
    Grok_PP,
    NVIDIA_CIRCULAR_REPEAT,
)
