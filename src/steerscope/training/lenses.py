"""From texts to a pack: read rows through an engine, fit lenses, calibrate and measure them.

Rows and finished groups of lenses are kept in a work folder beside the pack, so an interrupted fit resumes and ends
with the same pack. Forms of texts are never shared between training, validation (stopping, choice of the layer,
calibration) and test (measures).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import Field
from safetensors.torch import load_file
from torch import Tensor

from steerscope.engines.sync import SyncEngine
from steerscope.extraction.reading import layer_numbers
from steerscope.extraction.runs import Progress, digest, no_progress
from steerscope.files import reading
from steerscope.lenses import Architecture, Pack, PackInfo
from steerscope.lenses.calibrate import FLOOR_QUANTILE, Measures, best_thresholds, calibrate, measure, score
from steerscope.lenses.fit import TEST, TRAIN, VALIDATION, Fit, FitSettings, LabelledRows, Relations, fit
from steerscope.lenses.tensors import checksum
from steerscope.training.concepts import PARTS, ConceptSet, Example, generated_examples
from steerscope.training.rows import RowChoice, TextRows, read_texts, write_tensors

_GROUP = 256  # lenses that are fitted together
_QUICK = FitSettings(widths=(), learning_rate=1e-3, epochs=20)  # to compare layers


class LensSettings(RowChoice):
    """What is trained. Of several `layers` the one whose linear probes read validation rows best is chosen.

    `generate` adds that many texts per concept, which the model writes, to the training texts. `control` fits once more
    with the labels of texts exchanged; its AUROC must be near 0.5.
    """

    fold: int = 0
    seed: int = Field(default=0, ge=0, lt=2**31)
    generate: int = Field(default=0, ge=0)
    control: bool = False
    device: str | None = None  # where lenses are fitted; None: where the engine's model is
    name: str = "lenses"
    fit: FitSettings = FitSettings()


@dataclass(frozen=True, slots=True)
class LensFit:
    """The pack, and measures of its lenses in the order of the file of concepts."""

    pack: Pack
    rows: Measures
    texts: Measures
    control: tuple[Measures, Measures] | None  # per row and per text
    layers: dict[int, float]  # candidate → median AUROC of linear probes on validation rows


def fit_pack(
    engine: SyncEngine,
    concepts: ConceptSet,
    out: str | Path,
    settings: LensSettings,
    *,
    work: str | Path | None = None,
    progress: Progress = no_progress,
) -> LensFit:
    """Train lenses for all concepts and write the pack to `out`; rows are kept in `work` (default: `out`.work)."""
    layer_numbers(engine, list(settings.layers))
    settings = settings.model_copy(update={"device": settings.device or str(engine.aio.device)})
    folder = Path(work) if work else Path(out).with_name(Path(out).name + ".work")
    folder.mkdir(parents=True, exist_ok=True)
    examples = [*concepts.examples, *generated_examples(engine, concepts, settings.generate, folder, progress)]
    choice = RowChoice(**settings.model_dump(include=set(RowChoice.model_fields)))
    rows = read_texts(engine, [example.text for example in examples], folder, choice, progress)
    work_on = _Fitting(settings, examples, concepts.parts(settings.fold), concepts.relations, rows, folder, progress)
    layers = work_on.try_layers()
    layer = max(settings.layers, key=lambda layer: layers.get(layer, 0.0))
    data = work_on.data(layer)
    done = work_on.fit(data, "fitting")
    validation, _ = score(done.weights, data, concepts.relations, VALIDATION)
    by_row, by_text = work_on.measured(done, data)
    control = None
    if settings.control:
        shuffled = shuffled_labels(data, examples, settings.seed)
        control = work_on.measured(work_on.fit(shuffled, "fitting the control"), shuffled)
    info = PackInfo(
        name=settings.name,
        model=engine.facts.name,
        hidden=engine.facts.hidden,
        layer=layer,
        site=settings.site,
        architecture=Architecture(widths=settings.fit.widths),
        training=work_on.notes(layers, {"": (by_row, by_text)} | ({"control_": control} if control else {})),
        calibration={"rows": "validation", "floor_quantile": FLOOR_QUANTILE},
    )
    metrics = [by_row.of(i) | {f"text_{name}": x for name, x in by_text.of(i).items()} for i in range(len(concepts))]
    pack = Pack(info, concepts.lens_concepts(metrics), {**done.weights, **calibrate(validation)})
    pack.save(out)
    return LensFit(pack, by_row, by_text, control, layers)


def shuffled_labels(data: LabelledRows, examples: Sequence[Example], seed: int) -> LabelledRows:
    """Shuffle the concepts of each form's texts: every concept keeps its number of texts."""
    generator = torch.Generator().manual_seed(seed + 1)
    concept = data.concept.clone()
    for form in sorted({example.form for example in examples}):
        index = torch.tensor([i for i, example in enumerate(examples) if example.form == form])
        concept[index] = data.concept[index[torch.randperm(len(index), generator=generator)]]
    return LabelledRows(data.rows, data.text, concept, data.part)


