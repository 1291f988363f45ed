"""The checksum on a GPU is the checksum."""

import pytest
import torch

from rdt_e2e.fabric import checksum as module
from rdt_e2e.fabric.checksum import checksum

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("num_bytes", [0, 1, 8, 32_767, 32_768, 100_001, 70_000_000, 2_200_000_008])
def test_it_is_the_same_on_cpu_and_gpu(num_bytes):
    raw = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)
    assert int(checksum(raw.cuda())) == int(checksum(raw))


def test_one_pass_is_in_use():
    pytest.importorskip("triton")
    rows = torch.randint(0, 99, (3, module.ROW_WORDS), dtype=torch.int64, device="cuda")
    one_pass = module._on_gpu()
    assert one_pass is not None
    assert int(one_pass(rows, 5)) == int(module._weighted_in_two_passes(rows, 5))
