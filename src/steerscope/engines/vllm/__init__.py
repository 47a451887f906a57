"""The vLLM engine: stock vLLM, tapped inside its compiled forward."""
