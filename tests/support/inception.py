"""The Inception network of FID with random weights, in a file of the exact format."""

from pathlib import Path

import pytest
import torch
import torch_fidelity.feature_extractor_inceptionv3 as fidelity
from torch import nn


def save(path: Path) -> nn.Module:
    """Write the file, and return the network as torch-fidelity has it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fidelity, "load_state_dict_from_url", lambda *_, **__: {})
        patch.setattr(fidelity.FeatureExtractorInceptionV3, "load_state_dict", lambda *_: None)
        network = fidelity.FeatureExtractorInceptionV3("inception-v3-compat", ["2048"])
    dice = torch.Generator().manual_seed(0)
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, generator=dice)
    torch.save(network.state_dict(), path)
    return network
