"""What only a GPU can show: graphs, and a bound on real memory."""

import pytest
import torch

from lenses.packs import make, one_by_one, rows
from lenses.test_expand import assert_as_slow
from steerscope.lenses import Bank, Tiers
from steerscope.lenses.reader import PackOptions, Reader, Registered

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
WORST = {"fp32": 1e-4, "bf16": 0.05, "int8": 0.1}


@pytest.mark.parametrize("weights", list(WORST))
def test_a_captured_evaluation_follows_its_rows(weights):
    pack = make([5, 30], hidden=256, widths=(64, 32), normed=True, calibrated=True)
    bank = Bank(pack, device="cuda", weights=weights)
    static, out = torch.zeros(9, 256, device="cuda"), torch.zeros(9, len(pack), device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        bank.scores(static, out=out)
        bank.top(static, 4)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        bank.scores(static, out=out)
        values, _ = bank.top(static, 4)
    for seed in (1, 2):
        x = rows(9, 256, seed=seed).cuda()
        static.copy_(x)
        graph.replay()
        torch.testing.assert_close(out, bank.scores(x))
        torch.testing.assert_close(values, bank.scores(x).topk(4, dim=-1).values)
        raw = bank.probabilities(x).cpu()
        assert (raw - one_by_one(pack, x.cpu())).abs().max() < WORST[weights]


@pytest.mark.parametrize("weights", list(WORST))
def test_memory_beside_weights_and_result_stays_within_the_workspace(weights):
    pack = make([400], hidden=512, widths=(128, 64))
    bank, workspace = Bank(pack, device="cuda", weights=weights, workspace=32 << 20), 32 << 20
    x, out = rows(3000, 512).cuda(), torch.empty(3000, 400, device="cuda")
    bank.logits(x[:8])  # what the libraries keep for themselves
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    bank.logits(x, out=out)
    assert 0 < torch.cuda.max_memory_allocated() - before <= workspace


@pytest.mark.parametrize("normed", [True, False])  # mixed inputs cannot be passed over at once
@pytest.mark.parametrize("budget", [12, 20, 60])
def test_tiers_on_a_gpu_give_what_the_full_bank_gives(budget, normed):
    pack = make([3, 8, 20, 40], normed=normed, calibrated=True, hidden=256, widths=(64, 32))
    bank = Bank(pack, device="cuda")
    tiers = Tiers(pack, budget=budget, device="cuda")
    for turn in range(30):
        x = rows(5, 256, seed=turn).cuda()
        found = tiers.expand(x, 6, 4, keep_scores=True)
        assert_as_slow(found, bank.scores(x), 2, 6, 4)


@pytest.mark.parametrize("weights", list(WORST))
def test_what_is_read_on_a_gpu_is_what_is_read_without_one(weights):
    pack = make([5, 30], hidden=256, widths=(128, 64), normed=True, calibrated=True)
    readers = [Reader(Registered(pack, PackOptions(weights=weights)), device) for device in ("cpu", "cuda")]
    assert readers[1].bank._stack.kernels is not None
    assert readers[1].bank._chooses
    for n in (1, 20, 40, 64, 65):
        x, columns = rows(n, 256, seed=n), torch.tensor([[0, 7]]).expand(n, 2)
        view = torch.zeros(n, 10, dtype=torch.long)[:, 3]  # as a sheet has it
        view[::2] = readers[0].view((1,))
        assert readers[1].view((1,)) == 1
        for which in (None, view):
            alone, found = (
                reader.read(x.to(reader.device), 8, columns.to(reader.device), which if which is None else place)
                for reader, place in zip(readers, (view, view.cuda()), strict=True)
            )
            assert (found.scores.cpu() - alone.scores).abs().max() < 2 * WORST[weights]
            assert (found.values.cpu() - alone.values).abs().max() < 2 * WORST[weights]
            assert (found.indices[:, 0].cpu() == alone.indices[:, 0]).float().mean() > 0.8
    x[3, 4] = float("inf")
    assert (readers[1].read(x[:9].cuda(), 8).indices[3] == -1).all()


def test_graphs_of_more_shapes_than_are_kept_are_captured_after_all_earlier_ones_are_gone():
    pack = make([3, 8, 20], hidden=256, widths=(64, 32))
    bank = Bank(pack, device="cuda")
    tiers = Tiers(pack, budget=len(pack), device="cuda")
    for n in (*range(1, 40), 1):
        x = rows(n, 256, seed=n).cuda()
        assert_as_slow(tiers.expand(x, 2, 4, keep_scores=True), bank.scores(x), 2, 2, 4)
