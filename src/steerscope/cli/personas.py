"""`steerscope personas`: a model plays roles and traits; vectors, an axis and caps come out."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from steerscope.cli import options as o
from steerscope.cli.progress import Steps

if TYPE_CHECKING:
    from steerscope.extraction.personas.definitions import Kind, Persona
    from steerscope.extraction.personas.judges import Judge

app = typer.Typer(no_args_is_help=True, help="Make vectors from roles and traits that a model plays.")

RolesDir = Annotated[Path | None, typer.Option(help="Folder of role files (.json); default: those shipped.")]
TraitsDir = Annotated[Path | None, typer.Option(help="Folder of trait files (.json); default: those shipped.")]
CapLayers = Annotated[str | None, typer.Option(help="Layers of the caps; default: 70 to 85 % of the depth.")]
Percentiles = Annotated[str, typer.Option(help="Of the default's projections on the axis, one cap each.")]


@app.command("list")
def list_(roles_dir: RolesDir = None, traits_dir: TraitsDir = None) -> None:
    """List the roles and traits that there are."""
    from steerscope.extraction.personas.definitions import load_personas

    rows = []
    folders: tuple[tuple[Kind, Path | None], ...] = (("roles", roles_dir), ("traits", traits_dir))
    for kind, folder in folders:
        for one in load_personas(kind, ["all"], folder):
            told, judged = f"{len(one.instructions)}", "yes" if one.keywords.pos else "no"
            rows.append((kind, one.name, told, str(len(one.questions)), judged, one.instructions[0].pos))
    o.table(("kind", "name", "instructions", "questions", "keywords", "the first instruction"), rows)


@app.command()
def run(
    out: Annotated[Path, typer.Option(help="The folder of the run.")],
    model: o.ModelName = "smollm2-135m",
    roles: Annotated[str, typer.Option(help="Names with commas between them, or all.")] = "",
    traits: Annotated[str, typer.Option(help="Names with commas between them, or all.")] = "",
    roles_dir: RolesDir = None,
    traits_dir: TraitsDir = None,
    questions: Annotated[Path | None, typer.Option(help="Shared questions (.jsonl); default: ours.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only so many of the shared questions.")] = None,
    ask: Annotated[
        Literal["shared", "own", "both"], typer.Option(help="Which questions a persona is asked.")
    ] = "shared",
    judge: Annotated[str, typer.Option(help="keyword, none, or the URL of an OpenAI-compatible API.")] = "keyword",
    judge_model: Annotated[str, typer.Option(help="The endpoint's model; its key is read from OPENAI_API_KEY.")] = "",
    judge_set: o.JudgeSet = None,
    max_tokens: o.MaxTokens = 64,
    temperature: o.Temperature = 0.7,
    top_p: o.TopP = 0.9,
    seed: Annotated[int, typer.Option(help="The same seed gives the same answers.")] = 0,
    batch: Annotated[int, typer.Option(min=1, help="Answers that are asked for, and kept, together.")] = 32,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on in a folder that holds a run; it only grows.")
    ] = False,
    cap_layers: CapLayers = None,
    percentiles: Percentiles = "1,25,50,75",
    device: o.Device = None,
    dtype: o.Dtype = None,
    engine_name: o.EngineName = "hf",
) -> None:
    """Have a model play personas, judge its answers, and write vectors, the axis of the roles, and caps.

    Example: steerscope personas run --out run --roles pirate,nurse,wizard --traits formal --limit 8
    """
    given = dict(locals())
    from steerscope.extraction.personas.axis import cap_layers as checked
    from steerscope.extraction.personas.build import build
    from steerscope.extraction.personas.definitions import load_default, load_questions
    from steerscope.extraction.personas.run import PersonaRun, generate
    from steerscope.extraction.runs import RolloutSettings

    if not roles and not traits:
        raise o.mistake("personas", "none are chosen", "give --roles, --traits or both; personas list shows them")
    some, others, default, shared, rollouts, judging, numbers = o.together(
        lambda: _personas("roles", roles, roles_dir),
        lambda: _personas("traits", traits, traits_dir),
        lambda: load_default(roles_dir),
        lambda: load_questions(questions)[:limit],
        lambda: RolloutSettings.parse({name: given[name] for name in RolloutSettings.model_fields}),
        lambda: _judge(judge, judge_model, judge_set),
        lambda: _percentiles(percentiles),
    )
    asked = PersonaRun(personas=(*some, *others), default=default, shared=tuple(shared), ask=ask, rollouts=rollouts)
    with o.open_engine(model, device, dtype, engine_name, batch) as engine, Steps() as steps:
        checked(cap_layers, engine.facts.layers)  # before hours of work, not after them
        _, failures = generate(engine, asked, out, judge=judging, resume=resume, batch=batch, progress=steps)
    for failure in failures:
        o.note(f"failed, the next run tries again: {failure}")
    _show(out, build(out, layers=cap_layers, percentiles=numbers))


@app.command()
def axis(
    run: Annotated[Path, typer.Argument(help="The folder of a run.")],
    cap_layers: CapLayers = None,
    percentiles: Percentiles = "1,25,50,75",
) -> None:
    """Make vectors, axis and caps of a run again, with other layers or percentiles; no model runs."""
    from steerscope.extraction.personas.build import build

    _show(run, build(run, layers=cap_layers, percentiles=_percentiles(percentiles)))


def _personas(kind: "Kind", names: str, folder: Path | None) -> "list[Persona]":
    from steerscope.extraction.personas.definitions import load_personas

    return load_personas(kind, [name.strip() for name in names.split(",") if name.strip()], folder)


def _judge(judge: str, model: str, settings: list[str] | None) -> "Judge | None":
    from steerscope.extraction.personas.judges import EndpointJudge, KeywordJudge

    if judge in ("keyword", "none"):
        return KeywordJudge() if judge == "keyword" else None
    return EndpointJudge(judge, model, **o.judge_settings(settings))


def _percentiles(text: str) -> list[float]:
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        raise o.mistake("--percentiles", f"{text!r} are no numbers", "write 1,25,50,75") from None
    if not all(0 <= number <= 100 for number in found):
        raise o.mistake("--percentiles", f"{text} leaves the scale", "choose numbers from 0 to 100")
    return found


def _show(out: Path, summary: dict[str, Any]) -> None:
    rows = []
    for name, one in summary["personas"].items():
        keys = ", ".join(f"{key} {count}" for key, count in one.get("keys", {}).items())
        rows.append((name, one["kind"], str(one["answers"]), keys, one.get("steering", "")))
    o.table(("persona", "kind", "answers", "keys and what stands behind them", "steering"), rows)
    if found := summary.get("axis"):
        places = ", ".join(f"{name} {place:+.1f}" for name, place in found["projections"].items())
        what = f"axis at layer {found['layer']}: {found['explained']:.0%} of the spread of {len(found['roles'])} roles"
        typer.echo(f"{what}; {places}")
        typer.echo(f"caps: {', '.join(f'{out}/steering/capping_config.pt#{name}' for name in found['experiments'])}")
    else:
        typer.echo("no axis: it takes three roles with answers")
    typer.echo(f"{out}: vectors/, steering/, summary.json")
