"""One choice against the oracle: its end, every token, every row, every reading and every firing."""

from collections.abc import Iterator

import torch

from steerscope.specs.steering import parse_layers
from steerscope.specs.tokens import resolve
from support.ledger import Ledger, Outcome
from support.model import ENDS
from support.oracle import Oracle, Truth
from support.workload import Request

TIE = 1e-3  # two best logits this near: either token is right
LEVEL = 1e-4  # a score this near to a threshold: the rule may fire or not
EXACT = 1e-3  # below this limit tokens and readings are compared too; in bfloat16 only rows can be


def check(
    oracle: Oracle, request: Request, found: Outcome, ledger: Ledger, limit: float, ends: list[int] = ENDS
) -> None:
    name = f"{', '.join(request.kind)} ({len(request.prompt)} + {len(found.token_ids)} tokens)"
    ledger.ends[found.reason] += 1
    certain = [*_end(request, found, ends), *_missing(oracle, request, found)]  # whatever rules did
    ledger.wrong += [f"{name}: {problem}" for problem in certain]
    problems: list[str] = []
    if found.token_ids:
        truth = oracle.truth(request, [*request.prompt, *found.token_ids[:-1]])
        exact = limit < EXACT
        problems += _rows(request, found, truth, ledger, limit)
        problems += [*_tokens(request, found, truth, ledger), *_watched(request, found, truth, ledger)] if exact else []
        if problems and truth.margin < LEVEL:
            ledger.undecided += 1
            return
    elif found.rows is not None and found.rows.n:
        problems.append(f"{found.rows.n} rows of no token")
    ledger.wrong += [f"{name}: {problem}" for problem in problems]


def _end(request: Request, found: Outcome, ends: list[int]) -> Iterator[str]:
    ids, sampling = found.token_ids, request.sampling
    if len(ids) > sampling.max_tokens:
        yield f"{len(ids)} tokens, max_tokens {sampling.max_tokens}"
    if not sampling.ignore_eos and any(token in ends for token in ids[:-1]):
        yield "the text goes on after EOS"
    if any(stop in _text(ids[:-1]) for stop in sampling.stop):
        yield "the text goes on after a stop string"
    if found.streamed is not None and found.streamed != ids:
        yield f"the stream brought {found.streamed}, the end says {ids}"
    right = {
        "stop": not sampling.ignore_eos and bool(ids) and ids[-1] in ends,
        "length": len(ids) == sampling.max_tokens,
        "stop_string": found.stop_string in tuple(sampling.stop) and str(found.stop_string) in f" {_text(ids)}",
        "cancelled": request.end is not None and request.end[0] == "cancel",
        "rule": any(action == "stop" and rule == found.rule for rule, action, _ in found.firings),
    }.get(found.reason, False)
    if not right:
        yield f"ended with {found.reason}"


def _text(ids: list[int]) -> str:
    """As the model's tokenizer writes it, which leaves out t0 and t1."""
    return " ".join(f"t{i}" for i in ids if i > 1)


def _missing(oracle: Oracle, request: Request, found: Outcome) -> Iterator[str]:
    """A request gets rows at every layer and site that it captures, and no other rows."""
    if request.capture is None or request.keep == "unread":
        if found.rows is not None:
            yield "rows that were not requested"
        return
    asked = parse_layers(request.capture.layers)
    layers = range(oracle.count) if asked == "all" else asked
    wanted = {(layer, site) for layer in layers for site in request.capture.sites}
    if found.rows is None:
        if found.token_ids:
            yield "its rows are missing"
    elif found.rows.n and set(found.rows.tensors) != wanted:
        yield f"rows of {sorted(found.rows.tensors)} instead of {sorted(wanted)}"


