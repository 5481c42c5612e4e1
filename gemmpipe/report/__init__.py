"""Results of finished runs for people: figures, and their presentation as text and pages."""
