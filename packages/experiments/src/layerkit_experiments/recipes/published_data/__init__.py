"""Published data sets: their texts, tasks and prompts."""
