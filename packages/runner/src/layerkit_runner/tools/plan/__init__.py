"""Plans of a training step for absent devices: memory, traffic, FLOPs and bounds of the time."""

from layerkit_runner.tools.plan.plan import BatchPlan, Plan, make_plan

__all__ = ["BatchPlan", "Plan", "make_plan"]
