"""SeqIO tasks and mixtures as inputs; TensorFlow is imported when one is built, not before."""
