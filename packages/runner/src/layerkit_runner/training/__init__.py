"""Training steps: tasks, settings, state, gradients, metrics and cost estimates."""
