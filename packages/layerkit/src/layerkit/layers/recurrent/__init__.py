"""Recurrent, state-space and linear attention layers, which carry a state along a row."""
