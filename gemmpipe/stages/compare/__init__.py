"""Compares tuned winners, libraries and configurations of engines on the same problems."""
