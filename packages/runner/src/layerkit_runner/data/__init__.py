"""Inputs of a run: batches from host to devices, their checks, and the data sets of a job."""
