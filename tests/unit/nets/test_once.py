"""What is computed once for a tensor: kept while the tensor lives and nobody writes to it, and no longer."""

import gc
import weakref

import torch

from nets.sean.neighbourhood import once


class Made:
    """Something that can be asked whether it still lives."""


def test_it_is_made_once_for_a_tensor_and_a_name():
    source, other = torch.zeros(3), torch.zeros(3)
    first = once(source, "a", Made)
    assert once(source, "a", Made) is first
    assert once(source, "b", Made) is not first
    assert once(other, "a", Made) is not first  # equal, but another tensor
    assert once(source.detach(), "a", Made) is not first


def test_it_is_made_again_after_a_write():
    source = torch.zeros(3)
    first = once(source, "a", Made)
    source[1] = 1
    second = once(source, "a", Made)
    assert second is not first
    assert once(source, "a", Made) is second


def test_it_dies_with_its_tensor():
    source = torch.zeros(3)
    made = weakref.ref(once(source, "a", Made))
    gc.collect()
    assert made() is not None
    del source
    gc.collect()
    assert made() is None


def test_a_tensor_with_a_gradient_or_of_inference_mode_is_never_remembered():
    learned = torch.zeros(3, requires_grad=True)
    with torch.inference_mode():
        inferred = torch.zeros(3)
    for source in (learned, inferred):
        assert once(source, "a", Made) is not once(source, "a", Made)
