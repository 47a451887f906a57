"""Benchmarks and acceptance runs: programs that print a table and write JSON, never timed tests."""
