"""The side of vLLM that runs in the client's process: requests in, texts and rows out."""
