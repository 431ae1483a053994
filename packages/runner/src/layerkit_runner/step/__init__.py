"""What is compiled: tasks, train state, gradients, metrics and cost estimates of a step.

It may import `optim`, `files` and `errors`, and nothing that runs on the host alone.
"""
