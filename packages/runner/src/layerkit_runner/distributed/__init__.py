"""The processes of one job: how they meet, tell one another things, watch one another and stop."""
