"""Learn a steering vector by gradient descent through a frozen model.

A run is a folder: `settings.json`, `train.jsonl` (a line per step), `checkpoint.safetensors` (where it stands and the
best so far on the validation texts, written after every step, a few KB), and at the end `vector.safetensors`,
`result.json` and `loss.svg`. What was interrupted goes on with the step it was at and ends with the same numbers; what
is finished is not run again.
"""

import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from steerscope.core.sites import refusal
from steerscope.engines.sync import SyncEngine
from steerscope.extraction.personas.folder import write_json
from steerscope.files import atomic_path, reading
from steerscope.specs.base import Spec
from steerscope.specs.errors import InvalidRequest, Problem, SteerscopeError
from steerscope.specs.steering import Site, Steering, parse_layers
from steerscope.specs.tokens import Tokens
from steerscope.training.course import Course
from steerscope.training.curves import loss_plot
from steerscope.training.learnable import Learnable, perplexity
from steerscope.training.passes import Kept
from steerscope.training.state import State
from steerscope.training.texts import Sample, TrainingSet
from steerscope.vectors.files import save as save_vector
from steerscope.vectors.vector import Json, SteeringVector

Line = dict[str, float]  # of train.jsonl: step, epoch, loss, learning_rate, norm, and validation at an epoch's end
Told = Callable[[Line, int], None]  # and how many steps there are at most


class TrainSettings(Spec):
    """What is learned, and how.

    `init`: zero, mean-diff (of a contrast set), or a vector file. `target_tokens` and `val_tokens` bound the tokens
    that count in training and validation; `patience` ends a run after that many epochs without a better one.
    """

    layers: tuple[int, ...] = Field(min_length=1)
    site: Site = "resid_post"
    tokens: Tokens = "all"
    rank: int = Field(default=0, ge=0, le=64)
    learning_rate: float = Field(default=1.0, gt=0, le=100)
    schedule: Literal["cosine", "constant"] = "cosine"
    epochs: int = Field(default=6, ge=1)
    batch: int = Field(default=8, ge=1)
    target_tokens: int | None = Field(default=None, ge=1)
    val_tokens: int | None = Field(default=None, ge=1)
    patience: int | None = Field(default=None, ge=1)
    init: str = "zero"
    gradient_checkpointing: bool = False
    seed: int = Field(default=0, ge=0, lt=2**31)

    @field_validator("layers", mode="before")
    @classmethod
    def _layers(cls, value: object) -> object:
        layers = parse_layers(value)
        if layers == "all":
            raise ValueError("all layers at once are too many; name one, or some as 10-14")
        return layers

    @model_validator(mode="after")
    def _init(self) -> Self:
        if self.init not in ("zero", "mean-diff") and not Path(self.init).exists():
            raise ValueError(f"init {self.init!r} is no file; write zero, mean-diff or the name of a vector file")
        return self


class Result(Spec):
    """Perplexities are of the validation texts, per token that counts; `prompted` is that of the best prompt."""

    steered: float
    unsteered: float
    prompted: float | None
    prompt: str | None
    best_epoch: int
    epochs: int
    steps: int
    train_tokens: int
    val_tokens: int
    norms: dict[int, float]


@dataclass(frozen=True, slots=True)
class Learned:
    """What `train` gives back."""

    vector: SteeringVector
    steering: Steering  # all that was learned: the same as the vector at scale 1, and the ops of a low-rank update
    result: Result


def course_for(
    engine: SyncEngine, data: TrainingSet, settings: TrainSettings, prompts: tuple[str, ...] | None = None
) -> Course:
    """What runs with these settings share, whatever their layers and learning rates."""
    return Course(engine, data, prompts=prompts, **shared_settings(settings))


def shared_settings(settings: TrainSettings) -> dict[str, Any]:
    """Those that runs on one course have in common."""
    names = ("tokens", "target_tokens", "val_tokens", "batch", "seed", "gradient_checkpointing")
    return {name: getattr(settings, name) for name in names}


