"""A steered model for lm-evaluation-harness (the extra `lm-eval`): standard tasks, with and without steering.

    from lm_eval import simple_evaluate
    from steerscope.evals.harness import SteeredLM

    with steerscope.load("smollm2-135m") as engine:
        simple_evaluate(SteeredLM(engine, vector.add(2, layers=19)), tasks=["hellaswag"], limit=50)

Texts are scored token by token by the transformers engine, so any steering and selector acts as in generation.

Text that is longer than the model's context loses its beginning, as in the harness's own models: a prompt keeps its
last `max_length - max_gen_toks` tokens, a scored text its last `scored_length + 1`. Where `max_gen_toks` alone fills
the context, the prompt keeps at most half of it, and what is left is generated.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from steerscope.engines.options import SteerLike
from steerscope.engines.results import TokenPrompt
from steerscope.engines.sync import SyncEngine
from steerscope.evals.forced import Tokens, forced
from steerscope.specs.sampling import Sampling

_MAX_STOP_STRINGS = 4  # of a request
_AT_ONCE = 32
_MAX_GEN_TOKS = 256  # the harness's own default
_UNLIMITED = 1 << 20


class SteeredLM(TemplateLM):
    """A steered model for lm-evaluation-harness; with no steering it scores as the harness's own wrapper does."""

    def __init__(self, engine: SyncEngine, steer: SteerLike | None = None) -> None:
        super().__init__()
        self.engine = engine
        self.steer = steer
        self.tokenizer = engine.aio.tokenizer

    @property
    def eot_token_id(self) -> int:
        found = self.tokenizer.eos_token_id
        return found if isinstance(found, int) else 0

    @property
    def prefix_token_id(self) -> int:
        found = self.tokenizer.bos_token_id
        return found if isinstance(found, int) else self.eot_token_id

    @property
    def tokenizer_name(self) -> str:
        return self.engine.facts.name.replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: object) -> list[int]:
        return self.tokenizer.encode(string, add_special_tokens=bool(add_special_tokens))

    @property
    def max_length(self) -> int:
        """Tokens of prompt and answer together."""
        return self.engine.facts.context or _UNLIMITED

    @property
    def scored_length(self) -> int:
        """The harness's `max_length` of scored texts, without the last token. It is 2 less than the context, because a
        request reads the whole text and generates one token."""
        return self.max_length - 2

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], **_: object
    ) -> list[tuple[float, bool]]:
        texts = []
        for _names, context, continuation in requests:
            scored = continuation[-self.scored_length :]
            n_kept = self.scored_length + 1 - len(scored)
            texts.append((context[-n_kept:] or [self.prefix_token_id], scored))
        return [(float(one.logprobs.sum()), bool(one.greedy.all())) for one in self._forced(texts)]

    def _forced(self, texts: Sequence[tuple[Tokens, Tokens]]) -> Iterator:
        return forced(self.engine, texts, self.steer)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Score whole texts in the harness's own windows, the last of which has a full context before it."""
        del disable_tqdm
        windows: list[tuple[Tokens, Tokens]] = []
        owners: list[int] = []
        for number, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            for window in get_rolling_token_windows(ids, self.prefix_token_id, self.scored_length, context_len=1):
                windows.append(make_disjoint_window(window))
                owners.append(number)
        totals = [0.0] * len(requests)
        for owner, one in zip(owners, self._forced(windows), strict=True):
            totals[owner] += float(one.logprobs.sum())
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        del disable_tqdm
        found: list[str] = []
        for start in range(0, len(requests), _AT_ONCE):
            part: list[tuple[str, dict]] = [request.args for request in requests[start : start + _AT_ONCE]]  # type: ignore
            asked = [self._fitting(text, options) for text, options in part]
            prompts = [prompt for prompt, _ in asked]
            samplings = [sampling for _, sampling in asked]
            done = self.engine.generate(prompts, samplings, steer=self.steer)
            found += [
                postprocess_generated_text(one.text, _until(options), None)
                for one, (_, options) in zip(done, part, strict=True)
            ]
        return found

    def _fitting(self, text: str, options: dict) -> tuple[TokenPrompt, Sampling]:
        """The end of a prompt that leaves room for the answer, and the sampling of the answer."""
        known: dict[str, Any] = dict(normalize_gen_kwargs(options, _MAX_GEN_TOKS))
        max_tokens = max(1, known["max_gen_toks"])
        n_kept = self.max_length - max_tokens if max_tokens < self.max_length else self.max_length // 2
        ids = (self.tok_encode(text, add_special_tokens=True) or [self.prefix_token_id])[-n_kept:]
        asked = {
            "max_tokens": min(max_tokens, self.max_length - len(ids)),
            "temperature": known.get("temperature", 0.0) if known["do_sample"] else 0.0,
            "stop": _until(options)[:_MAX_STOP_STRINGS],
        }
        return TokenPrompt(ids), Sampling.parse(asked)


def _until(options: dict) -> list[str]:
    until = options.get("until") or []
    return [until] if isinstance(until, str) else [text for text in until if text]
