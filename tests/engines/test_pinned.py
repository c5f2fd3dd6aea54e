"""Pinned memory: exactly what was asked for, unpinned when it goes, and a failure that says what."""

import gc

import numpy as np
import pytest
import torch

from layertap.engines.pinned import pin, pinned_bytes


class Cudart:
    """As CUDA's: notes what is pinned."""

    def __init__(self, error=0):
        self.error, self.pinned = error, {}

    def cudaHostRegister(self, address, num_bytes, flags):
        if not self.error:
            self.pinned[address] = num_bytes
        return self.error

    def cudaHostUnregister(self, address):
        del self.pinned[address]


@pytest.fixture
def cudart(monkeypatch):
    made = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    return made


def test_memory_is_pinned_until_its_last_user_is_gone(cudart):
    memory = pinned_bytes(12_345)
    assert list(cudart.pinned.values()) == [12_345]
    view = torch.from_numpy(memory)[5:].numpy()
    del memory
    gc.collect()
    view[:] = 7
    assert cudart.pinned
    assert int(view.sum()) == 7 * (12_345 - 5)
    del view
    gc.collect()
    assert not cudart.pinned


def test_what_cannot_be_pinned_is_no_memory_and_says_how_much(cudart):
    cudart.error = 2
    with pytest.raises(torch.OutOfMemoryError, match="12345 bytes of host memory can't be pinned: 2"):
        pinned_bytes(12_345)
    with pytest.raises(torch.OutOfMemoryError, match="can't be had"):
        pinned_bytes(1 << 60)
    gc.collect()
    assert not cudart.pinned


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_copies_into_it_and_a_failure_does_not_reach_the_next_kernel():
    host = torch.from_numpy(pinned_bytes(1 << 20))
    assert host.is_pinned()
    there = torch.randint(0, 255, (1 << 20,), dtype=torch.uint8, device="cuda")
    host.copy_(there, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(host, there.cpu())
    assert pin(host.numpy()) is not None  # it is already
    assert int(torch.ones(3, device="cuda").sum()) == 3


def test_none_is_needed_for_nothing(cudart):
    assert np.asarray(pinned_bytes(0)).nbytes <= 1
