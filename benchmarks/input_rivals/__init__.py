"""What `benchmarks/input.py` compares readers with: the same work without this project."""