@dataclass(frozen=True, slots=True)
class _Fitting:
    """Steps of one fit, and what they share; `parts` has the part of each form of texts."""

    settings: LensSettings
    examples: Sequence[Example]
    parts: dict[str, int]
    relations: Relations
    rows: TextRows
    folder: Path
    progress: Progress

    def data(self, layer: int) -> LabelledRows:
        found, text = self.rows.at(layer)
        concept = torch.tensor([example.concept for example in self.examples])
        part = torch.tensor([self.parts.get(example.form, TRAIN) for example in self.examples])  # generated: in no part
        device = self.settings.device
        return LabelledRows(found.float().to(device), text.to(device), concept.to(device), part.to(device))

    def try_layers(self) -> dict[int, float]:
        """Return the median AUROC of linear probes on validation rows, if there are several layers."""
        found: dict[int, float] = {}
        layers = self.settings.layers
        for layer in layers if len(layers) > 1 else ():
            data = self.data(layer)
            probes = fit(data, self.relations, _QUICK, seed=self.settings.seed)
            judged, _ = score(probes.weights, data, self.relations, VALIDATION)
            found[layer] = _median(measure(judged, np.zeros(len(self.relations.positive))))
            self.progress("comparing layers", len(found), len(layers))
        return found

    def fit(self, data: LabelledRows, what: str) -> Fit:
        """Fit lenses in groups, which do not depend on each other; finished groups are on disk."""
        settings = self.settings
        n_lenses = len(self.relations.positive)
        groups = [range(i, min(i + _GROUP, n_lenses)) for i in range(0, n_lenses, _GROUP)]
        done = []
        total = settings.fit.epochs * len(groups)
        for i, group in enumerate(groups):
            path = self.folder / f"lenses-{self._key(data, group)}.safetensors"
            if not path.is_file():

                def tell(epoch: int, _: int, before: int = i * settings.fit.epochs) -> None:
                    self.progress(what, before + epoch, total)

                made = fit(data, self.relations, settings.fit, seed=settings.seed, lenses=group, progress=tell)
                write_tensors({**made.weights, "loss": made.loss, "epoch": made.epoch}, path)
            with reading(path, "group of fitted lenses"):
                done.append(load_file(path, device=str(data.rows.device)))
        self.progress(what, total, total)
        joined = {name: torch.cat([group[name] for group in done]) for name in done[0]}
        return Fit({name: t for name, t in joined.items() if name[0] in "wb"}, joined["loss"], joined["epoch"])

    def _key(self, data: LabelledRows, group: range) -> str:
        """Return a hash of everything that the weights of a group depend on."""
        settings = self.settings
        relations = self.relations
        chosen = [settings.fit.model_dump(), settings.seed, str(data.rows.device), group.start, group.stop]
        tensors: list[Tensor] = [data.rows, data.text, data.concept, data.part]
        tensors += [relations.positive, relations.siblings, relations.opposites, relations.distant]
        return digest(chosen, [checksum(tensor.cpu()) for tensor in tensors])

    def measured(self, done: Fit, data: LabelledRows) -> tuple[Measures, Measures]:
        """Measure on test texts, per row and per text; thresholds come from validation texts."""
        judged, tested = (score(done.weights, data, self.relations, part) for part in (VALIDATION, TEST))
        return measure(tested[0], best_thresholds(judged[0])), measure(tested[1], best_thresholds(judged[1]))

    def notes(self, layers: dict[int, float], measured: dict[str, tuple[Measures, Measures]]) -> dict[str, Any]:
        """Return the pack's account of its training: plain JSON."""
        at = {name: sorted(form for form, one in self.parts.items() if one == part) for part, name in PARTS.items()}
        notes = {"settings": self.settings.model_dump(mode="json"), "texts": len(self.examples), "forms": at}
        if layers:
            notes["validation_auroc_of_layers"] = {str(layer): value for layer, value in layers.items()}
        for prefix, (by_row, by_text) in measured.items():
            notes |= {f"{prefix}median_auroc": _median(by_row), f"{prefix}median_text_auroc": _median(by_text)}
        return notes


def _median(measures: Measures) -> float:
    return float(np.nanmedian(measures.auroc))
