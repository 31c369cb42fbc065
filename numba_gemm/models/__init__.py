"""Closed forms that need no GPU: error bounds, traffic and rooflines."""
