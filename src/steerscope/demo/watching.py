"""The demo's lenses: a small pack is fitted on the model and reads its answers."""

import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from steerscope.demo.measures import Subject
from steerscope.demo.results import Lenses, LensMap
from steerscope.lenses import Pack
from steerscope.specs.sampling import Sampling
from steerscope.specs.steering import Steering
from steerscope.specs.watch import Watch
from steerscope.training.concepts import load_concepts
from steerscope.training.lenses import LensSettings, fit_pack

CONCEPTS = ("feelings", "weather", "food")  # and all below them
_DEPTH = 8 / 15  # of the layer that is read, where concepts are told apart best
_SHOWN = 8  # concepts of a map, besides the two that matter
_FOR, _AGAINST = "pleasant", "unpleasant"


def fit_small_pack(subject: Subject, out: Path) -> Pack:
    """Fit lenses for some of the shipped concepts, and write them to `out`."""
    layer = int(_DEPTH * subject.engine.facts.layers)
    with tempfile.TemporaryDirectory() as work:
        settings = LensSettings(layers=(layer,), name="demo")
        return fit_pack(subject.engine, load_concepts().under(CONCEPTS), out, settings, work=work).pack


def watch(subject: Subject, pack: Pack, prompt: str, steered: Mapping[str, Steering], tokens: int) -> Lenses:
    """Return what the lenses read in the answer under each steering, row by row."""
    subject.engine.register_pack("demo", pack)
    chat = [{"role": "user", "content": prompt}]
    done = subject.engine.chat(
        [chat] * len(steered),
        Sampling(max_tokens=tokens),
        steer=list(steered.values()),
        watch=Watch(pack="demo", top_k=len(pack), tokens="generated"),
    )
    scores = [np.stack([one.readings.of(c.id) for c in pack.concepts]) for one in done]  # type: ignore[attr-defined]
    ranked = np.argsort(-np.max([found.mean(1) for found in scores], axis=0), kind="stable")
    leading = [pack.index(_FOR), pack.index(_AGAINST)]
    shown = leading + [int(i) for i in ranked if int(i) not in leading][:_SHOWN]
    maps = [
        LensMap(
            condition=condition,
            prompt=prompt,
            tokens=[str(subject.hf.tokenizer.decode([reading.token_id])) for reading in one.readings],
            concepts=[pack.concepts[i].name for i in shown],
            values=found[shown].tolist(),
        )
        for condition, one, found in zip(steered, done, scores, strict=True)
    ]
    return Lenses(
        layer=pack.info.layer,
        count=len(pack),
        text_auroc=statistics.median(concept.metrics["text_auroc"] for concept in pack.concepts),
        token_auroc=statistics.median(concept.metrics["auroc"] for concept in pack.concepts),
        maps=maps,
    )
