"""Random requests against an engine or a server, each row and token against plain transformers, and a ledger."""
