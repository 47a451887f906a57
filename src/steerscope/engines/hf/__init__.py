"""The transformers engine: any causal language model, on any machine."""

from steerscope.engines.hf.engine import HFEngine

__all__ = ["HFEngine"]
