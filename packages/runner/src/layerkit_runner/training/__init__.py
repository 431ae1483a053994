"""What a step is made of: its state, what it knows of the devices, what it costs."""
