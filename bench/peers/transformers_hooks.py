"""The fair reference: bare `model.generate` and plain forward hooks, nothing else.

A hook keeps the block's own output tensor: on the CPU nothing is copied, so this is close to the least a
capture can cost.
"""

from functools import partial
from typing import Any

import torch
from _common import Cell, Job, Outcome, main


def build(job: Job) -> dict[str, Cell]:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None  # exactly N tokens, without a logits processor
    generate = partial(
        model.generate,
        job.prompts,
        attention_mask=torch.ones_like(job.prompts),
        max_new_tokens=job.max_new_tokens,
        do_sample=False,
    )
    vector = job.steering_vector(model.config.hidden_size)
    layers = model.model.layers

    def plain() -> Outcome:
        return Outcome(generate())

    def capture() -> Outcome:
        rows: list[torch.Tensor] = []

        def keep(_module: object, _args: object, output: torch.Tensor) -> None:
            rows.append(output)

        handles = [layer.register_forward_hook(keep) for layer in layers]
        try:
            return Outcome(generate(), rows)
        finally:
            for handle in handles:
                handle.remove()

    def steer() -> Outcome:
        def add(_module: object, _args: object, output: torch.Tensor) -> torch.Tensor:
            return output + vector

        handle = layers[job.layer].register_forward_hook(add)
        try:
            return Outcome(generate())
        finally:
            handle.remove()

    return {"plain": plain, "capture": capture, "steer": steer}


if __name__ == "__main__":
    main("transformers_hooks", "transformers", build)
