"""Learning a vector: the same equation as the engine's, true gradients, frozen weights, exact resume."""

import hashlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from safetensors.torch import load_file

from steerscope import load_vector
from steerscope.core.equation import apply
from steerscope.demo.measures import logits
from steerscope.engines.hf import HFEngine
from steerscope.engines.results import TokenPrompt
from steerscope.extraction import DatasetEntry, Examples
from steerscope.specs import Capture, Sampling, Steering
from steerscope.specs.errors import InvalidRequest, SteerscopeError
from steerscope.specs.steering import Site
from steerscope.training.course import Course
from steerscope.training.passes import Learnable, TrainingPasses
from steerscope.training.settings import TrainSettings
from steerscope.training.texts import Completion, TrainingSample, TrainingSet, load_training_set, samples
from steerscope.training.vectors import train
from steerscope.vectors.files import save as save_vector
from steerscope.vectors.vector import SteeringVector
from support import tiny

pytestmark = pytest.mark.slow  # make test-fast leaves this file out

TEXTS = tuple(
    Completion(prompt=f"The {animal} ", response=f"jumps over the lazy {other} again.")
    for animal, other in zip(
        ("fox", "dog", "week", "time", "world", "beach"), ("dog", "cat", "fox", "day", "bee", "sea"), strict=True
    )
)
DATA = TrainingSet("jumps", TEXTS[:4], TEXTS[4:], prompts=("Jump.", "Do not jump."))
QUICK = TrainSettings(layers=1, epochs=3, batch=2, learning_rate=0.3)


@pytest.fixture(scope="module")
def engine() -> Iterator[HFEngine]:
    made = HFEngine(tiny.model(), tiny.tokenizer(), name="tiny")
    yield made
    made.sync.close()


def moved(site: Site, layers: tuple[int, ...] = (1, 2), rank: int = 2, hidden: int = 64) -> Learnable:
    """Ops that do something, as after some training."""
    ops = Learnable(layers, site, {}, hidden, rank)
    generator = torch.Generator().manual_seed(1)
    for parameter in ops.parameters():
        parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    return ops


def engine_nats(engine: HFEngine, found: list[TrainingSample], ops: Learnable) -> float:
    """The same loss from rows that the engine captured under the learned steering."""
    last = engine.facts.layers - 1
    total, count = 0.0, 0
    for sample in found:
        done = engine.sync.generate(
            TokenPrompt(sample.token_ids),
            Sampling(max_tokens=1),
            steer=Steering(ops=ops.ops()),
            capture=Capture(layers=last),
        )
        said = logits(engine.model, done.rows[last]).log_softmax(-1)
        total -= sum(float(said[at - 1, sample.token_ids[at]]) for at in sample.targets)
        count += len(sample.targets)
    return total / count


@pytest.mark.parametrize("site", ["resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out"])
def test_the_loss_is_that_of_the_engine_under_what_was_learned(engine: HFEngine, site: Site) -> None:
    ops, found = moved(site), samples(engine, TEXTS)
    passes = TrainingPasses(engine, batch=4)
    mine = passes.nats(found, ops)
    kept = passes.keep(found, ops)
    assert kept is not None
    from_kept = passes.nats(found, ops, kept)
    moves = [abs(passes.nats([one], ops) - passes.nats([one])) for one in found]
    assert mine == pytest.approx(engine_nats(engine, found, ops), abs=2e-5)
    assert from_kept == pytest.approx(mine, abs=2e-5)
    assert max(moves) > 0.05


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [name for name in tiny.ARCHITECTURES if name != "llama"])
def test_every_architecture_learns_as_plain_hooks_steer(architecture: str) -> None:
    made = HFEngine(tiny.model(architecture), tiny.tokenizer(), name=architecture)
    ops, found = moved("resid_post"), samples(made, TEXTS[:3])
    passes = TrainingPasses(made, batch=2)
    mine, from_kept = passes.nats(found, ops), passes.nats(found, ops, passes.keep(found, ops))
    handles = [passes.blocks[layer].module.register_forward_hook(by_hand(ops, layer)) for layer in ops.layers]
    total = 0.0
    for sample in found:
        with torch.no_grad():
            said = made.model(input_ids=torch.tensor([sample.token_ids])).logits[0].log_softmax(-1)
        total -= sum(float(said[at - 1, sample.token_ids[at]]) for at in sample.targets)
    for handle in handles:
        handle.remove()
    assert mine == pytest.approx(total / sum(len(sample.targets) for sample in found), abs=5e-5)
    assert from_kept == pytest.approx(mine, abs=5e-5)
    made.sync.close()


