"""Files: others' read within bounds, our own written whole or not at all."""
