"""What `--mode` chooses, one file each, and the reports that a training run prints."""
