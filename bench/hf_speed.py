"""The transformers engine against bare `model.generate` and against its peers, on one model and one set of prompts.

First part, one process: bare generate, our engine idle, capturing every layer, and steering take turns; the ratio of
each round is paired with the bare run beside it, so that a slow moment of the machine hits both. Second part, one
process and one virtual environment per library: the same cells through each peer's own fastest documented way, with
rows and tokens checked against plain hooks.

    python -m bench.hf_speed --out bench/results/hf.json [--peers]
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from bench.machine import commit, machine
from bench.peers.run import OURS, REFERENCE, run_peers
from steerscope.engines.hf import HFEngine
from steerscope.engines.results import TokenPrompt
from steerscope.specs import Add, Capture, Sampling

LAYERS, HIDDEN, VOCAB = 16, 256, 2048
STEERED_LAYER = 8


def make_model(folder: Path) -> LlamaForCausalLM:
    """A Llama of 16 layers with seeded random weights, saved with a tokenizer that is not needed."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=704,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    core = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCAB)}, unk_token="t0"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=core, bos_token="t0", eos_token="t1", pad_token="t1").save_pretrained(
        folder
    )
    return model


def measure_engine(folder: Path, prompts: list[list[int]], tokens: int, rounds: int) -> dict[str, dict[str, object]]:
    """Seconds of each cell in turns, and the paired ratio to bare generate."""
    engine = HFEngine.from_pretrained(folder, name="bench", max_batch=len(prompts))
    model, ids = engine.model, torch.tensor(prompts)
    sampling = Sampling(max_tokens=tokens, ignore_eos=True)
    wrapped = [TokenPrompt(prompt) for prompt in prompts]
    vector = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(1)).numpy()

    staggered = [tokens * (i + 1) // len(prompts) for i in range(len(prompts))]

    def bare() -> list[list[int]]:
        with torch.no_grad():
            out = model.generate(  # type: ignore[operator]
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, eos_token_id=None
            )
        return out[:, ids.shape[1] :].tolist()

    def ours(
        steer: Add | None = None, capture: Capture | None = None, lengths: Sequence[int] | None = None
    ) -> list[list[int]]:
        asked = sampling if lengths is None else [Sampling(max_tokens=n, ignore_eos=True) for n in lengths]
        done = engine.sync.generate(wrapped, asked, steer=steer, capture=capture)
        for one in done:
            if one.capture is not None:
                rows = one.rows
                assert rows.n == ids.shape[1] + tokens - 1
                assert len(rows) == LAYERS
                one.capture.close()
        return [one.token_ids for one in done]

    cells: dict[str, Callable[[], list[list[int]]]] = {
        "bare generate": bare,
        "idle": ours,
        "capture 16 layers": lambda: ours(capture=Capture()),
        "steer 1 layer": lambda: ours(steer=Add(vector=vector, layers=STEERED_LAYER)),
        "steer 16 layers": lambda: ours(steer=Add(vector=vector, scale=0.1, layers="all")),
        # Bare generate runs every row as long as the longest; here each leaves the batch when it is done.
        "idle, every request another length": lambda: ours(lengths=staggered),
    }
    warm = {name: run() for name, run in cells.items()}
    assert warm["idle"] == warm["bare generate"] == warm["capture 16 layers"], "the engines disagree"
    for short, full in zip(warm["idle, every request another length"], warm["idle"], strict=True):
        assert short == full[: len(short)], "a request's tokens depend on who leaves the batch"
    seconds: dict[str, list[float]] = {name: [] for name in cells}
    for turn in range(rounds):
        order = list(cells) if turn % 2 == 0 else list(cells)[::-1]
        for name in order:
            start = time.perf_counter()
            cells[name]()
            seconds[name].append(time.perf_counter() - start)
    engine.sync.close()
    base = seconds["bare generate"]
    return {
        name: {
            "seconds": times,
            "median": statistics.median(times),
            "ratio": statistics.median(mine / bare_ for mine, bare_ in zip(times, base, strict=True)),
            "ratio_of_best": min(times) / min(base),
        }
        for name, times in seconds.items()
    }


def engine_table(cells: dict[str, dict]) -> Table:
    table = Table("cell", "median s", "× bare (median)", "× bare (best)", title="transformers engine, one process")
    for name, cell in cells.items():
        table.add_row(name, f"{cell['median']:.3f}", f"{cell['ratio']:.3f}", f"{cell['ratio_of_best']:.3f}")
    return table


def peers_table(peers: dict[str, dict]) -> Table:
    table = Table("library", "plain", "capture", "steer", "remark", title="best s, a process each")
    for name, found in peers.items():
        cells, remarks = found.get("cells", {}), [found["error"]] if "error" in found else []
        for key, cell in cells.items():
            remarks += [f"{key}: {cell[word]}" for word in ("error", "wrong") if word in cell]
        shown = [
            f"{min(cells[key]['seconds']):.3f}" if "seconds" in cells.get(key, {}) else "–"
            for key in ("plain", "capture", "steer")
        ]
        table.add_row(f"{name} {found.get('version', '')}", *shown, "; ".join(remarks)[:70])
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--prefill", type=int, default=128)
    parser.add_argument("--decode", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="more than one is slower and noisier on shared cores")
    parser.add_argument("--peers", action="store_true", help="also run the peers, each in a venv of its own")
    parser.add_argument("--peer-rounds", type=int, default=2)
    parser.add_argument("--venvs", type=Path, default=Path(".cache/peers"))
    args = parser.parse_args(arguments)
    os.environ["OMP_NUM_THREADS"] = str(args.threads)  # for the peers' processes
    torch.set_num_threads(args.threads)
    console = Console(stderr=True)
    rng = torch.Generator().manual_seed(7)
    prompts = torch.randint(2, VOCAB, (args.batch, args.prefill), generator=rng).tolist()
    workload = {"layers": LAYERS, "hidden": HIDDEN, "vocab": VOCAB, "dtype": "float32"}
    workload |= {"batch": args.batch, "prefill": args.prefill, "decode": args.decode, "rounds": args.rounds}
    with tempfile.TemporaryDirectory() as scratch:
        folder, file = Path(scratch) / "model", Path(scratch) / "prompts.json"
        make_model(folder)
        file.write_text(json.dumps(prompts))
        console.print("measuring the engine against bare generate …")
        cells = measure_engine(folder, prompts, args.decode, args.rounds)
        result: dict[str, object] = {"commit": commit(), "workload": workload, "machine": machine()}
        result["engine"] = cells
        Console().print(engine_table(cells))
        if args.peers:
            found = run_peers(
                folder,
                file,
                args.decode,
                2,
                args.venvs,
                rounds=args.peer_rounds,
                layer=STEERED_LAYER,
                progress=console.print,
            )
            result["peers"] = {
                name: found[name] for name in sorted(found, key=lambda n: (n != OURS, n != REFERENCE, n))
            }
            Console().print(peers_table(found))
        elif args.out.exists():  # the engine alone was measured again
            result["peers"] = json.loads(args.out.read_text()).get("peers", {})
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    console.print(f"written to {args.out}")


if __name__ == "__main__":
    main()
