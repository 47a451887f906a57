"""TransformerLens: `TransformerBridge.generate` on token tensors, with `bridge.hooks` on the block outputs.

The bridge always runs its own eager attention. `hf_generate` under the same hooks took the same time, and
generating then calling `run_with_cache` took longer.
"""

from typing import Any

import torch
from _common import Cell, Job, Outcome, main


def build(job: Job) -> dict[str, Cell]:
    from transformer_lens.model_bridge import TransformerBridge  # pyright: ignore[reportMissingImports]

    bridge: Any = TransformerBridge.boot_transformers(str(job.model), device="cpu", dtype=torch.float32)
    names = [f"blocks.{layer}.hook_out" for layer in range(bridge.cfg.n_layers)]
    vector = job.steering_vector(bridge.cfg.d_model)

    def plain() -> Outcome:
        tokens = bridge.generate(
            job.prompts,
            max_new_tokens=job.max_new_tokens,
            do_sample=False,
            stop_at_eos=False,
            return_type="tokens",
            verbose=False,
        )
        return Outcome(tokens)

    def capture() -> Outcome:
        rows: list[torch.Tensor] = []

        def keep(tensor: torch.Tensor, hook: object) -> None:  # noqa: ARG001 - the library passes it by name
            rows.append(tensor)

        with bridge.hooks(fwd_hooks=[(name, keep) for name in names]):
            return Outcome(plain().tokens, rows)

    def steer() -> Outcome:
        def add(tensor: torch.Tensor, hook: object) -> torch.Tensor:  # noqa: ARG001
            return tensor + vector

        with bridge.hooks(fwd_hooks=[(names[job.layer], add)]):
            return plain()

    return {"plain": plain, "capture": capture, "steer": steer}


if __name__ == "__main__":
    main("transformer_lens", "transformer-lens", build)
