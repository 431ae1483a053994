"""The processes of one job: their connection, values, monitoring, signals and devices."""
