"""Recording the matrix products of a running program."""
