"""interp-engine, its eager backend (the transformers one).

Its own generation takes one prompt at a time, so a batch goes one request after another, and its
`capture_generation` runs the whole text through the model once more: those are the `:per_request` cells. The plain
names are the fastest we found with its public parts: one batched `model.hf_model.generate` under its `HookManager`
and `steer`. SDPA replaces its default eager attention, which only the attention points need.
"""

from functools import partial
from typing import Any

import torch
from _common import Cell, Job, Outcome, main


def build(job: Job) -> dict[str, Cell]:
    import interp_engine as ie  # pyright: ignore[reportMissingImports]

    model: Any = ie.load_model(str(job.model), backend="eager", dtype="float32", attn_implementation="sdpa")
    model.hf_model.generation_config.eos_token_id = None
    model.tokenizer.eos_token = None  # `capture_generation` has no switch to ignore EOS
    points = [ie.Address("resid_post", layer) for layer in range(model.n_layers)]
    addition = ie.AddSpec(job.steering_vector(model.d_model), 1.0)
    spec = ie.SteeringSpec(layers={job.layer: ie.LayerSteeringSpec(operations=[addition])})
    one_by_one = {"max_tokens": job.max_new_tokens, "temperature": 0.0}
    generate = partial(
        model.hf_model.generate,
        job.prompts,
        attention_mask=torch.ones_like(job.prompts),
        max_new_tokens=job.max_new_tokens,
        do_sample=False,
    )

    def capture() -> Outcome:
        rows: list[torch.Tensor] = []
        with ie.HookManager() as hooks:
            for point in points:
                module, side = model.resolve_point(point.name, point.layer)
                hooks.read(module, rows.append, point=side)
            return Outcome(generate(), rows)

    def steer() -> Outcome:
        with ie.steer(model, spec):
            return Outcome(generate())

    def plain_per_request() -> Outcome:
        streams = [ie.generate_stream(model, prompt, **one_by_one) for prompt in job.prompts]
        return Outcome(torch.tensor([[step.token_id for step in stream] for stream in streams]))

    def capture_per_request() -> Outcome:
        done = [ie.capture_generation(model, prompt, points, **one_by_one) for prompt in job.prompts]
        tokens = torch.tensor([completion.token_ids for completion, _ in done])
        return Outcome(tokens, [cache[point] for _, cache in done for point in points])

    def steer_per_request() -> Outcome:
        with ie.steer(model, spec):
            return plain_per_request()

    return {
        "plain": lambda: Outcome(generate()),
        "capture": capture,
        "steer": steer,
        "plain:per_request": plain_per_request,
        "capture:per_request": capture_per_request,
        "steer:per_request": steer_per_request,
    }


if __name__ == "__main__":
    main("interp_engine", "interp-engine", build)
