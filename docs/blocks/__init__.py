"""Generated tables of README and docs/, and the stages' measurements: ``python docs/generate.py``."""
