"""One product, from checked operands to a launch."""
