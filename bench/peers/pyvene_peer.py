"""pyvene: an `IntervenableModel` with one intervention per layer, `generate` under its hooks.

`intervene_on_prompt=True` without unit locations makes it act on every position of every step (the default skips the
prompt). `keep_last_dim` keeps a collected [batch, position, hidden] tensor whole; `capture:default` shows what the
collection returns without it.
"""

from functools import partial
from typing import Any

import torch
from _common import Cell, Job, Outcome, main


def build(job: Job) -> dict[str, Cell]:
    import pyvene  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    width = model.config.hidden_size
    base = {"input_ids": job.prompts, "attention_mask": torch.ones_like(job.prompts)}

    def intervenable(interventions: dict[int, Any]) -> Any:
        places = [
            {"layer": layer, "component": "block_output", "intervention": intervention}
            for layer, intervention in interventions.items()
        ]
        return pyvene.IntervenableModel(places, model)

    def generate(intervened: Any) -> tuple[Any, torch.Tensor]:
        return intervened.generate(base, intervene_on_prompt=True, max_new_tokens=job.max_new_tokens, do_sample=False)

    def collector(keep_last_dim: bool) -> Any:
        layers = range(model.config.num_hidden_layers)
        return intervenable(
            {layer: pyvene.CollectIntervention(embed_dim=width, keep_last_dim=keep_last_dim) for layer in layers}
        )

    add = pyvene.AdditionIntervention(embed_dim=width, source_representation=job.steering_vector(width))
    untouched = intervenable({})
    steering = intervenable({job.layer: add})

    def capture(collecting: Any) -> Outcome:
        (_, rows), tokens = generate(collecting)
        return Outcome(tokens, rows)

    return {
        "plain": lambda: Outcome(generate(untouched)[1]),
        "capture": partial(capture, collector(keep_last_dim=True)),
        "capture:default": partial(capture, collector(keep_last_dim=False)),
        "steer": lambda: Outcome(generate(steering)[1]),
    }


if __name__ == "__main__":
    main("pyvene", "pyvene", build)
