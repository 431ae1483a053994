"""`--mode=top_logits`: write the most likely tokens of a teacher at each position of the data sets.

Students learn from them without the teacher in memory; see docs/distillation.md.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, cast

import jax

from layerkit.config import target_of
from layerkit.config.checks import require
from layerkit.ops.losses.distillation import top_log_probs
from layerkit_inputs.mixing.stored_rows import StoredRows
from layerkit_runner.data.host_inputs import make_input
from layerkit_runner.init_from import InitFrom, Source, plan_first_state
from layerkit_runner.interface.loading import start_reading
from layerkit_runner.run.job_errors import job_errors
from layerkit_runner.tools.quantize import require_plain_weights

if TYPE_CHECKING:
    from layerkit_runner.config.requests import ResolvedExperiment
    from layerkit_runner.run_options import RunOptions


def write_top_logits(resolved: ResolvedExperiment, options: RunOptions) -> int:
    """Write the files of the data sets, which are `StoredRows`; return the exit code.

    The experiment has a `teacher`, whose weights are in the folder TEACHER, as in `lm.distill`.
    """
    experiment: Any = resolved.experiment
    stored = [config for config in resolved.datasets if target_of(config) is StoredRows]
    expected = "StoredRows, such as those of lm.distill with a folder of a teacher's logits"
    require(stored, None, "datasets", len(resolved.datasets), expected)
    folder: str = stored[0].folder
    teacher = dataclasses.replace(experiment.teacher, partitioner=resolved.partitioner)
    model = resolved.task.model
    k, temperature, size = options.extra["k"], model.temperature, model.num_ids
    require(k <= size, None, "--k", k, f"at most {size}, the size of the vocabulary")
    with job_errors("top_logits", teacher):
        job = start_reading(teacher, folder)
        require_plain_weights(job, "TEACHER", experiment.TEACHER)
        use_ema = job.task.train.decode_use_ema_states
        weights = InitFrom(sources=[Source(folder=experiment.TEACHER, use_ema=use_ema)])
        first = plan_first_state(job.partitioner, job.task, weights=weights)()

        def call(state: Any, batch: Any) -> Any:
            def top(model: Any) -> Any:
                names = ("segment_ids", "segment_pos", "images")
                packing = {n: batch[n] for n in names if n in batch}
                hidden = model.lm.predictors(batch.ids, **packing)
                return model.lm.softmax.token_losses(
                    hidden, batch.labels, lambda x: top_log_probs(x[..., :size], k, temperature)
                )[1]

            model: Any = job.task.model.clone(train=False)
            return model.apply(job.task.decoded_variables(state), method=top)

        compiled = job.partitioner.jit_reading(job.task, call, job.partitioner.batch_sharding())
        state = first.state.for_inference()

        def compute(batch: Any) -> Any:
            ids, log_probs = compiled(state, job.partitioner.put_batch(batch))
            return jax.device_get({"teacher_ids": ids, "teacher_log_probs": log_probs})

        for config in stored:
            cast(StoredRows, make_input(config, job.partitioner)).write(compute)
            print(f"wrote {folder}/{config.name}", flush=True)
    return 0