def by_hand(ops: Learnable, layer: int):
    i = ops.layers.index(layer)

    def hook(_module: object, _args: object, output: torch.Tensor | tuple) -> torch.Tensor | tuple:
        h = (output[0] if isinstance(output, tuple) else output) + ops.added[i].detach()
        for j in range(ops.rank):
            u = ops.directions[i, j].detach()
            u = u / u.norm()
            h = h + (float(ops.kept[i, j].detach()) - 1) * (h @ u).unsqueeze(-1) * u
        return (h, *output[1:]) if isinstance(output, tuple) else h

    return hook


@pytest.mark.parametrize(("architecture", "site"), [("granite", "attn_out"), ("gemma4_text", "mlp_out")])
def test_a_vector_that_begins_at_zero_has_the_gradient_of_finite_differences(architecture: str, site: Site) -> None:
    """Behind these sites the block multiplies: what the tap undoes must not cut the gradient off."""
    made = HFEngine(tiny.model(architecture), tiny.tokenizer(), name=architecture)
    ops, found = Learnable((1,), site, {}, 64), samples(made, TEXTS[:2])
    passes = TrainingPasses(made, batch=2)
    passes.loss(found, ops, None, backward=True)
    slope = ops.added.grad
    assert slope is not None
    step = 0.02 * slope / slope.norm()
    losses = []
    for sign in (1, -1):
        ops.added.data.copy_(sign * step)
        with torch.no_grad():
            losses.append(float(passes.loss(found, ops, None)))
    assert (losses[0] - losses[1]) / 0.04 == pytest.approx(float(slope.norm()), rel=0.02)
    made.sync.close()


