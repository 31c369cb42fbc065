"""Closed forms that need no GPU: error bounds, traffic, occupancy and rooflines; names of GPUs."""