def _tokens(request: Request, found: Outcome, truth: Truth, ledger: Ledger) -> Iterator[str]:
    """Token j was sampled from row p − 1 + j: greedily the best, else with the probability it says."""
    logits = truth.logits[len(request.prompt) - 1 :].double().cpu()
    ids = torch.tensor(found.token_ids)
    ledger.tokens += len(ids)
    if request.sampling.temperature == 0:
        gaps = logits.max(-1).values - logits.gather(1, ids[:, None])[:, 0]
        ledger.ties += int(((gaps > 0) & (gaps < TIE)).sum())
        if bool((gaps >= TIE).any()):
            at = int((gaps >= TIE).nonzero()[0])
            yield f"token {at} is {int(ids[at])}, {float(gaps[at]):.3g} below the best"
    if request.sampling.logprobs is None:
        return
    if [token for token, _ in found.logprobs] != found.token_ids:
        yield "the log probabilities are of other tokens"
        return
    own = torch.log_softmax(logits, -1).gather(1, ids[:, None])[:, 0]
    far = float((own - torch.tensor([value for _, value in found.logprobs])).abs().max())
    ledger.worst_logprob = max(ledger.worst_logprob, far)
    if not far < TIE:
        yield f"a log probability is off by {far:.2g}"


def _rows(request: Request, found: Outcome, truth: Truth, ledger: Ledger, limit: float) -> Iterator[str]:
    capture, rows = request.capture, found.rows
    if capture is None or rows is None:
        return
    p, fed = len(request.prompt), len(truth.logits)
    chosen = resolve(capture.tokens, p, None, False, p + request.sampling.max_tokens - 1)
    index = [i for i in range(fed) if i in chosen]
    history = [*request.prompt, *found.token_ids]
    if rows.n != len(index):
        yield f"{rows.n} rows instead of {len(index)}"
        return
    if rows.labels.position.tolist() != index or rows.labels.token_id.tolist() != [history[i] for i in index]:
        yield "rows are labelled wrongly"
    if not index:
        return
    source = truth.before if capture.before_steering else truth.after
    for key, tensor in rows.items():
        wanted = source[key][index].double().cpu()
        wanted = {"mean": wanted.mean(0), "last": wanted[-1]}.get(capture.reduce or "", wanted)
        mine = tensor.double().cpu().view(wanted.shape)
        far = float(((mine - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max())
        ledger.worst_row = max(ledger.worst_row, far)
        if not far < limit:
            yield f"{key} is off by {far:.2g}"
    ledger.rows += len(index) * len(rows)


def _watched(request: Request, found: Outcome, truth: Truth, ledger: Ledger) -> Iterator[str]:
    watch = request.watch
    if watch is None:
        return
    if [row for row, _ in found.readings] != truth.watched:
        yield f"readings of rows {[row for row, _ in found.readings]} instead of {truth.watched}"
        return
    for (row, concepts), scores in zip(found.readings, truth.scores, strict=True):
        said = torch.tensor([score for _, score in concepts]).double()
        own = scores[[int(name.removeprefix("c")) for name, _ in concepts]]
        best = scores.sort(descending=True).values[: watch.top_k]
        far = float(torch.maximum((said - own).abs().max(), (said - best).abs().max()))
        ledger.worst_score = max(ledger.worst_score, far)
        if not far < LEVEL or len({name for name, _ in concepts}) != watch.top_k:
            yield f"the reading of row {row} is off by {far:.2g}"
    ledger.readings += len(found.readings)
    if sorted(found.firings) != sorted(truth.firings):
        yield f"rules did {found.firings} instead of {truth.firings}"
    ledger.firings += len(found.firings)
    yield from _stopped(request, found, truth)


def _stopped(request: Request, found: Outcome, truth: Truth) -> Iterator[str]:
    """A stop fired on row t keeps token t + 1, and nothing after it."""
    stops = [row for _, action, row in truth.firings if action == "stop"]
    if not stops:
        return
    kept = max(stops[0] + 1 - len(request.prompt), 0) + 1
    if len(found.token_ids) != kept or found.reason not in ("rule", "stop_string", "cancelled"):
        yield f"a rule stopped it on row {stops[0]}: {len(found.token_ids)} tokens, ended with {found.reason}"
