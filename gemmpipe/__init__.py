"""gemmpipe: from a model and a kernel to tuned artifacts that inference engines load."""

__version__ = "0.1.0"
