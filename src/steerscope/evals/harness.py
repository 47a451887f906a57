"""A steered model for lm-evaluation-harness (the extra `lm-eval`): standard tasks, with and without steering.

    from lm_eval import simple_evaluate
    from steerscope.evals.harness import SteeredLM

    with steerscope.load("smollm2-135m") as engine:
        simple_evaluate(SteeredLM(engine, vector.add(2, layers=19)), tasks=["hellaswag"], limit=50)

Texts are scored token by token through the transformers engine, so any steering and any selector counts as it does when
the model writes. Text that is longer than the model's context loses its beginning, as in the harness's own models.
"""

from collections.abc import Iterator, Sequence

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM

from steerscope.engines.facade import SyncEngine
from steerscope.engines.options import SteerLike
from steerscope.evals.forced import Tokens, forced
from steerscope.specs.sampling import Sampling

_STRINGS, _AT_ONCE = 4, 32  # stop strings a request may have
_MOST_TOKENS = 256


class SteeredLM(TemplateLM):
    """A steered model for lm-evaluation-harness; with no steering it scores as the harness's own wrapper does."""

    def __init__(self, engine: SyncEngine, steer: SteerLike | None = None) -> None:
        super().__init__()
        self.engine, self.steer = engine, steer
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

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], **_: object
    ) -> list[tuple[float, bool]]:
        most = self.engine.facts.context or 1 << 20
        texts = []
        for _names, context, continuation in requests:
            room = max(1, most - 1 - len(continuation))
            texts.append((context[-room:] or [self.prefix_token_id], continuation[-(most - 2) :]))
        return [(float(one.logprobs.sum()), bool(one.greedy.all())) for one in self._forced(texts)]

    def _forced(self, texts: Sequence[tuple[Tokens, Tokens]]) -> Iterator:
        return forced(self.engine, texts, self.steer)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Windows of the whole context, one after the other."""
        del disable_tqdm
        size = (self.engine.facts.context or 1 << 20) - 2
        windows: list[tuple[Tokens, Tokens]] = []
        owners: list[int] = []
        for number, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            for start in range(0, len(ids), size):
                windows.append(([ids[start - 1] if start else self.prefix_token_id], ids[start : start + size]))
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
            samplings = [_sampling(options) for _, options in part]
            done = self.engine.generate([text for text, _ in part], samplings, steer=self.steer)
            found += [_cut(one.text, options) for one, (_, options) in zip(done, part, strict=True)]
        return found


def _until(options: dict) -> list[str]:
    until = options.get("until") or []
    return [until] if isinstance(until, str) else [text for text in until if text]


def _sampling(options: dict) -> Sampling:
    asked = {
        "max_tokens": options.get("max_gen_toks", _MOST_TOKENS),
        "temperature": options.get("temperature", 0.0) if options.get("do_sample") else 0.0,
        "stop": _until(options)[:_STRINGS],
    }
    return Sampling.parse(asked)


def _cut(text: str, options: dict) -> str:
    """Before the first stop string, however many there are."""
    for stop in _until(options):
        text = text.split(stop)[0]
    return text
