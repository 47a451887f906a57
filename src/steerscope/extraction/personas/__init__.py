"""Personas: role and trait definitions in, steering vectors, an axis and caps out."""
