"""`steerscope personas`: make vectors, an axis and caps from roles and traits that a model plays."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer import Argument, Option

import steerscope as ss
from steerscope.cli import options as o
from steerscope.progress import ProgressBars

if TYPE_CHECKING:
    from steerscope.extraction.personas.definitions import Kind
    from steerscope.extraction.personas.judges import Judge

app = o.command_group(no_args_is_help=True, help="Make vectors from roles and traits that a model plays.")

RolesDir = Annotated[Path | None, Option(help="Folder of role files (.json); default: those shipped.")]
TraitsDir = Annotated[Path | None, Option(help="Folder of trait files (.json); default: those shipped.")]
CapLayers = Annotated[str | None, Option(help="Layers of the caps; default: 70 to 85 % of the depth.")]
_SAMPLING = o.sampling_fields("max_tokens temperature top_p seed", max_tokens=64, temperature=0.7, top_p=0.9, seed=0)
Percentiles = Annotated[str, Option(help="Percentiles of the default persona's projections on the axis; one cap each.")]


@app.command("list")
def list_(roles_dir: RolesDir = None, traits_dir: TraitsDir = None) -> None:
    """List the available roles and traits."""
    from steerscope.extraction.personas.definitions import load_personas

    rows = []
    folders: tuple[tuple[Kind, Path | None], ...] = (("roles", roles_dir), ("traits", traits_dir))
    for kind, folder in folders:
        for one in load_personas(kind, ["all"], folder):
            told = f"{len(one.instructions)}"
            judged = "yes" if one.keywords.pos else "no"
            rows.append((kind, one.name, told, str(len(one.questions)), judged, one.instructions[0].pos))
    o.table(("kind", "name", "instructions", "questions", "keywords", "the first instruction"), rows)


@app.command()
@o.with_fields
def run(
    sampling: Annotated[o.Given[ss.Sampling], _SAMPLING],
    engine: o.Engine,
    out: Annotated[Path, Option(help="Folder of the run.")],
    model: o.ModelName = "smollm2-135m",
    roles: Annotated[str, Option(help="Names with commas between them, or all.")] = "",
    traits: Annotated[str, Option(help="Names with commas between them, or all.")] = "",
    roles_dir: RolesDir = None,
    traits_dir: TraitsDir = None,
    questions: Annotated[Path | None, Option(help="Shared questions (.jsonl); default: those shipped.")] = None,
    limit: Annotated[int | None, Option(min=1, help="Maximum number of shared questions.")] = None,
    ask: Annotated[
        Literal["shared", "own", "both"], Option(help="Questions for each persona: shared, its own, or both.")
    ] = "shared",
    judge: Annotated[str, Option(help="keyword, none, or the URL of an OpenAI-compatible API.")] = "keyword",
    judge_model: Annotated[str, Option(help="Model of that API; the key is read from OPENAI_API_KEY.")] = "",
    judge_set: o.JudgeSet = None,
    batch: o.Batch = 32,
    resume: o.Resume = False,
    cap_layers: CapLayers = None,
    percentiles: Percentiles = "1,25,50,75",
) -> None:
    """Let a model play personas, judge its answers, and write vectors, the axis of the roles, and caps.

    Example: steerscope personas run --out run --roles pirate,nurse,wizard --traits formal --limit 8
    """
    from steerscope.extraction.personas.build import build
    from steerscope.extraction.personas.build import cap_layers as checked
    from steerscope.extraction.personas.definitions import load_default, load_personas, load_questions
    from steerscope.extraction.personas.run import PersonaRun, generate
    from steerscope.extraction.runs import RolloutSettings

    if not roles and not traits:
        raise o.mistake("personas", "none are chosen", "give --roles, --traits or both; personas list shows them")
    some, others, default, shared, rollouts, judging, numbers = o.together(
        lambda: load_personas("roles", o.parts(roles), roles_dir),
        lambda: load_personas("traits", o.parts(traits), traits_dir),
        lambda: load_default(roles_dir),
        lambda: load_questions(questions)[:limit],
        lambda: RolloutSettings.parse(sampling.values),
        lambda: _judge(judge, judge_model, judge_set),
        lambda: _percentiles(percentiles),
    )
    asked = PersonaRun(personas=(*some, *others), default=default, shared=tuple(shared), ask=ask, rollouts=rollouts)
    with o.open_engine(model, engine, max_batch=batch) as loaded, ProgressBars() as bars:
        checked(cap_layers, loaded.facts.layers)  # before hours of work, not after them
        _, failures = generate(loaded, asked, out, judge=judging, resume=resume, batch=batch, progress=bars)
    for failure in failures:
        o.note(f"failed, the next run tries again: {failure}")
    _show(out, build(out, layers=cap_layers, percentiles=numbers))


@app.command()
def axis(
    run: Annotated[Path, Argument(help="Folder of a run.")],
    cap_layers: CapLayers = None,
    percentiles: Percentiles = "1,25,50,75",
) -> None:
    """Make the vectors, axis and caps of a run again with other layers or percentiles, without a model."""
    from steerscope.extraction.personas.build import build

    _show(run, build(run, layers=cap_layers, percentiles=_percentiles(percentiles)))


def _judge(judge: str, model: str, settings: list[str] | None) -> "Judge | None":
    from steerscope.extraction.personas.judges import EndpointJudge, KeywordJudge

    if judge in ("keyword", "none"):
        return KeywordJudge() if judge == "keyword" else None
    return EndpointJudge(judge, model, **o.judge_settings(settings))


def _percentiles(text: str) -> list[float]:
    found = o.numbers("--percentiles", text, "1,25,50,75")
    if not all(0 <= number <= 100 for number in found):
        raise o.mistake("--percentiles", f"{text} is out of range", "choose numbers from 0 to 100")
    return found


def _show(out: Path, summary: dict[str, Any]) -> None:
    rows = []
    for name, one in summary["personas"].items():
        keys = ", ".join(f"{key} {count}" for key, count in one.get("keys", {}).items())
        rows.append((name, one["kind"], str(one["answers"]), keys, one.get("steering", "")))
    o.table(("persona", "kind", "answers", "answers per key", "steering"), rows)
    if found := summary.get("axis"):
        places = ", ".join(f"{name} {place:+.1f}" for name, place in found["projections"].items())
        what = f"axis at layer {found['layer']}: {found['explained']:.0%} of the spread of {len(found['roles'])} roles"
        typer.echo(f"{what}; {places}")
        typer.echo(f"caps: {', '.join(f'{out}/steering/capping_config.pt#{name}' for name in found['experiments'])}")
    else:
        typer.echo("no axis: it takes three roles with answers")
    typer.echo(f"{out}: vectors/, steering/, summary.json")
