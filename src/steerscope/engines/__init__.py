"""What runs the model: `hf` (transformers) here, behind one protocol."""
