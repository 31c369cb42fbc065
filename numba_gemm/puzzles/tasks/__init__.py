"""One file per puzzle: the statement, the kernel with its solution marked, hints, cases and limits."""
