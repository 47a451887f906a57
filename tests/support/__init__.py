"""Oracles, checkers and tiny models that tests and the programs in bench/ share."""
