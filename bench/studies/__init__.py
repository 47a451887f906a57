"""The claims of the docs on real models."""
