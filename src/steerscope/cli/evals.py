"""`steerscope eval`: answers under steering, their scores and a report; caps, and agreement of the engines."""

import json
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from pydantic import Field
from typer import Argument, Option

import steerscope as ss
from steerscope.cli import options as o
from steerscope.progress import ProgressBars
from steerscope.specs.base import Spec

if TYPE_CHECKING:
    from steerscope.engines.sync import SyncEngine
    from steerscope.evals.items import Item
    from steerscope.evals.run import EvalRun
    from steerscope.evals.scorers import Scorer
    from steerscope.extraction.personas.definitions import Persona
    from steerscope.vectors.vector import SteeringVector

app = o.command_group(no_args_is_help=True, help="Evaluate vectors by the answers they lead to: answer, score, report.")

Out = Annotated[Path, Option(help="Folder of the run.")]
Run = Annotated[Path, Argument(help="Folder of a run.")]
N = Annotated[int, Option("--n", min=1, help="Answers to each question.")]
Limit = Annotated[int | None, Option(min=1, help="Maximum number of questions of each set.")]
SamplingOptions = Annotated[
    o.Given[ss.Sampling],
    o.sampling_fields("max_tokens temperature top_p seed", max_tokens=48, temperature=0.7, top_p=0.9, seed=0),
]
DeviceOnly = Annotated[o.Given[o.EngineOptions], o.Fields(o.EngineOptions, "device", panel=o.ENGINE_PANEL)]


class JudgeOptions(Spec):
    """A judge behind an OpenAI-compatible API."""

    judge: str | None = Field(default=None, description="URL of an OpenAI-compatible API; its key: OPENAI_API_KEY.")
    judge_model: str = Field(default="", description="Model that judges.")
    rubric: Path | None = Field(
        default=None, description="Text file with {question} and {answer} in it; default: the trait's."
    )
    judge_scale: Literal["3", "100"] | None = Field(
        default=None, description="Highest judgement; default: 3 for the shipped rubric of a role, else 100."
    )
    prices: str | None = Field(
        default=None, description="Price of a million prompt tokens and of a million completion tokens: 0.15,0.60."
    )


Judge = Annotated[o.Given[JudgeOptions], o.Fields(JudgeOptions)]


@app.command()
@o.with_fields
def rollouts(
    out: Out,
    sampling: SamplingOptions,
    engine: o.Engine,
    model: o.ModelName = "smollm2-135m",
    vectors: Annotated[str, Option(help="FILE, NAME=FILE or FILE@LAYERS, with commas between them.")] = "",
    scales: Annotated[str, Option(help="-8..8, -8..8:4 or -2,-0.5,2.")] = "-1,1",
    normalize: Annotated[bool, Option("--normalize", help="Scale directions to length 1 first.")] = False,
    match_learned_scale: Annotated[
        bool, Option("--match-learned-scale", help="Scale all vectors to the length of the learned one.")
    ] = False,
    trait: Annotated[
        str | None, Option(help="Trait or role of the prompted baselines: a shipped one, or a .json file.")
    ] = None,
    questions: Annotated[str, Option(help="Sets or files (.jsonl, .json), with commas between them.")] = "questions",
    limit: Limit = None,
    n: N = 2,
    batch: o.Batch = 32,
    resume: o.Resume = False,
) -> None:
    """Answer the same questions unsteered, prompted, and steered by each vector at each scale.

    Example: steerscope eval rollouts --out run --trait cheerful --vectors happy.safetensors@19 --scales=-1.7,1.7
    """
    from steerscope.evals.conditions import baselines, named_vectors, parse_scales, prepared, steered
    from steerscope.evals.run import EvalRun
    from steerscope.extraction.runs import RolloutSettings

    items, persona, loaded, at, settings = o.together(
        lambda: _items(questions, limit),
        lambda: _persona(trait) if trait else None,
        lambda: named_vectors(vectors),
        lambda: parse_scales(scales),
        lambda: RolloutSettings.parse(sampling.values),
    )
    made, marks = prepared(loaded, normalize=normalize, match_learned_scale=match_learned_scale)
    run = EvalRun(
        conditions=(*baselines(persona, model), *steered(made, at)),
        items=tuple(items),
        n=n,
        rollouts=settings,
        persona=persona,
        marks=marks,
    )
    with o.open_engine(model, engine, max_batch=batch) as opened:
        _generate(opened, run, out, made, resume, batch)


