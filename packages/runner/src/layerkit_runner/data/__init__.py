"""Batches on their way to the devices: which rows a process reads, and what is checked."""
