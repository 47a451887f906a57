"""Forwards with learnable ops at the engine's own taps, and their loss in nats.

At each tap a vector is added. With `rank` r, r unit directions follow of which a learned part is kept, each by an
`Ablate`: together a symmetric update of rank r. At the start all of each direction is kept, which changes nothing.

Each forward runs in the engine's thread, between two steps of its requests, and leaves the model as it was: requests
beside a training run are slower, but their results are the same. The residual stream before the first op does not
depend on what was learned: it is computed once for every text and cached, and later forwards begin there.
"""

import contextlib
import functools
import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize
from torch.nn.utils.rnn import pad_sequence

from steerscope.core.equation import Operands
from steerscope.core.sites import tap_of
from steerscope.core.slot_table import SlotTable
from steerscope.engines.hf import HFEngine
from steerscope.engines.hf.blocks import first
from steerscope.engines.hf.forward_index import Pass, SteeredTokens
from steerscope.engines.hf.taps import Taps
from steerscope.extraction.runs import batches
from steerscope.specs.steering import Ablate, Add, Coefficients, Site
from steerscope.training.texts import TrainingSample


class Learnable(nn.Module):
    def __init__(
        self, layers: Sequence[int], site: Site, start: Mapping[int, Tensor], hidden: int, rank: int = 0, seed: int = 0
    ) -> None:
        """Layers without a vector in `start` begin at zero."""
        super().__init__()
        self.layers = tuple(layers)
        self.rank = rank
        self.site: Site = site
        zero = torch.zeros(hidden)
        generator = torch.Generator().manual_seed(seed)
        self.added = nn.Parameter(torch.stack([start.get(layer, zero).float() for layer in self.layers]))
        if rank:
            drawn = torch.randn(len(self.layers), rank, hidden, generator=generator)
            self.directions = nn.Parameter(normalize(drawn, dim=-1))
            self.kept = nn.Parameter(torch.ones(len(self.layers), rank))

    def columns(self, layer: int, rows: int) -> list[Operands]:
        """Return the ops at a layer for a number of rows."""
        i = self.layers.index(layer)
        made = [_operands(self.added[i], Add(vector=[1.0]).coefficients(), rows)]
        for j in range(self.rank):
            column = _operands(normalize(self.directions[i, j], dim=-1), Ablate(vector=[1.0]).coefficients(), rows)
            made.append(column._replace(s=self.kept[i, j].expand(rows)))
        return made

    def vectors(self) -> dict[int | None, Tensor]:
        return {layer: self.added[i].detach().clone() for i, layer in enumerate(self.layers)}

    def ops(self, tokens: str = "all") -> list[Add | Ablate]:
        """Return the ops of a request that steers these tokens; a vector that is still zero has no op."""
        made: list[Add | Ablate] = []
        for i, layer in enumerate(self.layers):
            if self.added[i].any():
                made.append(Add(vector={layer: self.added[i]}, site=self.site, tokens=tokens))
            for j in range(self.rank):
                kept = float(self.kept[i, j].detach())
                way = self.directions[i, j]
                made.append(Ablate(vector={layer: way}, site=self.site, tokens=tokens, scale=kept))
        return made


def _operands(v: Tensor, coefficients: Coefficients, rows: int) -> Operands:
    c, s, m, lo, hi = (torch.full((rows,), number, device=v.device) for number in coefficients)
    return Operands(v.expand(rows, -1), c, s, m, lo, hi, torch.zeros(rows, dtype=torch.long, device=v.device))


def perplexity(nats: float) -> float:
    """Return the perplexity of a mean loss, infinite where it exceeds the floats."""
    return math.exp(nats) if nats < 700 else math.inf


_MAX_CACHED_BYTES = 2 << 30  # beyond, every forward runs all blocks


class _StreamReached(Exception):
    """Ends a forward whose remaining blocks are not needed."""


@dataclass(frozen=True, slots=True)
class CachedStreams:
    """Residual streams after the first `blocks` blocks, [tokens, hidden] each."""

    blocks: int
    by_sample: dict[TrainingSample, Tensor]
    in_tuple: bool  # how the last of these blocks returns its stream


