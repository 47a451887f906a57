"""The kernels that write readings, in Triton's interpreter: in the process that test_kernel.py starts."""

import os

import numpy as np
import pytest
import torch

from steerscope.lenses.reader import StepReadings

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in the process that test_kernel.py starts")


@interpreted
@pytest.mark.parametrize("ruled", [False, True])
def test_every_line_writes_its_reading_and_the_last_of_a_request_how_many_there_are(ruled: bool) -> None:
    from steerscope.engines.vllm.cuda import lens_readout as r

    rng, k, terms, rules, most = np.random.default_rng(0), 5, 3, 4, 6
    # Requests: two rows; one row of a request without rules; one of no request; one whose text is over.
    requests = [(0, 3, terms, 2), (0, 2, -1, 1), (None, 3, -1, 1), (most, 4, -1, 1)]
    memory = np.full(4096, -7, dtype=np.int32)
    counters = np.full(len(requests), -7, dtype=np.int64)
    lines = []
    for i, (number, kept, said, count) in enumerate(requests):
        for row in range(count):
            line = np.zeros(r.WIDTH, dtype=np.int64)
            line[[r.MOST, r.KEPT, r.TERMS, r.POSITION]] = most, kept, said if ruled else -1, 40 + row
            if number is not None:
                line[[r.BASE, r.NUMBER]] = memory.ctypes.data + 4096 * i, number + row
                line[r.COUNTER] = counters.ctypes.data + 8 * i if row == count - 1 else 0
            lines.append(line)
    sheet = torch.from_numpy(np.stack(lines))
    n = len(lines)
    for turn in range(2):  # the second time the one-row requests have gone on by themselves
        on, off = (torch.from_numpy(rng.integers(0, 2, (n, rules)).astype(bool)) for _ in range(2))
        found = StepReadings(
            torch.from_numpy(rng.random((n, k), dtype=np.float32)),
            torch.from_numpy(rng.integers(0, 99, (n, k))),
            torch.from_numpy(rng.random((n, terms), dtype=np.float32)) if ruled else None,
            on if ruled else None,
            off if ruled else None,
        )
        before = sheet.clone()
        memory[:], counters[:] = -7, -7
        r.write_readings(sheet, found)
        line = 0
        for i, (number, kept, said, count) in enumerate(requests):
            said = said if ruled else -1
            words = 2 * kept + (2 + said if said >= 0 else 0)
            mine = memory[1024 * i : 1024 * (i + 1)]
            expected = np.full(1024, -7, dtype=np.int32)
            for row in range(line, line + count):
                at = int(before[row, r.NUMBER]) * words
                if number is None or before[row, r.NUMBER] >= most:
                    continue
                expected[at : at + kept] = found.values[row, :kept].numpy().view(np.int32)
                expected[at + kept : at + 2 * kept] = found.indices[row, :kept].numpy()
                if said >= 0:
                    bits = 1 << np.arange(rules)
                    expected[at + 2 * kept : at + 2 * kept + 2] = on[row].numpy() @ bits, off[row].numpy() @ bits
                    expected[at + 2 * kept + 2 : at + words] = found.scores[row, :said].numpy().view(np.int32)
            assert np.array_equal(mine, expected), (turn, i)
            told = -7 if number is None else min(int(before[line + count - 1, r.NUMBER]) + 1, most)
            assert counters[i] == told
            line += count
        assert torch.equal(sheet[:, r.NUMBER], before[:, r.NUMBER] + 1)
        assert torch.equal(sheet[:, r.POSITION], before[:, r.POSITION] + 1)
