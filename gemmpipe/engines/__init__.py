"""Facts about inference engines, by engine and version, from their sources; no engine is imported.

The folders from which engines read tuned files, the servers' arguments for that, and the kernels that they choose.
"""
