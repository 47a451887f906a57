"""The command line: thin typer commands over library calls."""
