"""Results as tables and plots of the docs."""
