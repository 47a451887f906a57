"""Learning from a running model: lenses from texts."""
