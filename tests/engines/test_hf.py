"""What only the transformers engine has: structure found and refused, its cache, its sampler, loading."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from transformers import LlamaConfig
from transformers.cache_utils import DynamicCache

from steerscope.engines.hf import HFEngine
from steerscope.engines.hf.blocks import find_blocks
from steerscope.engines.hf.decode_batch import BatchCache
from steerscope.engines.hf.sampler import Chooser, choose
from steerscope.specs import Add, Capture, InvalidRequest, Sampling
from steerscope.specs.errors import ModelNotFound, UnsupportedModel
from support import tiny
from support.reference import distance


class TestStructure:
    def test_a_model_without_decoder_blocks_is_refused_with_what_was_looked_for(self) -> None:
        model = copy.deepcopy(tiny.model())
        model.model.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(4)])
        with pytest.raises(UnsupportedModel, match="looked for one ModuleList of 4 decoder blocks.*self_attn"):
            find_blocks(model)

    def test_a_block_with_unknown_multipliers_loses_the_sites_that_would_be_wrong(self) -> None:
        model = copy.deepcopy(tiny.model("granite", residual_multiplier=0.5))
        for block in model.model.layers:
            block.residual_multiplier = torch.tensor(0.5)  # the same arithmetic, but not a number to be looked up
        engine = HFEngine(model, tiny.tokenizer(), name="granite").sync
        assert set(engine.facts.refused_sites) == {"attn_out", "mlp_out", "resid_mid"}
        with pytest.raises(InvalidRequest, match="what layer 0 .* adds to the stream is not.*0.5 × attention"):
            engine.generate("Hello", capture=Capture(sites="attn_out"))
        done = engine.generate("Hello there", Sampling(max_tokens=4, ignore_eos=True), capture=Capture())
        fed = torch.tensor([[*done.prompt_token_ids, *done.token_ids[:-1]]])
        with torch.no_grad():
            wanted = model(fed, output_hidden_states=True).hidden_states
        assert all(distance(done.rows[layer], wanted[layer + 1][0]) < 1e-5 for layer in range(3))
        engine.close()

    def test_a_parallel_block_has_no_state_in_between(self) -> None:
        engine = HFEngine(tiny.model("gpt_neox"), tiny.tokenizer(), name="neox").sync
        with pytest.raises(InvalidRequest, match="parallel block"):
            engine.generate("Hello", steer=Add(vector=np.ones(64), layers=1, site="resid_mid"))
        sequential = tiny.model("gpt_neox", use_parallel_residual=False)
        assert find_blocks(sequential).refused == {}
        engine.close()

    def test_nothing_is_hooked_while_nobody_asks(self) -> None:
        model = copy.deepcopy(tiny.model())
        for module in model.modules():  # an engine of another test may have some on the original
            module._forward_hooks.clear()
            module._forward_pre_hooks.clear()
        engine = HFEngine(model, tiny.tokenizer(), name="llama").sync

        def hooks() -> int:
            return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())

        assert hooks() == 0
        seen = []
        for event in engine.stream("Hello", Sampling(max_tokens=4, ignore_eos=True), capture=Capture(layers="1-2")):
            seen.append(hooks())
            del event
        assert seen[0] == 2
        engine.close()
        assert hooks() == 0


class TestCache:
    @staticmethod
    def prefill(lengths: list[int], seed: int) -> tuple[DynamicCache, list[torch.Tensor]]:
        """Random keys of left-padded rows; the rows without padding are returned for comparison."""
        generator = torch.Generator().manual_seed(seed)
        width = max(lengths)
        cache = DynamicCache()
        keys = torch.randn(len(lengths), 2, width, 3, generator=generator)
        for layer in range(2):
            cache.update(keys, keys + 1, layer)
        return cache, [keys[i, :, width - n :] for i, n in enumerate(lengths)]

    @staticmethod
    def row(cache: BatchCache, i: int) -> torch.Tensor:
        window = cache.window
        keys = cache.own[1].keys
        assert keys is not None
        return keys[i, :, window.end - cache.lengths[i] : window.end]

    def test_rows_that_join_grow_and_leave_keep_their_own_keys(self) -> None:
        rng = np.random.default_rng(0)
        cache, truth = BatchCache(LlamaConfig(num_hidden_layers=2)), []
        for turn in range(60):
            if rng.random() < 0.4 and len(truth) < 6:
                lengths = [int(n) for n in rng.integers(1, 90, size=int(rng.integers(1, 3)))]
                fresh, rows = self.prefill(lengths, turn)
                cache.join(fresh, lengths)
                truth += rows
            elif truth and rng.random() < 0.3:
                at = int(rng.integers(len(truth)))
                cache.leave(at)
                truth[at] = truth[-1]
                truth.pop()
            for _ in range(int(rng.integers(0, 40)) if truth else 0):
                cache.make_room()
                new = torch.from_numpy(rng.normal(size=(len(truth), 2, 1, 3)).astype(np.float32))
                for layer in range(2):
                    keys, values = cache.update(new, new + 1, layer)
                    assert keys.shape[-2] == max(t.shape[1] for t in truth) + 1
                    assert torch.equal(values, torch.where(keys == 0, values, keys + 1))
                cache.advance()
                truth = [torch.cat([t, new[i]], dim=1) for i, t in enumerate(truth)]
            assert cache.lengths == [t.shape[1] for t in truth]
            assert all(torch.equal(self.row(cache, i), t) for i, t in enumerate(truth))

    def test_the_mask_shows_each_row_its_own_tokens_and_the_new_one(self) -> None:
        cache = BatchCache(LlamaConfig(num_hidden_layers=2))
        cache.join(self.prefill([3, 5], 0)[0], [3, 5])
        mask = cache.mask(torch.device("cpu"))
        assert mask is not None
        assert mask.tolist() == [[False, False, True, True, True, True], [True] * 6]
        cache.leave(0)
        assert cache.mask(torch.device("cpu")) is None


class TestSampler:
    LOGITS = torch.log(torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.0625]))

    def draws(self, count: int = 4000, **sampling: float) -> np.ndarray:
        chooser = Chooser.of(Sampling(seed=1, **sampling), [], torch.device("cpu"))  # type: ignore[arg-type]
        found = [choose(self.LOGITS[None].clone(), [chooser])[0].token for _ in range(count)]
        return np.bincount(np.array(found), minlength=5) / count

    @pytest.mark.parametrize(
        ("sampling", "expected"),
        [
            ({"temperature": 1.0}, [0.5, 0.25, 0.125, 0.0625, 0.0625]),
            ({"temperature": 0.5}, np.array([0.25, 0.0625, 0.015625, 0.00390625, 0.00390625]) / 0.3359375),
            ({"temperature": 1.0, "top_k": 2}, [2 / 3, 1 / 3, 0, 0, 0]),
            ({"temperature": 1.0, "top_p": 0.7}, [2 / 3, 1 / 3, 0, 0, 0]),
            ({"temperature": 1.0, "top_p": 0.1}, [1, 0, 0, 0, 0]),
            ({"temperature": 1.0, "min_p": 0.2}, np.array([0.5, 0.25, 0.125, 0, 0]) / 0.875),
            ({"temperature": 1.0, "top_k": 3, "top_p": 0.8}, [2 / 3, 1 / 3, 0, 0, 0]),
        ],
    )
    def test_draws_follow_the_filtered_distribution(self, sampling: dict[str, float], expected: list[float]) -> None:
        # 4,000 draws: the standard error is at most 0.008; four of them.
        assert np.abs(self.draws(**sampling) - np.array(expected)).max() < 0.032

    def test_the_nucleus_is_right_when_it_is_larger_than_the_short_list(self) -> None:
        logits = torch.zeros(1, 5000)
        chooser = Chooser.of(Sampling(temperature=1.0, top_p=0.99, seed=0), [], torch.device("cpu"))
        found = {choose(logits.clone(), [chooser])[0].token for _ in range(300)}
        assert max(t for t in found if t is not None) > 1024

    def test_the_repetition_penalty_looks_at_the_window_only(self) -> None:
        logits = torch.tensor([[2.0, 1.9, -1.0]])
        for window, expected in ((None, 1), (1, 0)):
            sampling = Sampling(repetition_penalty=1.5, repetition_window=window)
            chooser = Chooser.of(sampling, [0, 2], torch.device("cpu"))
            assert choose(logits.clone(), [chooser])[0].token == expected
        negative = torch.tensor([[-1.0, -1.2]])
        penalised = Sampling(repetition_penalty=1.5)
        assert choose(negative, [Chooser.of(penalised, [0], torch.device("cpu"))])[0].token == 1

    @pytest.mark.parametrize("bad", [float("nan"), float("inf")])
    def test_logits_that_are_not_numbers_choose_nothing(self, bad: float) -> None:
        logits = torch.tensor([[1.0, bad, 0.0], [0.0, 1.0, 2.0]])
        greedy = Chooser.of(Sampling(), [], torch.device("cpu"))
        sampled = Chooser.of(Sampling(temperature=1.0, seed=0), [], torch.device("cpu"))
        for first in (greedy, sampled):
            assert [chosen.token for chosen in choose(logits.clone(), [first, greedy])] == [None, 2]


class TestLoading:
    def test_a_directory_loads_as_any_model_does(self, tmp_path: Path) -> None:
        import steerscope

        tiny.model().save_pretrained(tmp_path / "m")
        tiny.tokenizer().save_pretrained(tmp_path / "m")
        with steerscope.load(tmp_path / "m") as engine:
            mine = engine.generate("Hello world", Sampling(max_tokens=6, ignore_eos=True))
        direct = HFEngine(tiny.model(), tiny.tokenizer(), name="x").sync
        assert mine.token_ids == direct.generate("Hello world", Sampling(max_tokens=6, ignore_eos=True)).token_ids
        direct.close()

    @pytest.mark.parametrize("name", ["no-such-org/no-such-model", "./nowhere"])
    def test_a_model_that_is_not_there_is_one_clear_error(self, name: str) -> None:
        import steerscope

        with pytest.raises(ModelNotFound, match="no-such-model|nowhere"):
            steerscope.load(name)

    def test_a_device_that_is_not_there_is_one_clear_error(self, tmp_path: Path) -> None:
        tiny.model().save_pretrained(tmp_path / "m")
        tiny.tokenizer().save_pretrained(tmp_path / "m")
        with pytest.raises(UnsupportedModel, match="device 'cuda:7'|device 'nonsense'"):
            HFEngine.from_pretrained(tmp_path / "m", device="cuda:7" if not torch.cuda.is_available() else "nonsense")
