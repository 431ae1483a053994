"""Movement of tokens to experts and back, and products of sorted rows with weights of experts."""
