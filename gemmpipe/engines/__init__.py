"""Facts about inference engines, by engine and version, from their sources; no engine is imported.

Where tuned files must lie, the arguments of a server that make it read them, the kernels that it chooses.
"""
