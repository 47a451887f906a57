"""What the demo measured: plain numbers and texts, so that the report can be made (and tested) without a model."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Answer:
    """One generated answer and what it measures. `projection` is the mean over its tokens at the read layer."""

    condition: str
    prompt: str
    text: str
    finished: bool  # False: cut off at the token limit
    projection: float  # mean row norms, 0 = midway between positive and negative sentences
    perplexity: float  # of the unsteered model, which reads the answer without steering


@dataclass(frozen=True, slots=True)
class TokenMap:
    """Numbers of every token (columns): projections at layers, in mean row norms, or the scores of lenses (rows)."""

    condition: str
    prompt: str
    tokens: list[str]
    rows: list[str]  # layers, or concepts: the positive one first, then the negative one
    values: list[list[float]]
    answer_start: int = 0

    def mean(self, row: int) -> float:
        """Return the mean over the answer's tokens."""
        answer = self.values[row][self.answer_start :]
        return sum(answer) / max(1, len(answer))


@dataclass(frozen=True, slots=True)
class Dose:
    """One strength of the sweep."""

    scale: float  # mean row norms, in all
    perplexity: float
    distinct: float  # different tokens / tokens, mean over answers
    log_odds: float  # log p(positive words) − log p(negative words), nats, mean over test prompts


@dataclass(frozen=True, slots=True)
class Control:
    """log-odds at +scale minus at −scale, for the vector and for random directions of the same lengths."""

    gap: float
    random_gaps: list[float]
    z: float
    prompts: list[str]
    positive_words: list[str]
    negative_words: list[str]


@dataclass(frozen=True, slots=True)
class Lenses:
    """A small pack fitted on the model, and what it read."""

    layer: int
    count: int
    text_auroc: float  # held-out forms of text, medians over the lenses
    token_auroc: float
    maps: list[TokenMap]


@dataclass(frozen=True, slots=True)
class Results:
    model: str
    layers: int
    hidden: int
    dtype: str
    positive: str
    negative: str
    pairs: int
    heldout_pairs: int
    steered_layers: tuple[int, ...]
    read_layer: int
    scale: float
    class_distance: float  # between the two class means at the read layer, in mean row norms
    cap_at: float  # at the read layer, in mean row norms, 0 = midway
    heldout_auroc: float  # at the read layer
    doses: list[Dose]
    sweep_prompts: list[str]
    control: Control
    answers: list[Answer]
    heat: list[TokenMap]
    lenses: Lenses
    seconds: float
    version: str

    def dose(self, scale: float) -> Dose:
        return min(self.doses, key=lambda dose: abs(dose.scale - scale))
