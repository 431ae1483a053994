"""Plans of a training step for absent devices: memory, traffic, FLOPs and bounds of the time."""
