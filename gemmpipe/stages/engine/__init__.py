"""Tuning the functions of inference engines for the configuration files that they load."""
