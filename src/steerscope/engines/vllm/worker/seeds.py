"""Seeded requests on vLLM's CPU build.

While a prompt is fed in pieces, the V1 runner samples after every piece, throws the token away and takes the draw back
by moving the generator's offset. CPU generators have no offset: there the step fails, and the engine with it.
Generators that remember their state give it what it needs.

Up to vLLM 0.28 the sampler for CPUs looks at seeds only when every request of the batch has one, so that the text of a
seeded request depends on who runs beside it. The others get generators too.
"""

from typing import Any

import torch


class Rewindable(torch.Generator):
    """A CPU generator whose last draw can be taken back."""

    before: torch.Tensor

    def remember(self) -> None:
        self.before = self.get_state()

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> torch.Generator:
        del offset  # one draw back, whatever the runner thinks its size is
        return self.set_state(self.before)


def mend(runner: Any) -> None:  # vLLM's V1 CPU runner, its inputs prepared
    """Before a step with seeded requests: all have a generator, and where the sample will be thrown away it can go
    back."""
    batch = runner.input_batch
    for at in range(len(batch.req_ids)):
        if at not in batch.generators:
            batch.generators[at] = spare = torch.Generator()
            spare.seed()  # all new ones begin alike
    for at, generator in batch.generators.items():
        if not runner.discard_request_mask.np[at]:
            continue
        if not isinstance(generator, Rewindable):
            mended = Rewindable()
            mended.set_state(generator.get_state())
            batch.generators[at] = runner.requests[batch.req_ids[at]].generator = generator = mended
        generator.remember()
