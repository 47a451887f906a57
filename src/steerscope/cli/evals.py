"""`steerscope eval`: answers under steering, their scores, and a report; caps, and agreement of the engines."""

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from steerscope.cli import options as o
from steerscope.cli.progress import Steps

if TYPE_CHECKING:
    from steerscope.evals.items import Item
    from steerscope.evals.run import EvalRun
    from steerscope.evals.scorers import Scorer
    from steerscope.extraction.personas.definitions import Persona
    from steerscope.vectors.vector import SteeringVector

app = typer.Typer(
    no_args_is_help=True, help="Judge vectors by the answers they lead to: make answers, score them, report."
)

Out = Annotated[Path, typer.Option(help="The folder of the run.")]
Run = Annotated[Path, typer.Argument(help="The folder of a run.")]
N = Annotated[int, typer.Option("--n", min=1, help="Answers to each question.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Only so many questions of each set.")]
Seed = Annotated[int, typer.Option(help="The same seed gives the same answers.")]
Batch = Annotated[int, typer.Option(min=1, help="Answers that are asked for, and kept, together.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on in a folder that holds a run; it only grows.")]
JudgeUrl = Annotated[str | None, typer.Option(help="The URL of an OpenAI-compatible API; its key: OPENAI_API_KEY.")]
JudgeModel = Annotated[str, typer.Option(help="The model that judges.")]
Rubric = Annotated[Path | None, typer.Option(help="A text with {question} and {answer} in it; default: the trait's.")]
Highest = Annotated[
    Literal["3", "100"] | None,
    typer.Option("--judge-scale", help="Judgements go from 0 to this; default: 3 for our rubric of a role, else 100."),
]
Prices = Annotated[str | None, typer.Option(help="Price of a million prompt and completion tokens: 0.15,0.60.")]


