"""Harness of all experiments: how they are described, run and saved, and what their results are measured with."""
