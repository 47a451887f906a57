"""The demo on one model: make a vector, test it, sweep it, steer with it, look inside, write the page.

Prompts serve one purpose each: the scale was chosen on `SWEEP_PROMPTS`, the texts to read answer `SHOWN_PROMPTS`, and
the statistics come from the test prompts in `measures`.
"""

import itertools
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

import steerscope
from steerscope.demo import measures
from steerscope.demo.measures import Subject
from steerscope.demo.report import html_report, telling_lines
from steerscope.demo.results import Answer, Dose, Results, TokenMap
from steerscope.engines.load import load
from steerscope.engines.results import Generation
from steerscope.extraction import load_contrast_set
from steerscope.files import atomic_path
from steerscope.progress import ProgressBars
from steerscope.specs.capture import Capture
from steerscope.specs.steering import Steering

SCALE = 0.3  # mean row norms in all, spread over the steered layers
SCALES = (-1.0, -0.75, -0.5, -0.3, -0.15, 0.0, 0.15, 0.3, 0.5, 0.75, 1.0)
SWEEP_PROMPTS = ["How was your week at work?", "What did you do last night?", "What is it like to live in your town?"]
SHOWN_PROMPTS = [
    "Describe your morning.",
    "Tell me a short story about a lighthouse.",
    "What do you see when you look out of the window?",
]
STEPS = 7


def sweep(subject: Subject, odds: Sequence[float], tokens: int) -> tuple[dict[float, list[Generation]], list[Dose]]:
    """Return answers to the sweep prompts at every scale, with rows of the unsteered ones, and what they measure."""
    plain = (None, Capture(layers=subject.steered, tokens="generated"))
    asked = [(subject.push.add(scale), None) if scale else plain for scale in SCALES]
    swept = dict(zip(SCALES, measures.answers(subject, SWEEP_PROMPTS, asked, tokens), strict=True))
    nats = iter(measures.surprises(subject, [g for group in swept.values() for g in group]))
    doses = []
    for (scale, group), odd in zip(swept.items(), odds, strict=True):
        distinct = statistics.mean(len(set(g.token_ids)) / len(g.token_ids) for g in group)
        doses.append(Dose(scale, measures.perplexity([next(nats) for _ in group]), distinct, odd))
    return swept, doses


def steerings(subject: Subject, plain: Sequence[Generation]) -> tuple[dict[str, Steering], dict[int, float]]:
    """Return the steerings shown side by side, and the caps: mean projections of unsteered answers, per layer."""
    caps = {}
    for layer in subject.steered:
        rows = torch.cat([g.rows[layer][torch.from_numpy(g.rows.labels.generated)] for g in plain])
        caps[layer] = float(subject.unit.projection(rows, layer).mean())
    unit = subject.unit.at(subject.steered)
    push = subject.push
    made = {
        "unsteered": Steering(),
        subject.data.positive: Steering.of(push.add(SCALE)),
        subject.data.negative: Steering.of(push.add(-SCALE)),
        "capped": Steering.of(push.add(SCALE), *(unit.cap(max=cap, layers=layer) for layer, cap in caps.items())),
        "ablated": Steering.of(unit.ablate()),
    }
    return made, caps


def look(subject: Subject, condition: str, prompt: str, done: Generation, nats: Tensor) -> tuple[Answer, TokenMap]:
    """Measure one answer, token by token; the chat template's own tokens are left out."""
    rows = done.rows
    chosen = rows.labels.message >= 0
    start = int((~rows.labels.generated[chosen]).sum())
    tokens = subject.texts(rows.labels.token_id[chosen])
    kept = {layer: rows[layer][torch.from_numpy(chosen)] for layer in rows.layers}
    places = torch.stack([subject.place(row, layer) for layer, row in kept.items()]).tolist()
    found = TokenMap(condition, prompt, tokens, [f"layer {layer}" for layer in kept], places, start)
    finished = done.finish_reason == "stop"
    answer = Answer(condition, prompt, done.text, finished, found.mean(subject.read_layer), measures.perplexity([nats]))
    return answer, found


