"""Readers of encoded images with labels, and augmentations; import grain and hugging_face."""