@app.command()
def rollouts(
    out: Out,
    model: o.ModelName = "smollm2-135m",
    vectors: Annotated[str, typer.Option(help="FILE, NAME=FILE or FILE@LAYERS, with commas between them.")] = "",
    scales: Annotated[str, typer.Option(help="-8..8, -8..8:4 or -2,-0.5,2.")] = "-1,1",
    normalize: Annotated[bool, typer.Option("--normalize", help="Make directions 1 long first.")] = False,
    match_learned_scale: Annotated[
        bool, typer.Option("--match-learned-scale", help="Make all as long as the learned one.")
    ] = False,
    trait: Annotated[str | None, typer.Option(help="A shipped trait or role, or a file (.json): baselines.")] = None,
    questions: Annotated[
        str, typer.Option(help="Sets or files (.jsonl, .json), with commas between them.")
    ] = "questions",
    limit: Limit = None,
    n: N = 2,
    max_tokens: o.MaxTokens = 48,
    temperature: o.Temperature = 0.7,
    top_p: o.TopP = 0.9,
    seed: Seed = 0,
    batch: Batch = 32,
    resume: Resume = False,
    device: o.Device = None,
    dtype: o.Dtype = None,
    engine_name: o.EngineName = "hf",
) -> None:
    """Answer the same questions unsteered, prompted, and steered by each vector at each scale.

    Example: steerscope eval rollouts --out run --trait cheerful --vectors happy.safetensors@19 --scales=-1.7,1.7
    """
    given = dict(locals())
    from steerscope.evals.conditions import baselines, parse_scales, prepared, steered
    from steerscope.evals.run import EvalRun

    items, persona, loaded, at, settings = o.together(
        lambda: _items(questions, limit),
        lambda: _persona(trait) if trait else None,
        lambda: _vectors(vectors),
        lambda: parse_scales(scales),
        lambda: _settings(given),
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
    _generate(run, out, made, given)


@app.command()
def score(
    run: Run,
    classifier: Annotated[
        str | None, typer.Option(help="Train on this: a run with --trait, a contrast set, or a .jsonl file.")
    ] = None,
    judge: JudgeUrl = None,
    judge_model: JudgeModel = "",
    rubric: Rubric = None,
    judge_scale: Highest = None,
    prices: Prices = None,
    judge_set: o.JudgeSet = None,
    regex: Annotated[str | None, typer.Option(help="Count the answers in which this occurs.")] = None,
    text_only: Annotated[
        bool, typer.Option("--text-only", help="Without perplexity and projections, which need the model.")
    ] = False,
    device: o.Device = None,
) -> None:
    """Score the answers of a run; what was scored before is kept.

    Example: steerscope eval score run --classifier happy_sad
    """
    given = dict(locals())
    from steerscope.evals.run import load_run

    found = load_run(run)
    scorers = _scorers(found, given)
    _score(run, found, scorers, not text_only, device)


@app.command()
def report(
    run: Run,
    main: Annotated[str | None, typer.Option("--score", help="The score the report is about.")] = None,
) -> None:
    """Write the statistics of all scores as summary.json and report.html; no model runs."""
    from steerscope.evals.report import write_report

    _show(run, write_report(run, main))


@app.command()
def cap(
    out: Out,
    caps: Annotated[str, typer.Option(help="capping_config.pt or cap-pN.json files, with commas between them.")],
    model: o.ModelName = "smollm2-135m",
    harm: Annotated[str, typer.Option(help="Questions that should be declined.")] = "jailbreak",
    capability: Annotated[str, typer.Option(help="Questions or choices with known answers.")] = "facts",
    limit: Limit = None,
    n: N = 2,
    judge: JudgeUrl = None,
    judge_model: JudgeModel = "",
    rubric: Rubric = None,
    judge_scale: Highest = None,
    prices: Prices = None,
    judge_set: o.JudgeSet = None,
    max_tokens: o.MaxTokens = 48,
    temperature: o.Temperature = 0.7,
    top_p: o.TopP = 0.9,
    seed: Seed = 0,
    batch: Batch = 32,
    resume: Resume = False,
    device: o.Device = None,
    dtype: o.Dtype = None,
    engine_name: o.EngineName = "hf",
) -> None:
    """Measure caps: what they do to answers that should be declined, and what they cost in ability."""
    given = dict(locals())
    from steerscope.evals.conditions import baselines
    from steerscope.evals.conditions import caps as load_caps
    from steerscope.evals.report import write_report
    from steerscope.evals.run import EvalRun

    items, more, conditions, settings = o.together(
        lambda: _items(harm, limit),
        lambda: _items(capability, limit),
        lambda: load_caps(_parts(caps)),
        lambda: _settings(given),
    )
    run = EvalRun(conditions=(*baselines(None, model), *conditions), items=(*items, *more), n=n, rollouts=settings)
    scorers = _scorers(run, {**given, "classifier": None, "regex": None})
    run = _generate(run, out, {}, given)
    _score(out, run, scorers, engine_name == "hf", device)
    _show(out, write_report(out, "judge" if judge else "refusal"))


@app.command()
def parity(
    model: o.ModelName = "smollm2-135m",
    steer: o.Steer = None,
    questions: Annotated[str, typer.Option(help="Sets or files, with commas between them.")] = "questions",
    limit: Annotated[int, typer.Option(min=1, help="Only so many questions of each set.")] = 4,
    max_tokens: o.MaxTokens = 16,
    dtype: o.Dtype = None,
    device: o.Device = None,
    as_json: o.AsJson = False,
) -> None:
    """Compare the probabilities that vLLM and transformers give under steering, token by token."""
    from steerscope.cli import steer_args
    from steerscope.evals.parity import agreement, continued

    items, steers = o.together(
        lambda: _items(questions, limit), lambda: [steer_args.parse(text) for text in steer or ()]
    )
    conditions = {"unsteered": None} | {text: one.steering for text, one in zip(steer or (), steers, strict=True)}
    with o.open_engine(model, device, dtype) as engine:
        texts = continued(engine, [one.question for one in items], conditions, max_tokens)
    with o.open_engine(model, device, dtype, "vllm") as other:
        found = agreement(other, texts, conditions)
    if as_json:
        typer.echo(json.dumps(found))
        return
    head = ("condition", "steps", "compared", "unknown", "mean |Δ log p|", "most", "same best token")
    shown = (["—" if value is None else f"{value:.4g}" for value in one.values()] for one in found.values())
    o.table((*head, "moved by steering"), ((name, *cells) for name, cells in zip(found, shown, strict=True)))


# --- what the commands share


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _items(sources: str, limit: int | None) -> "list[Item]":
    from steerscope.evals.items import load_items

    return [
        item
        for found in o.together(*(lambda one=one: load_items(one) for one in _parts(sources)))
        for item in found[:limit]
    ]


def _persona(source: str) -> "Persona":
    from steerscope.extraction.personas.definitions import load_persona_file, load_personas, names

    if source.endswith(".json"):
        return load_persona_file(Path(source))
    return load_personas("roles" if source in names("roles") else "traits", [source])[0]


def _vectors(text: str) -> "dict[str, SteeringVector]":
    """The name is the file's unless another is given; layers behind an @ are kept, others are not added to."""
    import steerscope as ss
    from steerscope.cli.steer_args import split

    found: dict[str, SteeringVector] = {}
    for part in _parts(re.sub(r"@([\d,-]+)(?=,[^\d]|$)", lambda m: "@" + m[1].replace(",", ";"), text)):
        name, equals, body = part.partition("=")
        path, rest = split(body if equals else part)
        vector = ss.load_vector(path)
        if rest and not rest.startswith("@"):
            raise o.mistake("vectors", f"cannot read {rest!r} after {path}", "write [NAME=]FILE[@LAYERS]")
        name = name if equals else Path(path).stem
        if name in found:
            raise o.mistake("vectors", f"two are called {name}", "name one: NAME=FILE")
        if not re.fullmatch(r"[\w.-]+", name):
            raise o.mistake("vectors", f"{name!r} is no name for a file", "use letters, digits, - and _: NAME=FILE")
        found[name] = vector.at(rest[1:].replace(";", ",")) if rest else vector
    return found


def _settings(given: dict[str, Any]) -> Any:
    from steerscope.extraction.runs import RolloutSettings

    return RolloutSettings.parse({name: given[name] for name in RolloutSettings.model_fields})


def _generate(run: "EvalRun", out: Path, vectors: "dict[str, SteeringVector]", given: dict[str, Any]) -> "EvalRun":
    from steerscope.evals.run import generate

    opened = o.open_engine(given["model"], given["device"], given["dtype"], given["engine_name"], given["batch"])
    with opened as engine, Steps() as steps:
        done, failures = generate(
            engine, run, out, vectors=vectors, resume=given["resume"], batch=given["batch"], progress=steps
        )
    for failure in failures:
        o.note(f"failed, the next run tries again: {failure}")
    _tell_missing(out, done)
    typer.echo(f"{out}: {len(done.conditions)} conditions, {len(done.items)} questions, rollouts.parquet")
    return done


def _scorers(run: "EvalRun", given: dict[str, Any]) -> "list[Scorer]":
    from steerscope.evals import scorers as s

    found: list[Scorer] = [s.refusal(), s.repetition()]
    if any(item.choices or item.expected for item in run.items):
        found.append(s.correct())
    if run.persona and run.persona.keywords.pos:
        found.append(s.keywords(run.persona))
    if given["regex"] is not None:
        found.append(s.regex(given["regex"]))
    if given["classifier"] is not None:
        from steerscope.evals.classifier import Classifier, load_labelled

        found.append(Classifier(load_labelled(given["classifier"])))
    if given["judge"] is not None:
        found.append(_judge(run, given))
    return found


def _judge(run: "EvalRun", given: dict[str, Any]) -> "Scorer":
    from steerscope.evals.judge import JudgeScorer, rubric
    from steerscope.extraction.endpoint import Endpoint

    endpoint = Endpoint(given["judge"], given["judge_model"], **o.judge_settings(given["judge_set"]))
    highest = {None: None, "3": 3, "100": 100}[given["judge_scale"]]
    return JudgeScorer(endpoint, rubric(given["rubric"], run.persona), highest, _prices(given["prices"]))


def _prices(text: str | None) -> tuple[float, float] | None:
    if text is None:
        return None
    try:
        asked, answered = map(float, text.split(","))
    except ValueError:
        raise o.mistake("--prices", f"{text!r} are not two numbers", "write 0.15,0.60") from None
    return asked, answered


def _score(out: Path, run: "EvalRun", scorers: "list[Scorer]", model: bool, device: str | None) -> None:
    from steerscope.evals.forced import ModelScorer
    from steerscope.evals.run import load_vectors
    from steerscope.evals.scoring import score, scorer_facts

    try:
        with Steps() as steps:
            if model and run.model is not None:
                with o.open_engine(run.model.name, device, run.model.dtype) as engine:
                    score(out, run, [*scorers, ModelScorer(engine, load_vectors(out, run))], steps)
            else:
                score(out, run, scorers, steps)
    finally:
        for name, facts in scorer_facts(out).items():
            told = {**facts["counts"], **facts["about"].get("spent", {})}
            o.note(f"{name}: {', '.join(f'{what} {count}' for what, count in told.items())}")
            if refusal := facts["about"].get("last refusal"):
                o.note(f"{name}: last refusal: {refusal}")
        _tell_missing(out, run)
    typer.echo(f"{out}: answers.parquet, questions.parquet, datasets.parquet")


def _tell_missing(out: Path, run: "EvalRun") -> None:
    from steerscope.evals.counts import count_answers, what_is_missing
    from steerscope.evals.scoring import scored_answers

    if said := what_is_missing(count_answers(scored_answers(out, run), run)):
        typer.echo(said)


def _show(out: Path, summary: dict[str, Any]) -> None:
    from steerscope.evals.summary import out_of_reach

    name, rows = summary["score"], []
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
    if said := out_of_reach(list(entries.values())):
        o.note(f"{name}: {said}")
    typer.echo(f"{out}: summary.json, report.html")


def _figures(one: dict[str, Any]) -> tuple[str, str, str]:
    from steerscope.evals.report import interval_of

    test = f"{one['difference']:+.3g}, p {one['p_corrected']:.3g}" if "difference" in one else ""
    test += f" (least {one['least_p_corrected']:.2g})" if test else ""
    return f"{one['mean']:.3g}", interval_of(one), test