def looks(
    subject: Subject, conditions: Sequence[str], shown: Sequence[Sequence[Generation]]
) -> list[tuple[Answer, TokenMap]]:
    """Measure the answers to all shown prompts under all conditions."""
    asked = itertools.product(conditions, SHOWN_PROMPTS)
    flat = [generation for group in shown for generation in group]
    nats = measures.surprises(subject, flat)
    return [look(subject, *names, g, n) for names, g, n in zip(asked, flat, nats, strict=True)]


def measure(model: str, bars: ProgressBars, packs: Path, *, sweep_tokens: int = 24, answer_tokens: int = 40) -> Results:
    """Measure everything on one model, and write its lens pack to `packs`."""
    began = time.perf_counter()
    numbers = itertools.count()

    def step(text: str) -> None:
        bars("demo", next(numbers), STEPS, text, log=True)

    step(f"loading {model}")
    with load(model, max_batch=64, progress=bars.say) as engine:
        data = load_contrast_set("happy_sad")
        step(f"vector from {len(data.extraction)} sentence pairs")
        subject = measures.set_up(engine, data)
        auroc = measures.heldout_auroc(subject)
        step(f"against {measures.RANDOM_DIRECTIONS} random directions")
        odds, tested = measures.control(subject, SCALES, SCALE)
        step(f"sweeping {len(SCALES)} scales")
        swept, doses = sweep(subject, odds, sweep_tokens)
        step("unsteered, steered, capped, ablated")
        steered, caps = steerings(subject, swept[0.0])
        shown = measures.answers(
            subject, SHOWN_PROMPTS, [(spec, Capture()) for spec in steered.values()], answer_tokens
        )
        step("projecting every token at every layer")
        looked = looks(subject, list(steered), shown)
        step(f"lenses for {', '.join(measures.CONCEPTS)}")
        three = dict(list(steered.items())[:3])  # without capped and ablated
        pack = measures.fit_small_pack(subject, packs)
        lenses = measures.watch(subject, pack, SHOWN_PROMPTS[0], three, answer_tokens)
        return Results(
            **facts(subject, model),
            cap_at=(caps[subject.read_layer] - subject.middle[subject.read_layer]) / subject.norms[subject.read_layer],
            heldout_auroc=auroc,
            doses=doses,
            control=tested,
            answers=[answer for answer, _ in looked],
            heat=[heat for _, heat in looked if heat.prompt == SHOWN_PROMPTS[-1]][: len(three)],
            lenses=lenses,
            seconds=time.perf_counter() - began,
        )


def facts(subject: Subject, model: str) -> dict[str, Any]:
    """Return what is known without a measurement of steering."""
    layer = subject.read_layer
    ends = subject.place(subject.extraction[:, layer], layer).view(2, -1).mean(1)
    return {
        "model": model,
        "layers": subject.engine.facts.layers,
        "hidden": subject.engine.facts.hidden,
        "dtype": str(subject.hf.model.dtype).removeprefix("torch."),
        "positive": subject.data.positive,
        "negative": subject.data.negative,
        "pairs": len(subject.data.extraction),
        "heldout_pairs": len(subject.data.heldout),
        "steered_layers": subject.steered,
        "read_layer": layer,
        "scale": SCALE,
        "class_distance": float(ends[0] - ends[1]),
        "sweep_prompts": SWEEP_PROMPTS,
        "version": steerscope.__version__,
    }


def run_demo(out: Path, model: str = "smollm2-135m") -> None:
    """Measure, write `out`/index.html and the pack `out`/lenses, and print what was found."""
    out.mkdir(parents=True, exist_ok=True)
    with ProgressBars() as bars:
        results = measure(model, bars, out / "lenses")
        bars("demo", STEPS, STEPS, "done")
    page = out / "index.html"
    with atomic_path(page) as temporary:
        temporary.write_text(html_report(results), encoding="utf-8")
    console = Console(highlight=False)
    for line in telling_lines(results):
        console.print(line, markup=False, soft_wrap=True)
    console.print(str(page.resolve()), markup=False, soft_wrap=True)