@app.command()
@o.with_fields
def score(
    run: Run,
    engine: DeviceOnly,
    *,
    classifier: Annotated[
        str | None, Option(help="Train a classifier on a run with --trait, a contrast set, or a .jsonl file.")
    ] = None,
    judge: Judge,
    judge_set: o.JudgeSet = None,
    regex: Annotated[str | None, Option(help="Count the answers that match.")] = None,
    text_only: Annotated[
        bool, Option("--text-only", help="Skip perplexity and projections, which need the model.")
    ] = False,
) -> None:
    """Score the answers of a run; existing scores are kept.

    Example: steerscope eval score run --classifier happy_sad
    """
    from steerscope.evals.run import load_run

    found = load_run(run)
    scorers = _scorers(found, judge, judge_set, classifier, regex)
    _score(run, found, scorers, not text_only, engine)


@app.command()
def report(
    run: Run,
    main: Annotated[str | None, Option("--score", help="Main score of the report.")] = None,
) -> None:
    """Write the statistics of all scores as summary.json and report.html, without a model."""
    from steerscope.evals.report import write_report

    _show(run, write_report(run, main))


@app.command()
@o.with_fields
def cap(
    out: Out,
    caps: Annotated[str, Option(help="capping_config.pt or cap-pN.json files, with commas between them.")],
    sampling: SamplingOptions,
    engine: o.Engine,
    *,
    model: o.ModelName = "smollm2-135m",
    harm: Annotated[str, Option(help="Questions that should be declined.")] = "jailbreak",
    capability: Annotated[str, Option(help="Questions or choices with known answers.")] = "facts",
    limit: Limit = None,
    n: N = 2,
    judge: Judge,
    judge_set: o.JudgeSet = None,
    batch: o.Batch = 32,
    resume: o.Resume = False,
) -> None:
    """Measure how caps change answers that should be declined, and what they cost in ability."""
    from steerscope.evals.conditions import baselines
    from steerscope.evals.conditions import caps as load_caps
    from steerscope.evals.report import write_report
    from steerscope.evals.run import EvalRun
    from steerscope.extraction.runs import RolloutSettings

    items, more, conditions, settings = o.together(
        lambda: _items(harm, limit),
        lambda: _items(capability, limit),
        lambda: load_caps(o.parts(caps)),
        lambda: RolloutSettings.parse(sampling.values),
    )
    run = EvalRun(conditions=(*baselines(None, model), *conditions), items=(*items, *more), n=n, rollouts=settings)
    scorers = _scorers(run, judge, judge_set)
    with o.open_engine(model, engine, max_batch=batch) as opened:
        run = _generate(opened, run, out, {}, resume, batch)
    _score(out, run, scorers, engine.values["engine"] == "hf", engine)
    _show(out, write_report(out, "judge" if "judge" in judge.values else "refusal"))


@app.command()
@o.with_fields
def parity(
    sampling: Annotated[o.Given[ss.Sampling], o.sampling_fields("max_tokens", max_tokens=16)],
    engine: o.LocalEngine,
    model: o.ModelName = "smollm2-135m",
    steer: o.Steer = None,
    questions: Annotated[str, Option(help="Sets or files, with commas between them.")] = "questions",
    limit: Annotated[int, Option(min=1, help="Maximum number of questions of each set.")] = 4,
    as_json: o.AsJson = False,
) -> None:
    """Compare the probabilities that vLLM and transformers give under steering, token by token."""
    from steerscope.evals.parity import agreement, continued
    from steerscope.vectors.text import parse

    items, steers = o.together(lambda: _items(questions, limit), lambda: [parse(text) for text in steer or ()])
    conditions = {"unsteered": None} | {text: one.steering for text, one in zip(steer or (), steers, strict=True)}
    with o.open_engine(model, engine) as first:
        texts = continued(first, [one.question for one in items], conditions, sampling.values["max_tokens"])
    with o.open_engine(model, engine, engine="vllm") as second:
        found = agreement(second, texts, conditions)
    if as_json:
        typer.echo(json.dumps(found))
        return
    head = ("condition", "steps", "compared", "unknown", "mean |Δ log p|", "max", "same best token")
    shown = (["—" if value is None else f"{value:.4g}" for value in one.values()] for one in found.values())
    o.table((*head, "moved by steering"), ((name, *cells) for name, cells in zip(found, shown, strict=True)))


# --- shared by the commands


def _items(sources: str, limit: int | None) -> "list[Item]":
    from steerscope.evals.items import load_items

    sets = o.together(*(partial(load_items, one) for one in o.parts(sources)))
    return [item for found in sets for item in found[:limit]]


def _persona(source: str) -> "Persona":
    from steerscope.extraction.personas.definitions import load_persona_file, load_personas, names

    if source.endswith(".json"):
        return load_persona_file(Path(source))
    return load_personas("roles" if source in names("roles") else "traits", [source])[0]