class TrainingPasses:
    """Forwards and backwards of the engine's model with frozen weights."""

    def __init__(self, engine: HFEngine, batch: int, checkpointing: bool = False) -> None:
        self._engine = engine
        self.model = engine.model
        self.batch = batch
        self.checkpointing = checkpointing
        self.blocks = engine.blocks
        self._taps = Taps(self.blocks, SlotTable(engine.facts.hidden, 2, engine.model.device))
        self._selects = "logits_to_keep" in inspect.signature(engine.model.forward).parameters

    @contextlib.contextmanager
    def _frozen(self) -> Iterator[None]:
        """Freeze the weights during the block. For checkpointing only the blocks themselves are set to training, not
        the dropout inside them."""
        free = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        modules = [block.module for block in self.blocks.blocks] if self.checkpointing else []
        try:
            self.model.requires_grad_(False)
            if modules:
                self.model.gradient_checkpointing_enable({"use_reentrant": False})
                self.model.disable_input_require_grads()  # enabled with it, and not needed below the ops
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

    def nats(
        self, samples: Sequence[TrainingSample], ops: Learnable | None = None, streams: CachedStreams | None = None
    ) -> float:
        """Return the mean loss per target token."""
        total = sum(float(self.loss(batch, ops, streams)) for batch in batches(samples, self.batch))
        return total / sum(len(sample.targets) for sample in samples)

    def loss(
        self,
        batch: Sequence[TrainingSample],
        ops: Learnable | None,
        streams: CachedStreams | None,
        backward: bool = False,
    ) -> Tensor:
        """Return the sum over the target tokens; with `backward`, add its gradients to those of the ops."""
        return self._engine.exclusively(functools.partial(self._loss, batch, ops, streams, backward))

    def _loss(
        self, batch: Sequence[TrainingSample], ops: Learnable | None, streams: CachedStreams | None, backward: bool
    ) -> Tensor:
        device = self.model.device
        ids = pad_sequence([torch.tensor(sample.token_ids[:-1]) for sample in batch], batch_first=True).to(device)
        width = ids.shape[1]
        lengths = torch.tensor([[sample.width] for sample in batch], device=device)
        mask = None if bool((lengths == width).all()) else torch.arange(width, device=device) < lengths
        columns = sorted({at - 1 for sample in batch for at in sample.targets})
        place = {column: i for i, column in enumerate(columns)}
        rows = [i for i, sample in enumerate(batch) for _ in sample.targets]
        wanted = [at for sample in batch for at in sample.targets]
        targets = torch.tensor([sample.token_ids[at] for sample in batch for at in sample.targets], device=device)
        some = {"logits_to_keep": torch.tensor(columns, device=device)} if self._selects else {}
        with (
            torch.set_grad_enabled(backward),
            self._frozen(),
            self._steered(batch, width, ops),
            self._begun(batch, width, streams),
        ):
            logits = self.model(input_ids=ids, attention_mask=mask, use_cache=False, **some).logits
            at = [place[t - 1] if self._selects else t - 1 for t in wanted]
            loss = cross_entropy(logits[rows, at].float(), targets, reduction="sum")
            if backward:
                loss.backward()
        return loss.detach()

    @contextlib.contextmanager
    def _steered(self, batch: Sequence[TrainingSample], width: int, ops: Learnable | None) -> Iterator[None]:
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
        columns = {tap_of(layer, ops.site): ops.columns(layer, len(found)) for layer in ops.layers}
        now = Pass(steered=SteeredTokens(index, columns=columns))
        with self._taps.attached(columns), self._taps.during(now, any_thread=self.checkpointing):
            yield

    # --- cached streams

    def keep(self, samples: Sequence[TrainingSample], ops: Learnable) -> CachedStreams | None:
        """Compute the streams before the first op; None where there is none, or too much to cache."""
        taps = [tap_of(layer, ops.site) for layer in ops.layers]
        blocks = min(layer + (site == "resid_post") for layer, site in taps)
        size = sum(sample.width for sample in samples) * ops.added.shape[-1] * self.model.dtype.itemsize
        if not blocks or size > _MAX_CACHED_BYTES:
            return None
        streams: dict[TrainingSample, Tensor] = {}
        seen: list[Tensor | tuple[Tensor, ...]] = []

        def take(_module: nn.Module, _args: tuple, output: Tensor | tuple[Tensor, ...]) -> None:
            seen.append(output)
            raise _StreamReached

        def run(batch: Sequence[TrainingSample]) -> None:
            handle = self.blocks[blocks - 1].module.register_forward_hook(take)
            try:
                with contextlib.suppress(_StreamReached):
                    self._loss(batch, None, None, backward=False)
            finally:
                handle.remove()

        for batch in batches(samples, self.batch):
            self._engine.exclusively(functools.partial(run, batch))
            for sample, stream in zip(batch, first(seen[-1]), strict=True):
                streams[sample] = stream[: sample.width].clone()
            del seen[:-1]
        return CachedStreams(blocks, streams, isinstance(seen[-1], tuple))

    @contextlib.contextmanager
    def _begun(self, batch: Sequence[TrainingSample], width: int, streams: CachedStreams | None) -> Iterator[None]:
        """Replace the blocks before the first op by their cached stream."""
        if streams is None:
            yield
            return
        stream = pad_sequence([streams.by_sample[sample] for sample in batch], batch_first=True)
        assert stream.shape[1] == width
        modules = [block.module for block in self.blocks.blocks[: streams.blocks]]
        before = [module.__dict__.get("forward") for module in modules]

        def hand_on(*_: object, **__: object) -> Tensor | tuple[Tensor]:
            return (stream,) if streams.in_tuple else stream

        try:
            for module in modules:
                module.forward = hand_on
            yield
        finally:
            for module, own in zip(modules, before, strict=True):
                del module.forward
                if own is not None:
                    module.forward = own
