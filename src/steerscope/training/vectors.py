"""Learn a steering vector by gradient descent through a frozen model.

A run is a folder: `settings.json`, `train.jsonl` (a line per step), `checkpoint.safetensors` (the state after every
step, a few KB), and at the end `vector.safetensors`, `result.json` and `loss.svg`. An interrupted run resumes at its
checkpoint and ends with the same numbers; a finished one is not run again.
"""

import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
from safetensors import safe_open
from torch import Tensor

from steerscope.core.sites import refusal
from steerscope.engines.sync import SyncEngine
from steerscope.extraction.reading import layer_numbers
from steerscope.extraction.runs import read_json, write_json
from steerscope.files import atomic_path, lock_folder, reading, write_text
from steerscope.specs import InvalidRequest, Problem, Steering, SteerscopeError
from steerscope.training.course import Course
from steerscope.training.curves import loss_plot
from steerscope.training.passes import CachedStreams, Learnable, perplexity
from steerscope.training.settings import TrainResult, TrainSettings
from steerscope.training.texts import TrainingSet
from steerscope.vectors.files import save as save_vector
from steerscope.vectors.vector import SteeringVector

Line = dict[str, float]  # of train.jsonl: step, epoch, loss, learning_rate, norm, and validation at an epoch's end
Told = Callable[[Line, int], None]  # called after each step with its line and the largest number of steps
_MOMENTS = ("exp_avg", "exp_avg_sq")
_COUNTED = ("step", "best_epoch", "epochs", "best_loss")


