"""Forwards with learnable ops at the engine's own taps, and what they cost in nats.

Each runs in the engine's thread, between two steps of its requests, and leaves the model as it was: requests beside a
training run are slower, and are not changed by it.

A block before the first op gives the same stream whatever was learned so far: it runs once for every text, the stream
behind it is kept, and later forwards begin there.
"""

import contextlib
import functools
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from steerscope.core.sites import tap_of
from steerscope.core.slot_table import SlotTable
from steerscope.engines.hf import HFEngine
from steerscope.engines.hf.blocks import first
from steerscope.engines.hf.taps import Pass, Taps, Work
from steerscope.training.learnable import Learnable
from steerscope.training.texts import Sample

_MOST_KEPT = 2 << 30  # bytes of streams; beyond, every forward runs all blocks


class _Enough(Exception):
    """The rest of a forward is not needed."""


@dataclass(frozen=True, slots=True)
class Kept:
    """Streams behind the first `blocks` blocks, [tokens, hidden] each."""

    blocks: int
    streams: dict[Sample, Tensor]
    in_tuple: bool  # how the last of these blocks returns its stream


class Passes:
    """The engine's model, frozen during each forward and its way back."""

    def __init__(self, engine: HFEngine, batch: int, checkpointing: bool = False) -> None:
        self._engine = engine
        self.model, self.batch, self.checkpointing = engine.model, batch, checkpointing
        self.blocks = engine.blocks
        self._taps = Taps(self.blocks, SlotTable(engine.facts.hidden, 2, engine.model.device))
        self._selects = "logits_to_keep" in inspect.signature(engine.model.forward).parameters

    @contextlib.contextmanager
    def _frozen(self) -> Iterator[None]:
        """Weights are frozen inside and free again after; with checkpointing, blocks are computed again on the way
        back. Only the blocks are told that they train: their dropout is not."""
        free = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        modules = [block.module for block in self.blocks.blocks] if self.checkpointing else []
        try:
            self.model.requires_grad_(False)
            if modules:
                self.model.gradient_checkpointing_enable({"use_reentrant": False})
                self.model.disable_input_require_grads()  # what was enabled with it: nothing below the ops needs any
            for module in modules:
                module.training = True
            yield
        finally:
            for module in modules:
                module.training = False
            if modules:
                self.model.gradient_checkpointing_disable()
            for parameter in free:
                parameter.requires_grad_(True)

    def batches(self, samples: Sequence[Sample]) -> Iterator[list[Sample]]:
        for i in range(0, len(samples), self.batch):
            yield list(samples[i : i + self.batch])

    def nats(self, samples: Sequence[Sample], ops: Learnable | None = None, kept: Kept | None = None) -> float:
        """Mean loss per token that counts."""
        total = sum(float(self.loss(batch, ops, kept)) for batch in self.batches(samples))
        return total / sum(len(sample.targets) for sample in samples)

    def loss(self, batch: list[Sample], ops: Learnable | None, kept: Kept | None, backward: bool = False) -> Tensor:
        """Summed over the tokens that count; with `backward` its gradients are added to those of the ops."""
        return self._engine.exclusively(functools.partial(self._loss, batch, ops, kept, backward))

    def _loss(self, batch: list[Sample], ops: Learnable | None, kept: Kept | None, backward: bool) -> Tensor:
        width, device = max(sample.width for sample in batch), self.model.device
        ids = torch.zeros(len(batch), width, dtype=torch.long, device=device)
        for row, sample in zip(ids, batch, strict=True):
            row[: sample.width] = torch.tensor(sample.token_ids[:-1], device=device)
        lengths = torch.tensor([[sample.width] for sample in batch], device=device)
        mask = None if bool((lengths == width).all()) else torch.arange(width, device=device) < lengths
        columns = sorted({at - 1 for sample in batch for at in sample.targets})
        place = {column: i for i, column in enumerate(columns)}
        rows = [i for i, sample in enumerate(batch) for _ in sample.targets]
        wanted = [at for sample in batch for at in sample.targets]
        truth = torch.tensor([sample.token_ids[at] for sample in batch for at in sample.targets], device=device)
        some = {"logits_to_keep": torch.tensor(columns, device=device)} if self._selects else {}
        with (
            torch.set_grad_enabled(backward),
            self._frozen(),
            self._steered(batch, width, ops),
            self._begun(batch, width, kept),
        ):
            logits = self.model(input_ids=ids, attention_mask=mask, use_cache=False, **some).logits
            at = [place[t - 1] if self._selects else t - 1 for t in wanted]
            loss = cross_entropy(logits[rows, at].float(), truth, reduction="sum")
            if backward:
                loss.backward()
        return loss.detach()

    @contextlib.contextmanager
    def _steered(self, batch: list[Sample], width: int, ops: Learnable | None) -> Iterator[None]:
        if ops is None:
            yield
            return
        found = [
            i * width + at
            for i, sample in enumerate(batch)
            for a, b in sample.steered.within(0, sample.width)
            for at in range(a, b)
        ]
        index = torch.tensor(found, dtype=torch.long, device=self.model.device)
        now = Pass(steered=index)
        for layer in ops.layers:
            now.work[tap_of(layer, ops.site)] = Work([], ops.columns(layer, len(found)), [])
        self._taps.attach(now.work)
        try:
            with self._taps.during(now, any_thread=self.checkpointing):
                yield
        finally:
            self._taps.attach(())

    # --- streams that do not change

    def keep(self, samples: Sequence[Sample], ops: Learnable) -> Kept | None:
        """Run what comes before the first op once; None where there is nothing, or too much to keep."""
        taps = [tap_of(layer, ops.site) for layer in ops.layers]
        blocks = min(layer + (site == "resid_post") for layer, site in taps)
        size = sum(sample.width for sample in samples) * ops.added.shape[-1] * self.model.dtype.itemsize
        if not blocks or size > _MOST_KEPT:
            return None
        streams: dict[Sample, Tensor] = {}
        seen: list[Tensor | tuple[Tensor, ...]] = []

        def take(_module: nn.Module, _args: tuple, output: Tensor | tuple[Tensor, ...]) -> None:
            seen.append(output)
            raise _Enough

        def run(batch: list[Sample]) -> None:
            handle = self.blocks[blocks - 1].module.register_forward_hook(take)
            try:
                with contextlib.suppress(_Enough):
                    self._loss(batch, None, None, backward=False)
            finally:
                handle.remove()

        for batch in self.batches(samples):
            self._engine.exclusively(functools.partial(run, batch))
            for sample, stream in zip(batch, first(seen[-1]), strict=True):
                streams[sample] = stream[: sample.width].clone()
            del seen[:-1]
        return Kept(blocks, streams, isinstance(seen[-1], tuple))

    @contextlib.contextmanager
    def _begun(self, batch: list[Sample], width: int, kept: Kept | None) -> Iterator[None]:
        """Blocks whose stream is kept hand it on instead of running."""
        if kept is None:
            yield
            return
        stream = nn.utils.rnn.pad_sequence([kept.streams[sample] for sample in batch], batch_first=True)
        assert stream.shape[1] == width
        modules = [block.module for block in self.blocks.blocks[: kept.blocks]]
        before = [module.__dict__.get("forward") for module in modules]

        def hand_on(*_: object, **__: object) -> Tensor | tuple[Tensor]:
            return (stream,) if kept.in_tuple else stream

        try:
            for module in modules:
                module.forward = hand_on
            yield
        finally:
            for module, own in zip(modules, before, strict=True):
                del module.forward
                if own is not None:
                    module.forward = own
