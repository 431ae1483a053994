"""From the gradient of a loss to new weights: gradients, optimizers, schedules."""
