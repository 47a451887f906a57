"""Repair seeded requests on vLLM's CPU build.

While a prompt is computed in pieces, the V1 runner samples after every piece, discards the token and undoes the draw by
moving the generator's offset. CPU generators have no offset, so the step and the engine would fail. Generators that
remember their state undo the draw.

Up to vLLM 0.28 the CPU sampler uses seeds only when every request of the batch has one, so the text of a seeded request
would depend on the other requests. The others get generators too.
"""

from typing import Any

import torch


class RewindableGenerator(torch.Generator):
    """A CPU generator whose last draw can be undone."""

    before: torch.Tensor

    def remember(self) -> None:
        self.before = self.get_state()

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> torch.Generator:
        del offset  # always one draw back, whatever size the runner assumes
        return self.set_state(self.before)


def repair_generators(runner: Any) -> None:
    """Give every request of vLLM's V1 CPU runner a generator before a step with seeded requests, and those whose sample
    is discarded one that can be rewound."""
    batch = runner.input_batch
    for at in range(len(batch.req_ids)):
        if at not in batch.generators:
            batch.generators[at] = spare = torch.Generator()
            spare.seed()  # new generators all begin with the same state
    for at, generator in batch.generators.items():
        if not runner.discard_request_mask.np[at]:
            continue
        if not isinstance(generator, RewindableGenerator):
            rewindable = RewindableGenerator()
            rewindable.set_state(generator.get_state())
            batch.generators[at] = runner.requests[batch.req_ids[at]].generator = generator = rewindable
        generator.remember()
