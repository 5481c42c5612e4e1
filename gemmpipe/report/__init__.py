"""What finished runs found, for people: figures, and their presentation as text and pages."""
