"""The demo on one model: make a vector, test it, sweep it, steer with it, look inside, write the page.

Prompts serve one purpose each: the scale was chosen on `SWEEP_PROMPTS`, the texts to read answer `SHOWN_PROMPTS`, and
the statistics come from the test prompts in `measures`.
"""

import itertools
import re
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from sklearn.decomposition import PCA
from sklearn.metrics import roc_auc_score
from torch import Tensor

import steerscope
from steerscope.demo import measures
from steerscope.demo.measures import Subject
from steerscope.demo.report import html_report, telling_lines
from steerscope.demo.results import Answer, Dose, Plane, Point, Results, TokenMap
from steerscope.engines.load import load
from steerscope.engines.results import Generation
from steerscope.extraction import load_contrast_set, sentence_rows, sentences
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
STEPS = 8


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
    lengths = torch.stack([row.float().norm(dim=-1) / subject.norms[layer] for layer, row in kept.items()])
    layer, column = divmod(int(lengths.argmax()), len(tokens))
    longest = (tokens[column], layer, float(lengths[layer, column]))
    found = TokenMap(condition, prompt, tokens, [f"layer {layer}" for layer in kept], places, start, longest)
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


def plane(subject: Subject, texts: Mapping[str, Sequence[str]]) -> Plane:
    """PCA of the extraction sentences at the read layer; held-out sentences and answers are only placed in it.

    Topic is removed before: each pair is centred, and so are the answers to each prompt. Answers are read like the
    sentences: as plain text up to their last full stop, without steering. `texts` maps condition → answers, in the
    order unsteered, positive, negative and with the same prompts in each.
    """
    layer = subject.read_layer
    data = subject.data
    direction = subject.unit[layer]
    read_texts = [_finished(text) for group in texts.values() for text in group]
    read = sentence_rows(subject.engine, read_texts, layers=layer)[:, 0]
    extraction = _centred(subject.extraction[:, layer], 2)
    components, explained = _principal(extraction, direction)
    plain, _ = _principal(subject.extraction[:, layer], direction)
    centred = torch.cat([extraction, _centred(subject.heldout[:, layer], 2), _centred(read, len(texts))])
    groups = [f"{side} sentence" for side in (data.positive, data.negative) for _ in data.extraction]
    groups += [f"{side} held out" for side in (data.positive, data.negative) for _ in data.heldout]
    groups += [f"{side} answer" for side, found in texts.items() for _ in found]
    shown = sentences(data.extraction) + sentences(data.heldout) + read_texts
    places = (centred @ components.T / subject.norms[layer]).tolist()
    _, positive, negative = subject.place(read, layer).view(len(texts), -1).tolist()
    return Plane(
        points=[Point(group, text, x, y) for group, text, (x, y) in zip(groups, shown, places, strict=True)],
        explained=explained,
        cosine=float(components[0] @ direction),
        plain_cosines=tuple((plain @ direction).tolist()),
        readback_auroc=float(roc_auc_score([1] * len(positive) + [0] * len(negative), positive + negative)),
    )


def _centred(rows: Tensor, groups: int) -> Tensor:
    """Subtract from each row of `groups` equal parts the mean of the rows at its place in all parts."""
    parts = rows.view(groups, -1, rows.shape[-1])
    return (parts - parts.mean(0)).flatten(0, 1)


def _principal(rows: Tensor, direction: Tensor) -> tuple[Tensor, tuple[float, ...]]:
    """Return the first two principal components [2, hidden], and their shares of the variance.

    The sign of a component is arbitrary: here it is that of its cosine with the direction.
    """
    found = PCA(2, svd_solver="full").fit(rows.numpy())
    components = torch.from_numpy(found.components_)
    return components * (components @ direction).sign()[:, None], tuple(found.explained_variance_ratio_.tolist())


def _finished(text: str) -> str:
    """Return the text up to its last full stop, if there is one."""
    found = re.match(r".*[.!?]", text, re.DOTALL)
    return (found[0] if found and len(found[0]) > 20 else text).strip()


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
        three = dict(zip(steered, (0.0, SCALE, -SCALE), strict=False))  # without capped and ablated
        pack = measures.fit_small_pack(subject, packs)
        lenses = measures.watch(subject, pack, SHOWN_PROMPTS[0], {name: steered[name] for name in three}, answer_tokens)
        step("principal components")
        return Results(
            **facts(subject, model),
            cap_at=(caps[subject.read_layer] - subject.middle[subject.read_layer]) / subject.norms[subject.read_layer],
            auroc=auroc,
            plane=plane(subject, texts_of(three, shown, swept)),
            doses=doses,
            control=tested,
            answers=[answer for answer, _ in looked],
            heat=[heat for _, heat in looked if heat.prompt == SHOWN_PROMPTS[-1]][: len(three)],
            lenses=lenses,
            seconds=time.perf_counter() - began,
        )


def texts_of(scales: dict[str, float], shown: list, swept: dict[float, list]) -> dict[str, list[str]]:
    """Return the texts of the shown answers and of the sweep at these scales, by name."""
    both = {name: group + swept[scales[name]] for name, group in zip(scales, shown, strict=False)}
    return {name: [generation.text for generation in group] for name, group in both.items()}


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