def train(
    engine: SyncEngine,
    data: TrainingSet,
    out: str | Path,
    settings: TrainSettings,
    *,
    prompts: tuple[str, ...] | None = None,
    told: Told | None = None,
) -> Learned:
    """Train in the folder `out`, or go on there. `prompts` replace those the set brings for the prompted baseline."""
    return train_on(course_for(engine, data, settings, prompts), out, settings, told)


def train_on(course: Course, out: str | Path, settings: TrainSettings, told: Told | None = None) -> Learned:
    """The same on texts that are in hand."""
    _check(course, settings)
    folder = Path(out)
    about = _about(folder / "settings.json", course, settings)
    run = _Run(course, settings, folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "settings.json", about)
    if not (folder / "result.json").is_file():
        run.go(told)
    with reading(folder / "result.json", "result of a training run"):
        result = Result.from_json((folder / "result.json").read_bytes())
    run.state.load(run.checkpoint)
    run.state.use_best()
    return Learned(run.vector(), run.steering(), result)


def _check(course: Course, settings: TrainSettings) -> None:
    facts, problems = course.engine.facts, []
    if beyond := [layer for layer in settings.layers if layer >= facts.layers]:
        what = f"{', '.join(map(str, beyond))} is out of range"
        problems.append(Problem("layers", what, f"{facts.name} has layers 0–{facts.layers - 1}"))
    if settings.site in facts.refused_sites:
        problems.append(refusal("site", settings.site, facts.name, facts.refused_sites[settings.site]))
    if problems:
        raise InvalidRequest(problems)


def _about(path: Path, course: Course, settings: TrainSettings) -> dict[str, object]:
    """What a folder belongs to: one model, set and settings. Another run in it is refused with what differs."""
    mine: dict[str, object] = {
        "model": course.engine.facts.name,
        "dtype": str(course.hf.dtype),
        "data": course.data.name,
    }
    mine |= {"texts": course.digest, "prompts": list(course.prompts), **settings.model_dump(mode="json")}
    mine["begins_with"] = course.begins_with(settings.init)
    if not path.is_file():
        return mine
    with reading(path, "settings of a training run"):
        there = json.loads(path.read_text(encoding="utf-8"))
    differ = [f"{key} was {there.get(key)!r}, is {value!r}" for key, value in mine.items() if there.get(key) != value]
    if differ:
        what = f"holds another run ({', '.join(differ)})"
        raise InvalidRequest([Problem(str(path.parent), what, "choose another folder, or remove that one")])
    return mine


