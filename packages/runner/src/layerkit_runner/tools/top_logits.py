"""`--mode=top_logits`: write the most likely tokens of a teacher at each position of the data sets.

Students learn from them without the teacher in memory; see docs/distillation.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax

from layerkit.config.checks import require
from layerkit.ops.distillation import top_log_probs
from layerkit_inputs.mixing.teacher_rows import write_teacher_rows
from layerkit_runner.data.host_inputs import eval_batches, make_input
from layerkit_runner.init_from import InitFrom, Source, plan_first_state
from layerkit_runner.interface.loading import start_reading
from layerkit_runner.run.run_mode import job_errors

if TYPE_CHECKING:
    from layerkit_runner.config.requests import ResolvedExperiment
    from layerkit_runner.run_options import RunOptions


def write_top_logits(resolved: ResolvedExperiment, options: RunOptions) -> int:
    """Write the tokens into the folder TEACHER_LOGITS; return the exit code.

    The experiment has fields as `layerkit_experiments.lm.distill.Distilled`, and `teacher`, the
    resolved experiment of the folder TEACHER.
    """
    experiment: Any = resolved.experiment
    folder: str = getattr(experiment, "TEACHER_LOGITS", None) or ""
    expected = "the folder to write, in an experiment with a teacher"
    require(folder, None, "TEACHER_LOGITS", None, expected)
    teacher = dataclasses.replace(experiment.teacher, partitioner=resolved.partitioner)
    k, temperature = options.extra["k"], experiment.KL_TEMPERATURE
    # The ids that both networks have, as for a teacher in memory.
    size = min(part.task.model.lm_tpl.vocab_size for part in (resolved, teacher))
    require(k <= size, None, "--k", k, f"at most {size}, the size of the vocabulary")
    with job_errors("top_logits", teacher):
        job = start_reading(teacher, folder)
        weights = InitFrom(sources=[Source(folder=experiment.TEACHER)])
        first = plan_first_state(job.partitioner, job.task, weights=weights)()

        def call(state: Any, batch: Any) -> Any:
            def top(model: Any) -> Any:
                packing = {n: batch[n] for n in ("segment_ids", "segment_pos") if n in batch}
                hidden = model.lm.predictors(batch.ids, **packing)
                return model.lm.softmax.token_losses(
                    hidden, batch.labels, lambda x: top_log_probs(x[..., :size], k, temperature)
                )[1]

            model: Any = job.task.model.clone(train=False)
            return model.apply(job.task.decoded_variables(state), method=top)

        compiled = job.partitioner.jit_reading(job.task, call, job.partitioner.batch_sharding())

        def batches(source: Any) -> Iterator[Any]:
            for batch in eval_batches(source):
                rows = compiled(first.state.for_inference(), job.partitioner.put_batch(batch))
                yield batch.provenance, *jax.device_get(rows)

        for config in resolved.datasets:
            data = config.source.clone().set(is_training=False, eval_loop_num_batches=None)
            source, about = make_input(data, job.partitioner), {"teacher": config.teacher}
            write_teacher_rows(folder, source, batches(source), temperature=temperature, **about)
            print(f"wrote {folder}/{source.name}", flush=True)
    return 0
