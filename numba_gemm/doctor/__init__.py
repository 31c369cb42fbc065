"""Find what this machine lacks, and print the command that fixes it."""
