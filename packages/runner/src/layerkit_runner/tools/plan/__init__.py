"""What a training step needs of devices that are not here: memory, traffic and FLOPs."""

from layerkit_runner.tools.plan.plan import BatchPlan, Plan, make_plan

__all__ = ["BatchPlan", "Plan", "make_plan"]
