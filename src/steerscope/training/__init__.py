"""Learning from a running model: vectors by gradient descent, lenses from texts."""
