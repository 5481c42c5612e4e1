"""From a kernel and its arguments to a call: compiling, loading, binding, and the memory between launches."""
