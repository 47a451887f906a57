"""One way in: a name, a directory or a hub id → a running engine."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

from steerscope.engines.engine_thread import ThreadedEngine
from steerscope.engines.sync import SyncEngine
from steerscope.models import resolve
from steerscope.specs.errors import InvalidRequest, Problem

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedTokenizerBase


class LoadOptions(TypedDict, total=False):
    """What can be said about an engine before it starts."""

    engine: Literal["hf", "vllm"]  # transformers, or vLLM where it is installed
    tokenizer: "PreTrainedTokenizerBase | None"  # needed with a loaded model; else the model's own
    adapter: str | Path | None  # hf only: folder or hub id of a LoRA or another adapter of peft
    device: str | None  # hf only
    dtype: str | None
    max_batch: int  # sequences that decode together
    prefill_chunk: int  # hf only: tokens of prompts between two steps of running streams
    max_columns: int  # ops of one token at one site
    capture_budget: int  # bytes of rows that may wait to be fetched
    progress: Callable[[str], None] | None
    taps: Mapping[str, Any]  # vllm only: settings of the taps (layers, sites, slots, …)
    vllm: Mapping[str, Any]  # vllm only: vLLM's own engine arguments


def load_engine(model: "str | Path | nn.Module", **options: Unpack[LoadOptions]) -> ThreadedEngine[Any]:
    """The same model for code with `await`; it takes the options of `load`.

    ```python
    import asyncio

    import steerscope as ss


    async def main() -> None:
        model = ss.load_engine("smollm2-135m")
        short = ss.Sampling(max_tokens=10)
        asked = [model.generate(text, short) for text in ("Once upon a time", "The weather today is")]
        answers = await asyncio.gather(*asked)
        print([answer.text for answer in answers])
        await model.close()


    asyncio.run(main())
    ```
    """
    _check(model, options)
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    kind = given.pop("engine", "hf")
    progress = given.pop("progress", None)
    taps = given.pop("taps", {})
    vllm = given.pop("vllm", {})
    from steerscope.engines.hf import HFEngine

    if not isinstance(model, str | os.PathLike):
        return HFEngine.from_loaded(model, **given)
    if kind == "vllm":
        return _vllm(model, progress, {**taps}, vllm, given)
    return HFEngine.from_pretrained(resolve(str(model), progress=progress), name=str(model), **given)


def _check(model: object, options: LoadOptions) -> None:
    kind = options.get("engine", "hf")
    taps = options.get("taps")
    vllm = options.get("vllm")
    problems = []
    if kind not in ("hf", "vllm"):
        problems.append(Problem("engine", f"{kind!r} is unknown", "choose hf or vllm"))
    if kind == "vllm" and options.get("device") is not None:
        problems.append(Problem("device", "vLLM chooses it itself", "leave it out, or set CUDA_VISIBLE_DEVICES"))
    if kind == "vllm" and "prefill_chunk" in options:
        problems.append(Problem("prefill_chunk", "is for transformers", 'give vllm={"max_num_batched_tokens": …}'))
    if kind == "vllm" and options.get("adapter") is not None:
        problems.append(Problem("adapter", "is for transformers", "merge it with peft, and give the merged model"))
    if not isinstance(model, str | os.PathLike):
        problems += _problems_of_loaded(kind, options)
    if kind == "hf" and (taps or vllm):
        problems.append(Problem("taps" if taps else "vllm", "is for the vLLM engine", "leave it out"))
    if problems:
        raise InvalidRequest(problems)


def _problems_of_loaded(kind: str, options: LoadOptions) -> list[Problem]:
    problems = []
    if kind == "vllm":
        remedy = "save it with save_pretrained, and give the folder"
        problems.append(Problem("model", "vLLM loads models itself", remedy))
    if options.get("tokenizer") is None:
        remedy = "give tokenizer=AutoTokenizer.from_pretrained(…)"
        problems.append(Problem("tokenizer", "a loaded model comes without one", remedy))
    for name in ("device", "dtype", "adapter"):
        if options.get(name) is not None:
            problems.append(Problem(name, "the model is loaded already", "change the model before it is given"))
    return problems


def load(model: "str | Path | nn.Module", **options: Unpack[LoadOptions]) -> SyncEngine:
    """Load a model and start its engine; close it with `close()` or a `with` block.

    `model` is `smollm2-135m` (embedded), a model directory, a hub id, or a model that transformers or peft has loaded.
    A loaded model is used as it is, and left as it was when the engine is closed. Options:

    - `tokenizer`: needed with a loaded model
    - `adapter`: with transformers, the folder or hub id of a LoRA or another adapter that peft reads
    - `engine`: `"hf"` (transformers, the default) or `"vllm"`
    - `device`, `dtype`: default a GPU where there is one; float32 on a CPU, else as stored
    - `max_batch`: sequences that decode together, each choice of a request one; more wait their turn. Default 64 with
      transformers, vLLM's own with vLLM. Memory is taken by the sequences that run, each padded to the longest
    - `prefill_chunk`: with transformers, tokens of prompts that are computed between two steps of running streams
    - `max_columns`: ops that one token may have at one site
    - `capture_budget`: bytes of rows that may wait to be fetched
    - `taps`, `vllm`: with vLLM, what is tapped, and vLLM's own arguments
    - `progress`: a function that is called with a line of text for each stage of loading

    ```python
    import steerscope as ss

    with ss.load("smollm2-135m", max_batch=4) as model:
        print(model.facts.layers, model.facts.hidden)
        print(model.generate("The weather today is", ss.Sampling(max_tokens=10)).text)
    ```
    """
    return load_engine(model, **options).sync


def _vllm(
    model: str | Path, progress: Any, taps: dict[str, Any], vllm: Any, given: dict[str, Any]
) -> ThreadedEngine[Any]:
    from steerscope.engines.vllm.guards import check_version

    check_version()
    from steerscope.engines.vllm.client.engine import VLLMEngine
    from steerscope.engines.vllm.client.start import share_of_memory, usable_dtype
    from steerscope.engines.vllm.settings import VLLMSettings

    given.pop("device", None)
    if "max_columns" in given:
        taps["max_columns"] = given.pop("max_columns")
    settings = VLLMSettings.parse(taps)
    arguments: dict[str, Any] = dict(share_of_memory())
    if dtype := given.pop("dtype", None) or usable_dtype():
        arguments["dtype"] = dtype
    if "max_batch" in given:
        arguments["max_num_seqs"] = given.pop("max_batch")
    found = resolve(str(model), progress=progress)
    return VLLMEngine(found, name=str(model), settings=settings, **given, **{**arguments, **vllm})
