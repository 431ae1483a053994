"""Attention kernels for GPUs and TPUs. They import masks and biases of `layerkit.ops.attention`."""
