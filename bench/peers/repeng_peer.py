"""repeng: `ControlModel` wraps the layers it steers. It steers a whole batch alike and does not capture."""

from functools import partial
from typing import Any

import torch
from _common import Cell, Job, Outcome, main


def build(job: Job) -> dict[str, Cell]:
    from repeng import ControlModel, ControlVector  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    control = ControlModel(model, [job.layer])
    generate = partial(
        control.generate,
        job.prompts,
        attention_mask=torch.ones_like(job.prompts),
        max_new_tokens=job.max_new_tokens,
        do_sample=False,
    )
    direction = job.steering_vector(model.config.hidden_size).numpy()
    vector = ControlVector(model_type=model.config.model_type, directions={job.layer: direction})

    def plain() -> Outcome:
        control.reset()
        return Outcome(generate())

    def steer() -> Outcome:
        control.set_control(vector, 1.0)
        return Outcome(generate())

    return {
        "plain": plain,
        "capture": "no capture during generation: repeng reads only the last prompt token, to train vectors",
        "steer": steer,
    }


if __name__ == "__main__":
    main("repeng", "repeng", build)
