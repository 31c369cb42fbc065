"""Functions of the notebooks: devices, sources, timings, predictions and answers that are checked."""
