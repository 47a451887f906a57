"""Lens packs as others, and we, write them."""
