"""A small model with random weights of normal scale that does end its texts, and a pack of lenses for it."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from steerscope.lenses import Pack
from steerscope.lenses.formats.probes import from_probes

LAYERS, HIDDEN, VOCAB = 4, 128, 512
ENDS = list(range(1, 13))  # enough EOS tokens for texts to end
LENSES = 12
PACK = "stress"  # as requests name it
PACK_LAYER = 2


def make_model(folder: Path, dtype: torch.dtype, device: str) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=256, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024, bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(dtype).eval()  # type: ignore[arg-type]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 1.0 if "embed" in name else parameter.shape[-1] ** -0.5)
    assert model.generation_config is not None
    model.generation_config.eos_token_id = ENDS  # type: ignore[assignment]
    model.save_pretrained(folder)
    core = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCAB)}, unk_token="t0"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="t0", eos_token="t1", pad_token="t1")
    tokenizer.save_pretrained(folder)
    return model.to(device), tokenizer  # type: ignore[arg-type]


def make_pack() -> Pack:
    rng = np.random.default_rng(5)
    probes = {
        f"c{i}": SimpleNamespace(coef_=rng.normal(size=(1, HIDDEN)) / 8, intercept_=np.zeros(1)) for i in range(LENSES)
    }
    return from_probes(probes, model="stress", layer=PACK_LAYER, name=PACK, normalisation="layernorm")