def _generate(
    engine: "SyncEngine", run: "EvalRun", out: Path, vectors: "dict[str, SteeringVector]", resume: bool, batch: int
) -> "EvalRun":
    from steerscope.evals.run import generate

    with ProgressBars() as bars:
        done, failures = generate(engine, run, out, vectors=vectors, resume=resume, batch=batch, progress=bars)
    for failure in failures:
        o.note(f"failed, the next run tries again: {failure}")
    _print_missing(out, done)
    typer.echo(f"{out}: {len(done.conditions)} conditions, {len(done.items)} questions, rollouts.jsonl")
    return done


def _scorers(
    run: "EvalRun",
    judge: o.Given[JudgeOptions],
    judge_set: list[str] | None,
    classifier: str | None = None,
    regex: str | None = None,
) -> "list[Scorer]":
    """Return the default scorers of a run and those that options ask for."""
    from steerscope.evals import scorers as s

    found: list[Scorer] = [*s.default_scorers(run)]
    if regex is not None:
        found.append(s.regex(regex))
    if classifier is not None:
        from steerscope.evals.classifier import Classifier, load_labelled

        found.append(Classifier(load_labelled(classifier)))
    asked = judge.parse()
    if asked.judge is not None:
        from steerscope.evals.scorers import JudgeScorer, rubric
        from steerscope.extraction.endpoint import Endpoint

        endpoint = Endpoint(asked.judge, asked.judge_model, **o.judge_settings(judge_set))
        highest: Any = int(asked.judge_scale) if asked.judge_scale else None
        found.append(JudgeScorer(endpoint, rubric(asked.rubric, run.persona), highest, _prices(asked.prices)))
    return found


def _prices(text: str | None) -> tuple[float, float] | None:
    if text is None:
        return None
    prices = o.numbers("--prices", text, "0.15,0.60")
    if len(prices) != 2:
        raise o.mistake("--prices", f"{text!r} are not two numbers", "write 0.15,0.60")
    return prices[0], prices[1]


def _score(
    out: Path, run: "EvalRun", scorers: "list[Scorer]", use_model: bool, engine: o.Given[o.EngineOptions]
) -> None:
    from steerscope.evals.forced import ModelScorer
    from steerscope.evals.run import load_vectors
    from steerscope.evals.scoring import score

    with ExitStack() as stack:
        stack.callback(_print_missing, out, run)
        stack.callback(_print_facts, out)
        bars = stack.enter_context(ProgressBars())
        if use_model and run.model is not None:
            options = {**engine.values, "engine": "hf", "dtype": run.model.dtype}
            loaded = stack.enter_context(o.open_engine(run.model.name, o.Given(o.EngineOptions, options)))
            scorers = [*scorers, ModelScorer(loaded, load_vectors(out, run))]
        score(out, run, scorers, bars)
    typer.echo(f"{out}: answers.parquet")


def _print_facts(out: Path) -> None:
    """Print what each scorer counted, and why a judge last refused."""
    from steerscope.evals.scoring import scorer_facts

    for name, facts in scorer_facts(out).items():
        counts = {**facts["counts"], **facts["about"].get("spent", {})}
        o.note(f"{name}: {', '.join(f'{what} {count}' for what, count in counts.items())}")
        if refusal := facts["about"].get("last refusal"):
            o.note(f"{name}: last refusal: {refusal}")


def _print_missing(out: Path, run: "EvalRun") -> None:
    from steerscope.evals.scoring import count_answers, scored_answers, what_is_missing

    if missing := what_is_missing(count_answers(scored_answers(out, run), run)):
        typer.echo(missing)


def _show(out: Path, summary: dict[str, Any]) -> None:
    from steerscope.evals.scoring import out_of_reach

    name = summary["score"]
    rows = []
    entries = {(one["dataset"], one["condition"]): one for one in summary["conditions"] if one["score"] == name}
    for count in summary["counts"]:
        one = entries.get((count["dataset"], count["condition"]))
        cells = [count["dataset"], count["condition"]]
        cells += [str(n) for n in (count["expected"], count["present"], count["judged"][name])]
        rows.append([*cells, *(_figures(one) if one else ("—", "—", ""))])
    head = ("questions", "condition", "expected", "present", "judged", name, "95 %", "against unsteered, corrected")
    o.table(head, rows)
    if summary["partial"]:
        typer.echo(summary["missing"])
    if warning := out_of_reach(list(entries.values())):
        o.note(f"{name}: {warning}")
    typer.echo(f"{out}: summary.json, report.html")


def _figures(one: dict[str, Any]) -> tuple[str, str, str]:
    from steerscope.evals.report import interval_of

    test = f"{one['difference']:+.3g}, p {one['p_corrected']:.3g}" if "difference" in one else ""
    test += f" (least {one['least_p_corrected']:.2g})" if test else ""
    return f"{one['mean']:.3g}", interval_of(one), test
