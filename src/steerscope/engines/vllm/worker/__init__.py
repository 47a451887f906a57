"""The side of vLLM that runs in every worker process: taps, the index of a step, and rows on their way out."""