class State:
    """Ops, Adam's moments and the best ops so far, in one small file."""

    def __init__(self, ops: Learnable) -> None:
        self.ops = ops
        self.optimizer = torch.optim.Adam(ops.parameters())
        self.step = self.best_epoch = 0
        self.epochs = -1  # that were validated; before the first step 0
        self.best_loss = math.inf
        self.best: dict[str, Tensor] = self._copy()

    def judge(self, loss: float, epoch: int) -> None:
        """Keep a copy of the current ops if they are the best so far."""
        self.epochs = epoch
        if loss < self.best_loss:
            self.best_loss, self.best_epoch, self.best = loss, epoch, self._copy()

    def advance(self, learning_rate: float, tokens: int) -> None:
        """Take one step along the gradients of a loss that was summed over `tokens` tokens."""
        for parameter in self.ops.parameters():
            assert parameter.grad is not None
            parameter.grad /= tokens
        self.optimizer.param_groups[0]["lr"] = learning_rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1

    def use_best(self) -> None:
        self.ops.load_state_dict(self.best)

    def _copy(self) -> dict[str, Tensor]:
        return {name: tensor.detach().cpu().clone() for name, tensor in self.ops.state_dict().items()}

    def save(self, path: Path) -> None:
        tensors = {f"now.{name}": tensor for name, tensor in self._copy().items()}
        tensors |= {f"best.{name}": tensor for name, tensor in self.best.items()}
        for name, parameter in self.ops.named_parameters():
            for moment in _MOMENTS if self.step else ():
                tensors[f"{moment}.{name}"] = self.optimizer.state[parameter][moment].cpu()
        # JSON has no infinity; a state is saved only after it was judged, by a number
        about = {key: getattr(self, key) for key in _COUNTED}
        data = safetensors.torch.save(tensors, {"format": "steerscope-training", "state": json.dumps(about)})
        with atomic_path(path) as temporary:
            temporary.write_bytes(data)

    def load(self, path: Path) -> None:
        """Restore the state that `save` wrote."""
        with reading(path, "checkpoint of a training run"):
            with safe_open(str(path), framework="pt") as file:
                about = json.loads((file.metadata() or {})["state"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            self.ops.load_state_dict({name: tensors[f"now.{name}"] for name in self.best})
            self.best = {name: tensors[f"best.{name}"] for name in self.best}
            for key in _COUNTED:
                setattr(self, key, about[key])
            for name, parameter in self.ops.named_parameters():
                if self.step:
                    found = {moment: tensors[f"{moment}.{name}"].to(parameter.device) for moment in _MOMENTS}
                    self.optimizer.state[parameter] = {"step": torch.tensor(float(self.step)), **found}


@dataclass(frozen=True, slots=True)
class Learned:
    """The result of `train`."""

    vector: SteeringVector
    steering: Steering  # all that was learned: the same as the vector at scale 1, and the ops of a low-rank update
    result: TrainResult


def train(
    engine: SyncEngine,
    data: TrainingSet,
    out: str | Path,
    settings: TrainSettings,
    *,
    prompts: tuple[str, ...] | None = None,
    told: Told | None = None,
) -> Learned:
    """Train in the folder `out`, or resume there. `prompts` replace those of the set for the prompted baseline."""
    return train_on(Course(engine, data, settings, prompts), out, settings, told)


def train_on(course: Course, out: str | Path, settings: TrainSettings, told: Told | None = None) -> Learned:
    """Train on texts that are already loaded."""
    facts = course.engine.facts
    layer_numbers(course.engine, list(settings.layers))
    if settings.site in facts.refused_sites:
        raise InvalidRequest([refusal("site", settings.site, facts.name, facts.refused_sites[settings.site])])
    folder = Path(out)
    about = _checked_about(folder / "settings.json", course, settings)
    run = TrainingRun(course, settings, folder)
    with lock_folder(folder):
        write_json(folder / "settings.json", about)
        if not (folder / "result.json").is_file():
            run.train(told)
    with reading(folder / "result.json", "result of a training run"):
        result = TrainResult.from_json((folder / "result.json").read_bytes())
    run.state.load(run.checkpoint)
    run.state.use_best()
    return Learned(run.vector(), run.steering(), result)


def _checked_about(path: Path, course: Course, settings: TrainSettings) -> dict[str, object]:
    """Return the model, set and settings of a run; refuse a folder that holds another one."""
    about: dict[str, object] = {
        "model": course.engine.facts.name,
        "dtype": str(course.hf.dtype),
        "data": course.data.name,
        "texts": course.digest,
        "prompts": list(course.prompts),
        **settings.model_dump(mode="json"),
        "begins_with": course.begins_with(settings.init),
    }
    before = read_json(path, "settings of a training run") if path.is_file() else about
    changed = [
        f"{name} was {before.get(name)!r}, is {value!r}" for name, value in about.items() if before.get(name) != value
    ]
    if changed:
        what = f"holds another run ({', '.join(changed)})"
        raise InvalidRequest([Problem(str(path.parent), what, "choose another folder, or remove that one")])
    return about


class TrainingRun:
    """One vector in training, its folder and its state."""

    def __init__(self, course: Course, settings: TrainSettings, folder: Path) -> None:
        self.course = course
        self.settings = settings
        self.folder = folder
        self.checkpoint = folder / "checkpoint.safetensors"
        resumed = self.checkpoint.is_file()
        start = {} if resumed else course.start(settings.init, settings.layers, settings.site)
        hidden = course.engine.facts.hidden
        device = course.hf.model.device
        ops = Learnable(settings.layers, settings.site, start, hidden, settings.rank, settings.seed).to(device)
        self.state = State(ops)
        self.steps_per_epoch = math.ceil(len(course.train) / settings.batch)
        self.max_steps = settings.epochs * self.steps_per_epoch

    def train(self, told: Told | None) -> None:
        """Train to the end, from the checkpoint where there is one, and write the results."""
        state = self.state
        patience = self.settings.patience or math.inf
        if self.checkpoint.is_file():
            state.load(self.checkpoint)
        # Lines after the checkpoint are repeated.
        lines = [line for line in self._lines() if state.epochs >= 0 and line["step"] <= state.step]
        write_text(self.folder / "train.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
        streams = self.course.keep(state.ops)
        if state.epochs < 0:
            first = self._validate(streams, "begin with a smaller vector")
            self._store({"step": 0, "epoch": 0, "validation": first})
        while state.step < self.max_steps and state.epochs - state.best_epoch < patience:
            line = self._step(streams)
            if state.step % self.steps_per_epoch == 0:
                line["validation"] = self._validate(streams)
            self._store(line)
            if told:
                told(line, self.max_steps)
        self._write_results()

    def _validate(self, streams: CachedStreams | None, remedy: str = "lower the learning rate") -> float:
        loss = self._finite(self.course.passes.nats(self.course.validation, self.state.ops, streams), "loss", remedy)
        self.state.judge(loss, self.state.step // self.steps_per_epoch)
        return loss

    def _step(self, streams: CachedStreams | None) -> Line:
        settings = self.settings
        state = self.state
        epoch, at = divmod(state.step, self.steps_per_epoch)
        order = list(self.course.train)
        random.Random(f"{settings.seed}.{epoch}").shuffle(order)
        batch = order[at * settings.batch : (at + 1) * settings.batch]
        rate = settings.learning_rate
        if settings.schedule == "cosine":
            rate *= (1 + math.cos(math.pi * state.step / self.max_steps)) / 2
        n_tokens = sum(len(sample.targets) for sample in batch)
        total = float(self.course.passes.loss(batch, state.ops, streams, backward=True))
        loss = self._finite(total / n_tokens, "loss")
        state.advance(rate, n_tokens)
        norm = self._finite(float(state.ops.added.detach().norm()), "vector's length")
        return {"step": state.step, "epoch": epoch + 1, "loss": loss, "learning_rate": rate, "norm": norm}

    def _finite(self, number: float, what: str, remedy: str = "lower the learning rate") -> float:
        """Refuse numbers that JSON does not have."""
        if math.isfinite(number):
            return number
        raise SteerscopeError(f"{self.folder}: the {what} is not finite after step {self.state.step}: {remedy}")

    def _store(self, line: Line) -> None:
        with (self.folder / "train.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self.state.save(self.checkpoint)

    def _lines(self) -> list[Line]:
        path = self.folder / "train.jsonl"
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        return [json.loads(line) for line in text.split("\n")[:-1]]  # an incomplete last line has no end

    def _write_results(self) -> None:
        course = self.course
        state = self.state
        baselines = self.course.baselines
        state.use_best()
        save_vector(self.vector(), self.folder / "vector.safetensors")
        if self.settings.rank:
            write_text(self.folder / "steering.json", self.steering().to_json() + "\n")
        write_text(self.folder / "loss.svg", loss_plot(self._lines(), baselines))
        prompt = baselines.best_prompt
        result = TrainResult(
            steered=perplexity(state.best_loss),
            unsteered=perplexity(baselines.unsteered),
            prompted=None if prompt is None else perplexity(baselines.prompted[prompt]),
            prompt=prompt,
            best_epoch=state.best_epoch,
            epochs=state.epochs,
            steps=state.step,
            train_tokens=sum(len(sample.targets) for sample in course.train),
            val_tokens=sum(len(sample.targets) for sample in course.validation),
            norms={layer: float(v.norm()) for layer, v in state.ops.vectors().items() if layer is not None},
        )
        write_text(self.folder / "result.json", result.to_json() + "\n")

    def steering(self) -> Steering:
        return Steering(ops=self.state.ops.ops(self.settings.tokens))

    def vector(self) -> SteeringVector:
        name = self.course.data.name
        settings = self.settings.model_dump(mode="json")
        return SteeringVector(
            self.state.ops.vectors(),
            model=self.course.engine.facts.name,
            site=self.settings.site,
            method="learned",
            provenance={"name": name, "data": name, "best_epoch": self.state.best_epoch, "settings": settings},
        )
