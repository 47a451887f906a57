"""nnsight: `TransformersModel.generate` traced; `tracer.cache` over the layers, `tracer.iter` for the steering.

The trace blocks are compiled from this file's source at first use, which the warm-up run pays for.
"""

from typing import Any

import torch
from _common import Cell, Job, Outcome, main


def build(job: Job) -> dict[str, Cell]:
    from nnsight import TransformersModel, save  # pyright: ignore[reportMissingImports]

    model: Any = TransformersModel(
        str(job.model), task="text-generation", dtype=torch.float32, device="cpu", dispatch=True
    )
    model.generation_config.eos_token_id = None
    layers = list(model.model.layers)
    vector = job.steering_vector(model.config.hidden_size)
    steps = job.max_new_tokens
    inputs = {"input_ids": job.prompts, "attention_mask": torch.ones_like(job.prompts)}
    options = {"max_new_tokens": steps, "do_sample": False}

    def plain() -> Outcome:
        return Outcome(model.generate(inputs, **options))

    def capture() -> Outcome:
        with model.generate(inputs, **options) as tracer:
            cache = tracer.cache(modules=layers)
            tokens = save(tracer.result)
        return Outcome(tokens, [row for layer in layers for row in cache[layer.path].output])

    def steer() -> Outcome:
        with model.generate(inputs, **options) as tracer:
            for _ in tracer.iter[:steps]:
                model.model.layers[job.layer].output[:] += vector
            tokens = save(tracer.result)
        return Outcome(tokens)

    return {"plain": plain, "capture": capture, "steer": steer}


if __name__ == "__main__":
    main("nnsight", "nnsight", build)
