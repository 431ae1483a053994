"""Losses of arrays, in nats and float32; a file for each kind."""