class _Run:
    def __init__(self, course: Course, settings: TrainSettings, folder: Path) -> None:
        self.course, self.settings, self.folder = course, settings, folder
        self.checkpoint = folder / "checkpoint.safetensors"
        # A run that goes on does not need its start again
        start = {} if self.checkpoint.is_file() else course.start(settings.init, settings.layers, settings.site)
        hidden, device = course.engine.facts.hidden, course.hf.model.device
        ops = Learnable(settings.layers, settings.site, start, hidden, settings.rank, settings.seed).to(device)
        self.state = State(ops)
        self.per_epoch = math.ceil(len(course.train) / settings.batch)
        self.most = settings.epochs * self.per_epoch

    def go(self, told: Told | None) -> None:
        course, state, ops = self.course, self.state, self.state.ops
        if self.checkpoint.is_file():
            state.load(self.checkpoint)
        lines = _Lines(self.folder / "train.jsonl", state.step if state.epochs >= 0 else -1)
        kept = course.keep(ops)
        if state.epochs < 0:
            first = self._finite(course.passes.nats(course.validation, ops, kept), "begin with a smaller vector")
            state.judge(first, 0)
            lines.add({"step": 0, "epoch": 0, "validation": first})
            self._save()
        while state.step < self.most and not self._given_up():
            line = self._step(kept)
            if state.step % self.per_epoch == 0:
                line["validation"] = self._finite(course.passes.nats(course.validation, ops, kept))
                state.judge(line["validation"], state.step // self.per_epoch)
            lines.add(line)
            self._save()
            if told:
                told(line, self.most)
        state.use_best()
        save_vector(self.vector(), self.folder / "vector.safetensors")
        if self.settings.rank:
            with atomic_path(self.folder / "steering.json") as path:
                path.write_text(self.steering().to_json() + "\n", encoding="utf-8")
        with atomic_path(self.folder / "loss.svg") as path:
            path.write_text(loss_plot(lines.read(), course.baselines), encoding="utf-8")
        with atomic_path(self.folder / "result.json") as path:
            path.write_text(self._result().to_json() + "\n", encoding="utf-8")

    def _step(self, kept: Kept | None) -> Line:
        state, rate = self.state, self._rate()
        batch = self._batch()
        tokens = sum(len(sample.targets) for sample in batch)
        loss = self._finite(float(self.course.passes.loss(batch, state.ops, kept, backward=True)) / tokens)
        state.advance(rate, tokens)
        norm = self._finite(float(state.ops.added.detach().norm()), what="vector's length")
        epoch = (state.step - 1) // self.per_epoch + 1
        return {"step": state.step, "epoch": epoch, "loss": loss, "learning_rate": rate, "norm": norm}

    def _finite(self, number: float, remedy: str = "lower the learning rate", what: str = "loss") -> float:
        """What is written down; JSON has no other numbers."""
        if math.isfinite(number):
            return number
        raise SteerscopeError(f"{self.folder}: the {what} is not finite after step {self.state.step}: {remedy}")

    def _batch(self) -> list[Sample]:
        """Texts in an order of each epoch's own, which depends on nothing but the seed."""
        epoch, at = divmod(self.state.step, self.per_epoch)
        order = list(self.course.train)
        random.Random(f"{self.settings.seed}.{epoch}").shuffle(order)
        return order[at * self.settings.batch : (at + 1) * self.settings.batch]

    def _rate(self) -> float:
        most = self.settings.learning_rate
        if self.settings.schedule == "constant":
            return most
        return most * (1 + math.cos(math.pi * self.state.step / self.most)) / 2

    def _given_up(self) -> bool:
        patience = self.settings.patience
        return patience is not None and self.state.epochs - self.state.best_epoch >= patience

    def _save(self) -> None:
        self.state.save(self.checkpoint)

    def steering(self) -> Steering:
        return Steering(ops=self.state.ops.ops(self.settings.tokens))

    def vector(self) -> SteeringVector:
        settings, name = self.settings.model_dump(mode="json"), self.course.data.name
        about: dict[str, Json] = {"name": name, "data": name, "best_epoch": self.state.best_epoch, "settings": settings}
        model, site = self.course.engine.facts.name, self.settings.site
        return SteeringVector(self.state.ops.vectors(), model=model, site=site, method="learned", provenance=about)

    def _result(self) -> Result:
        course, state, found = self.course, self.state, self.course.baselines
        prompt = found.best_prompt
        return Result(
            steered=perplexity(state.best_loss),
            unsteered=perplexity(found.unsteered),
            prompted=None if prompt is None else perplexity(found.prompted[prompt]),
            prompt=prompt,
            best_epoch=state.best_epoch,
            epochs=state.epochs,
            steps=state.step,
            train_tokens=sum(len(sample.targets) for sample in course.train),
            val_tokens=sum(len(sample.targets) for sample in course.validation),
            norms={layer: float(v.norm()) for layer, v in state.ops.vectors().items() if layer is not None},
        )


class _Lines:
    """`train.jsonl`; lines behind the checkpoint that is gone on from are dropped and will be written again."""

    def __init__(self, path: Path, upto: int) -> None:
        self._path = path
        whole = [line for line in self.read() if line["step"] <= upto]
        with atomic_path(path) as temporary:
            temporary.write_text("".join(json.dumps(line) + "\n" for line in whole), encoding="utf-8")

    def read(self) -> list[Line]:
        text = self._path.read_text(encoding="utf-8") if self._path.is_file() else ""
        return [json.loads(line) for line in text.split("\n")[:-1]]  # a torn last line has no end

    def add(self, line: Line) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
