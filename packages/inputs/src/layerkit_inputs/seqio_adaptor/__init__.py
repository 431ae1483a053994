"""Inputs of SeqIO tasks and mixtures, which import TensorFlow when they are built."""
