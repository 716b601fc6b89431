"""The generator of the published SEAN, plain and slow: loops over pictures and labels, whole maps, nothing folded.

The tests of nets/ and `python -m gan.bench sean` compare with it. It is a function of a state dict with the published
key names, written from the paper's equations and the facts of the published architecture. In training it updates the
buffers in that state dict: running statistics, and the singular vectors of spectral norm.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

State = dict[str, Tensor]
# The ends of the keys of what learns; the others are buffers.
LEARNED = ("weight", "bias", "weight_orig", "noise_var", "blending_gamma", "blending_beta")


def generator(state: State, onehot: Tensor, codes: Tensor, training: bool, upsampling: str = "normal") -> Tensor:
    """A picture. All blocks except the last get the codes."""
    names = ["head_0", "G_middle_0", "G_middle_1", "up_0", "up_1", "up_2", "up_3"]
    doubled = {"G_middle_0", "up_0", "up_1", "up_2", "up_3"} | ({"G_middle_1"} if upsampling == "more" else set())
    shrink = 2 ** len(doubled)
    small = F.interpolate(onehot, (onehot.shape[2] // shrink, onehot.shape[3] // shrink), mode="nearest")
    x = F.conv2d(small, *_weights(state, "fc"), padding=1)
    for name in names:
        if name in doubled:
            x = x.repeat_interleave(2, 2).repeat_interleave(2, 3)
        x = _block(state, name, x, onehot, None if name == "up_3" else codes, training)
    return torch.tanh(F.conv2d(F.leaky_relu(x, 0.2), *_weights(state, "conv_img"), padding=1))


def _block(state: State, name: str, x: Tensor, onehot: Tensor, codes: Tensor | None, training: bool) -> Tensor:
    shortcut = x
    if f"{name}.conv_s.weight_orig" in state:
        shortcut = _ace(state, f"{name}.ace_s", x, onehot, codes, training)
        shortcut = F.conv2d(shortcut, _bounded(state, f"{name}.conv_s", training))
    for number in range(2):
        x = F.leaky_relu(_ace(state, f"{name}.ace_{number}", x, onehot, codes, training), 0.2)
        weight = _bounded(state, f"{name}.conv_{number}", training)
        x = F.conv2d(x, weight, state[f"{name}.conv_{number}.bias"], padding=1)
    return shortcut + x


def _ace(state: State, name: str, x: Tensor, onehot: Tensor, codes: Tensor | None, training: bool) -> Tensor:
    grain = torch.randn(len(x), 1, *x.shape[2:], dtype=x.dtype, device=x.device)
    noisy = x + grain * state[f"{name}.noise_var"][:, None, None]
    normal = _batch_norm(state, f"{name}.param_free_norm", noisy, training)
    mask = F.interpolate(onehot, x.shape[2:], mode="nearest")
    inner = F.relu(F.conv2d(mask, *_weights(state, f"{name}.Spade.mlp_shared.0"), padding=1))
    gamma = F.conv2d(inner, *_weights(state, f"{name}.Spade.mlp_gamma"), padding=1)
    beta = F.conv2d(inner, *_weights(state, f"{name}.Spade.mlp_beta"), padding=1)
    if codes is not None:
        styles = _style_map(state, name, mask, codes)
        share = torch.sigmoid(state[f"{name}.blending_gamma"])
        gamma = share * F.conv2d(styles, *_weights(state, f"{name}.conv_gamma"), padding=1) + (1 - share) * gamma
        share = torch.sigmoid(state[f"{name}.blending_beta"])
        beta = share * F.conv2d(styles, *_weights(state, f"{name}.conv_beta"), padding=1) + (1 - share) * beta
    return normal * (1 + gamma) + beta


def _style_map(state: State, name: str, mask: Tensor, codes: Tensor) -> Tensor:
    pictures = []
    for regions, rows in zip(mask, codes, strict=True):
        spread = codes.new_zeros(codes.shape[2], *mask.shape[2:])
        for label, row in enumerate(rows):
            if (region := regions[label]).any():
                code = F.relu(F.linear(row, *_weights(state, f"{name}.fc_mu{label}")))
                spread = spread + code[:, None, None] * region
        pictures.append(spread)
    return torch.stack(pictures)


def _batch_norm(state: State, name: str, x: Tensor, training: bool) -> Tensor:
    mean, variance = state[f"{name}.running_mean"], state[f"{name}.running_var"]
    if training:
        batch_mean, batch_variance = x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0)
        with torch.no_grad():
            mean.copy_(0.9 * mean + 0.1 * batch_mean)
            variance.copy_(0.9 * variance + 0.1 * x.var((0, 2, 3), correction=1))
            state[f"{name}.num_batches_tracked"] += 1
        mean, variance = batch_mean, batch_variance
    return (x - mean[:, None, None]) / torch.sqrt(variance[:, None, None] + 1e-5)


def _bounded(state: State, name: str, training: bool) -> Tensor:
    weight, u, v = (state[f"{name}.weight_{part}"] for part in ("orig", "u", "v"))
    matrix = weight.flatten(1)
    if training:
        with torch.no_grad():
            v.copy_(matrix.t() @ u)
            v /= v.norm()
            u.copy_(matrix @ v)
            u /= u.norm()
    return weight / (u.clone() @ matrix @ v.clone())


def _weights(state: State, name: str) -> tuple[Tensor, Tensor]:
    return state[f"{name}.weight"], state[f"{name}.bias"]