def test_gradients_of_the_op_are_those_of_finite_differences() -> None:
    """In float64, where differences are exact enough to tell."""
    from steerscope.core import equation

    ops = moved("resid_post", (0,), hidden=5).double()
    h = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2), requires_grad=True)
    gates = torch.ones(1, dtype=torch.float64)

    def steered(h: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(h)
        for column in ops.columns(0, 3):
            column = column._replace(**{k: getattr(column, k).double() for k in ("c", "s", "m", "lo", "hi")})
            total = total + equation._step(h + total, column, gates)
        return h + total

    assert torch.autograd.gradcheck(steered, (h, *ops.parameters()))
    exact = steered(h).detach() - h.detach()
    assert torch.allclose(
        exact.float(), apply(h.float(), moved("resid_post", (0,), hidden=5).columns(0, 3), gates.float()), atol=1e-5
    )


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_through_the_model_are_those_of_finite_differences(engine: HFEngine, checkpointing: bool) -> None:
    ops, found = moved("resid_mid"), samples(engine, TEXTS[:3])
    passes = TrainingPasses(engine, batch=3, checkpointing=checkpointing)
    kept = passes.keep(found, ops)
    passes.loss(found, ops, kept, backward=True)
    for parameter in ops.parameters():
        generator = torch.Generator().manual_seed(3)
        way = torch.randn(parameter.shape, generator=generator)
        way /= way.norm()
        assert parameter.grad is not None
        slope = float((parameter.grad * way).sum())
        ends = []
        for sign in (1, -1):
            parameter.data += sign * 0.02 * way
            ends.append(float(passes.loss(found, ops, None)))
            parameter.data -= sign * 0.02 * way
        assert slope == pytest.approx((ends[0] - ends[1]) / 0.04, rel=0.02, abs=0.02)
        assert abs(slope) > 0.05


def fingerprint(model: torch.nn.Module) -> str:
    found = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        found.update(name.encode() + tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def test_the_model_is_left_as_it_was(engine: HFEngine, tmp_path: Path) -> None:
    def hooks() -> list[set[int]]:  # transformers installs some of its own when hidden states are asked for
        return [{*module._forward_hooks, *module._forward_pre_hooks} for module in engine.model.modules()]

    before, free = fingerprint(engine.model), {n: p.requires_grad for n, p in engine.model.named_parameters()}
    hooked = hooks()
    train(engine.sync, DATA, tmp_path / "a", QUICK.model_copy(update={"gradient_checkpointing": True, "rank": 1}))
    assert fingerprint(engine.model) == before
    assert {n: p.requires_grad for n, p in engine.model.named_parameters()} == free
    assert all(parameter.grad is None for parameter in engine.model.parameters())
    for module in engine.model.modules():
        assert not module.training
        assert "forward" not in module.__dict__
        assert not getattr(module, "gradient_checkpointing", False)
    assert hooks() == hooked


def test_a_learned_vector_beats_unsteered_and_prompted_and_is_a_small_file(engine: HFEngine, tmp_path: Path) -> None:
    done = train(engine.sync, DATA, tmp_path / "a", QUICK)
    result = done.result
    assert result.steered < 0.8 * min(result.unsteered, result.prompted or math.inf)
    assert (result.best_epoch, result.epochs, result.steps) == (3, 3, 6)
    assert result.prompt in DATA.prompts
    vector = load_vector(tmp_path / "a" / "vector.safetensors")
    assert vector.equals(done.vector)
    assert (vector.method, vector.layers, vector.model) == ("learned", (1,), "tiny")
    assert sum(file.stat().st_size for file in (tmp_path / "a").iterdir()) < 20_000
    assert result.norms == {1: pytest.approx(vector.norms()[1])}
    found = samples(engine, TEXTS[4:])
    passes = TrainingPasses(engine, 2)
    ops = Learnable((1,), "resid_post", {1: vector[1]}, 64)
    assert math.exp(passes.nats(found, ops)) == pytest.approx(result.steered, rel=1e-5)
    assert math.exp(passes.nats(found)) == pytest.approx(result.unsteered, rel=1e-5)
    ElementTree.fromstring((tmp_path / "a" / "loss.svg").read_text())


class Killed(BaseException):
    pass


@pytest.mark.parametrize("at", [1, 3, 4])
def test_what_was_killed_goes_on_and_ends_with_the_same_numbers(engine: HFEngine, tmp_path: Path, at: int) -> None:
    settings = QUICK.model_copy(update={"rank": 1})
    whole = train(engine.sync, DATA, tmp_path / "whole", settings)

    def kill(line: dict[str, float], _: int) -> None:
        if line["step"] == at:
            raise Killed

    with pytest.raises(Killed):
        train(engine.sync, DATA, tmp_path / "cut", settings, told=kill)
    log = tmp_path / "cut" / "train.jsonl"
    with log.open("a") as file:  # a kill between the line and the checkpoint, and in the middle of a line
        file.write(json.dumps({"step": at + 1, "epoch": 1, "loss": 0.0}) + '\n{"step": 7')
    seen = []
    resumed = train(engine.sync, DATA, tmp_path / "cut", settings, told=lambda line, _: seen.append(line["step"]))
    assert seen == list(range(at + 1, 7))
    for name in ("train.jsonl", "result.json", "steering.json"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    assert resumed.vector.equals(whole.vector)
    ends = [load_file(tmp_path / folder / "checkpoint.safetensors") for folder in ("whole", "cut")]
    assert ends[0].keys() == ends[1].keys()
    assert all(torch.equal(tensor, ends[1][name]) for name, tensor in ends[0].items())


def test_what_is_finished_is_not_run_again_and_other_settings_are_refused(engine: HFEngine, tmp_path: Path) -> None:
    first = train(engine.sync, DATA, tmp_path, QUICK)
    again = train(engine.sync, DATA, tmp_path, QUICK, told=lambda *_: pytest.fail("it ran again"))
    assert again.vector.equals(first.vector)
    assert again.result == first.result
    with pytest.raises(InvalidRequest, match="learning_rate was 0.3, is 0.2"):
        train(engine.sync, DATA, tmp_path, QUICK.model_copy(update={"learning_rate": 0.2}))
    other = TrainingSet("jumps", TEXTS[:3], TEXTS[4:])
    with pytest.raises(InvalidRequest, match="texts was"):
        train(engine.sync, other, tmp_path, QUICK)


def test_the_best_is_kept_and_patience_ends_a_run(
    engine: HFEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steady = QUICK.model_copy(update={"schedule": "constant", "patience": 2, "epochs": 9})
    once = train(engine.sync, DATA, tmp_path / "once", steady.model_copy(update={"epochs": 1}))
    judged = iter([5.0, 4.0, 4.5, 4.2])  # before the first epoch, and after each
    monkeypatch.setattr(TrainingPasses, "nats", lambda *_: next(judged, 6.0))
    done = train(engine.sync, DATA, tmp_path / "long", steady)
    assert (done.result.best_epoch, done.result.epochs, done.result.steps) == (1, 3, 6)
    assert done.result.steered == pytest.approx(math.exp(4.0))
    assert torch.equal(done.vector[1], once.vector[1])
    lines = [json.loads(line) for line in (tmp_path / "long" / "train.jsonl").read_text().splitlines()]
    assert {line["learning_rate"] for line in lines[1:]} == {steady.learning_rate}


def plain_json(path: Path) -> list[dict[str, float]]:
    def refuse(name: str) -> float:
        raise AssertionError(f"{name} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("at", [0, 1])
def test_a_loss_beyond_numbers_ends_with_what_to_do(engine: HFEngine, tmp_path: Path, at: int) -> None:
    """Before the first step, and in the middle."""
    weight = engine.model.get_output_embeddings().weight
    kept = weight.detach().clone()

    def spoil(*_: object) -> None:
        with torch.no_grad():
            weight.fill_(math.nan)

    if not at:
        spoil()
    try:
        remedy = "lower the learning rate" if at else "begin with a smaller vector"
        with pytest.raises(SteerscopeError, match=f"loss is not finite after step {at}: {remedy}"):
            train(engine.sync, DATA, tmp_path, QUICK, told=spoil)
    finally:
        with torch.no_grad():
            weight.copy_(kept)
    assert [line["step"] for line in plain_json(tmp_path / "train.jsonl")] == list(range(at + 1))[: 2 * at]
    assert not (tmp_path / "result.json").exists()


@pytest.mark.parametrize("beyond", [math.nan, math.inf])
def test_an_epoch_that_cannot_be_judged_is_not_written_down(
    engine: HFEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beyond: float
) -> None:
    judged = iter([5.0, 4.0])
    monkeypatch.setattr(TrainingPasses, "nats", lambda *_: next(judged, beyond))
    with pytest.raises(SteerscopeError, match="not finite after step 4"):
        train(engine.sync, DATA, tmp_path, QUICK)
    assert [line["step"] for line in plain_json(tmp_path / "train.jsonl")] == [0, 1, 2, 3]


def test_a_vector_that_is_too_long_for_numbers_is_refused(engine: HFEngine, tmp_path: Path) -> None:
    save_vector(SteeringVector({1: torch.full((64,), 1e25)}), tmp_path / "long.safetensors")
    with pytest.raises(SteerscopeError, match="the vector's length is not finite after step 1"):
        train(engine.sync, DATA, tmp_path / "a", QUICK.model_copy(update={"init": str(tmp_path / "long.safetensors")}))
    assert len(plain_json(tmp_path / "a" / "train.jsonl")) == 1


def test_a_run_goes_on_only_from_the_vector_it_began_with(engine: HFEngine, tmp_path: Path) -> None:
    path = tmp_path / "start.safetensors"
    settings = QUICK.model_copy(update={"init": str(path), "epochs": 1})
    save_vector(SteeringVector({1: torch.ones(64)}), path)
    done = train(engine.sync, DATA, tmp_path / "a", settings)
    save_vector(SteeringVector({1: torch.ones(64)}, method="other"), path)  # the same numbers
    assert train(engine.sync, DATA, tmp_path / "a", settings).result == done.result
    save_vector(SteeringVector({1: 2 * torch.ones(64)}), path)
    with pytest.raises(InvalidRequest, match="begins_with was"):
        train(engine.sync, DATA, tmp_path / "a", settings)


def test_training_begins_where_it_is_told(engine: HFEngine, tmp_path: Path) -> None:
    shipped = load_training_set("nostalgic")
    assert shipped.examples is not None
    pairs = [
        DatasetEntry(yes, no) for yes, no in zip(shipped.examples.texts[:4], shipped.examples.texts[-4:], strict=True)
    ]
    few = TrainingSet("few", shipped.train[:2], shipped.validation[:1], examples=Examples.of_pairs(pairs))
    course = Course(engine.sync, few, QUICK)
    start = course.start("mean-diff", (1, 2), "resid_post")
    assert set(start) == {1, 2}
    assert all(float(v.norm()) > 0 for v in start.values())
    done = train(engine.sync, few, tmp_path / "a", QUICK)
    path = str(tmp_path / "a" / "vector.safetensors")
    assert torch.equal(course.start(path, (1,), "resid_post")[1], done.vector[1])
    with pytest.raises(InvalidRequest, match="this vector has no layer 2"):
        course.start(path, (2,), "resid_post")
    with pytest.raises(InvalidRequest, match="jumps has no other side"):
        Course(engine.sync, DATA, QUICK).start("mean-diff", (1,), "resid_post")


def test_budgets_count_the_tokens_that_count(engine: HFEngine) -> None:
    whole = Course(engine.sync, DATA, QUICK)
    sizes = [len(sample.targets) for sample in whole.train]
    some = Course(engine.sync, DATA, QUICK.model_copy(update={"target_tokens": sizes[0] + 1, "val_tokens": 1}))
    assert [sample.token_ids for sample in some.train] == [sample.token_ids for sample in whole.train[:2]]
    assert len(some.validation) == 1
    split = Course(engine.sync, TrainingSet("all", TEXTS), QUICK)
    assert len(split.train) + len(split.validation) == len(TEXTS)
    assert split.validation
    shared = {tuple(one.token_ids) for one in split.train} & {tuple(one.token_ids) for one in split.validation}
    assert not shared
    with pytest.raises(InvalidRequest, match="all 6 texts are held out"):
        Course(engine.sync, TrainingSet("all", TEXTS), QUICK.model_copy(update={"val_tokens": 10_000}))


@pytest.mark.parametrize("validation", [(), TEXTS[1:3]])
def test_a_text_that_is_there_twice_is_not_learned_and_judged_on(engine: HFEngine, validation: tuple) -> None:
    twice = TrainingSet("twice", TEXTS * 2, validation)
    for seed in range(4):
        course = Course(engine.sync, twice, QUICK.model_copy(update={"seed": seed}))
        judged = {tuple(one.token_ids) for one in course.validation}
        learned = [tuple(one.token_ids) for one in course.train]
        assert judged
        assert not judged & set(learned)
        assert len(learned) == 2 * (len(TEXTS) - len(judged))
    with pytest.raises(InvalidRequest, match="all 3 texts are held out"):
        Course(engine.sync, TrainingSet("same", TEXTS[:1] * 3), QUICK)


def test_wrong_settings_are_refused_together(engine: HFEngine, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest) as refused:
        TrainSettings.parse({"layers": "all", "learning_rate": 0, "epochs": 0, "init": "no-such-file"})
    assert {problem.field for problem in refused.value.problems} == {"layers", "learning_rate", "epochs"}
    with pytest.raises(InvalidRequest, match="no-such-file' is no file"):
        TrainSettings.parse({"layers": 1, "init": "no-such-file"})
    with pytest.raises(InvalidRequest, match="tiny has layers 0–3"):
        train(engine.sync, DATA, tmp_path / "a", QUICK.model_copy(update={"layers": (9,)}))
    assert not (tmp_path / "a").exists()


def test_what_was_learned_steers_the_tokens_it_was_learned_on(engine: HFEngine, tmp_path: Path) -> None:
    done = train(engine.sync, DATA, tmp_path, QUICK.model_copy(update={"tokens": "prompt", "rank": 1, "epochs": 1}))
    assert [op.tokens for op in done.steering.ops] == ["prompt", "prompt"]
    assert Steering.from_json((tmp_path / "steering.json").read_bytes()) == done.steering


def test_a_finished_run_is_not_told_for_other_prompts(engine: HFEngine, tmp_path: Path) -> None:
    quick = QUICK.model_copy(update={"epochs": 1})
    train(engine.sync, DATA, tmp_path, quick)
    with pytest.raises(InvalidRequest, match="prompts was"):
        train(engine.sync, DATA, tmp_path, quick, prompts=("Sit.",))


def test_the_mean_difference_has_not_seen_what_is_held_out(engine: HFEngine) -> None:
    def start(odd: str) -> torch.Tensor:
        pairs = [DatasetEntry(f"The fox jumps {i}.", f"The dog sits {i}.") for i in range(8)]
        data = TrainingSet("all", tuple(pair.positive for pair in pairs))
        judged = Course(engine.sync, data, QUICK)._held_out
        pairs = [DatasetEntry(pair.positive, odd if pair.positive in judged else pair.negative) for pair in pairs]
        data = TrainingSet("all", data.train, examples=Examples.of_pairs(pairs))
        return Course(engine.sync, data, QUICK).mean_difference((1,), "resid_post")[1]

    assert torch.equal(start("The world is a beach."), start("A week at the sea."))
