"""StyleGAN2-ADA computes what the published code computes: see FAMILIES-stylegan.md beside the golden figures."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from gan.ema import half_life
from gan.games.stylegan import StyleGan
from nets.ada import Ada
from nets.stylegan import StyleDiscriminator, StyleGenerator
from strategies import PhaseStrategy
from tests.support import families
from tests.support.families import Recipe, difference, size
from tests.support.fused import as_on_a_gpu
from tests.support.parity import Whole, trainer

CONFIGS = ("A", "B")


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    return families.load("stylegan2.pt")


def value(recipe: Recipe, key: str, shape: Sequence[int]) -> Tensor:
    if key.endswith("resample_filter"):
        taps = torch.tensor([1.0, 3.0, 3.0, 1.0], dtype=torch.float64)
        return torch.outer(taps, taps) / 64
    x = recipe.normal(key, *shape)
    layer, last = key.split(".")[-2:]
    if layer.startswith("fc") and "mapping" in key:
        return {"weight": 100, "bias": 10}[last] * x
    if key.endswith("affine.bias"):
        return 1 + 0.1 * x
    return 0.1 * x if last in ("bias", "noise_strength", "w_avg") else x


class Wanted:
    """A configuration: its figures, networks, inputs and draws."""

    def __init__(self, figures: dict[str, Any]) -> None:
        self.figures, self.s = figures, figures["settings"]
        self.recipe = Recipe(self.s["seed"] + 2)
        self.batch, self.side, self.classes = (self.s[name] for name in ("batch", "resolution", "classes"))
        self.z, self.z2 = self.normal("z"), self.normal("z2")
        self.c, self.real_c = (self.recipe.labels(name, self.batch, self.classes) for name in ("c", "real_c"))
        self.real = self.pictures("real")

    def normal(self, name: str, count: int | None = None) -> Tensor:
        return self.recipe.normal(name, count or self.batch, self.s["z_dim"])

    def pictures(self, name: str) -> Tensor:
        return self.recipe.pictures(name, self.batch, 3, self.side, self.side)

    def game(self, ada: Ada | None = None) -> StyleGan:
        s, wide = self.s, dict(classes=self.classes, base=self.s["channel_base"], most=self.s["channel_max"])
        generator = StyleGenerator(self.side, latent=s["z_dim"], style=s["w_dim"], mapping=s["map_layers"], **wide)
        skip = s["architecture"] == "resnet"
        nets = generator, StyleDiscriminator(self.side, skip=skip, group=s["mbstd_group"], **wide)
        for number, (net, keys) in enumerate(zip(nets, self.figures["keys"].values(), strict=True)):
            recipe = Recipe(s["seed"] + number)
            net.double().load_state_dict({key: value(recipe, key, shape) for key, shape in keys.items()})
        rules = dict(rate=s["lr"], gamma=s["r1_gamma"], r1_every=s["d_interval"], mixing=s["mixing"])
        rules |= dict(path=s["pl_weight"], path_every=s["g_interval"], ada_every=(s["ada"] or {}).get("interval", 4))
        average = half_life(1000 * s["ema_kimg"], s["batch"], s["ema_rampup"])
        return StyleGan(*nets, ema=average, ada=ada, **rules).double()

    def grains(self, prefix: str, count: int | None = None) -> list[Tensor]:
        """The noise of all layers, in order."""
        layers = [(2**power, conv) for power in range(2, self.side.bit_length()) for conv in (0, 1)][1:]
        return [
            self.recipe.normal(f"{prefix}noise.b{side}.conv{conv}", count or self.batch, 1, side, side)
            for side, conv in layers
        ]

    def draws(self, prefix: str, count: int | None = None) -> list[Tensor]:
        """What the generator draws in a phase: which styles are mixed, and noise."""
        mixed = []
        if self.s["mixing"]:
            mixed += [self.recipe.integers(f"{prefix}mix.cutoff", self.figures["num_ws"], low=1)]
            mixed += [self.recipe.uniform(f"{prefix}mix.coin"), self.normal(f"{prefix}mix.z", count)]
        return mixed + self.grains(prefix, count)

    def of_phase(self, phase: str, ada: Ada | None = None, z: Tensor | None = None) -> list[Tensor]:
        """All that a phase draws, in order: latents as well."""
        prefix, half = f"{phase}.", self.batch // 2
        z = self.z if z is None else z
        name = phase.split(".")[-1]
        if name == "Greg":
            slopes = self.recipe.normal(f"{prefix}pl_noise", half, 3, self.side, self.side)
            return [z[:half], *self.draws(prefix, half), slopes]
        judged = {"Gmain": ("fake.",), "Dmain": ("fake.", "real."), "Dreg": ("real.",)}[name] if ada else ()
        augmented = [draw for each in judged for draw in self.recipe.augmentation(f"{prefix}{each}", self.batch)]
        return ([] if name == "Dreg" else [z, *self.draws(prefix)]) + augmented


@pytest.fixture(scope="module", params=CONFIGS)
def wanted(request, golden) -> Wanted:
    return Wanted(golden[request.param])


def check(found: Any, figure: Any, limit: float = 1e-9) -> None:
    assert difference(found, figure) < limit


def check_pictures(found: Tensor, figure: dict[str, Any], limit: float = 1e-9) -> None:
    check([size(sample) for sample in found.detach()], figure["each"], limit)
    if "first" in figure:
        check(found[: len(figure["first"])].detach(), figure["first"], limit)


@torch.no_grad()
def test_pictures_equal_the_published_ones(wanted):
    net, f, s = wanted.game().generator.eval(), wanted.figures, wanted.s
    rows, cutoff = net.styles(wanted.z, wanted.c), s["psi_cutoff"]
    assert rows.shape[1] == f["num_ws"]
    check(rows[:, 0], f["w"])
    check_pictures(net.drawn(rows), f["image_const"])
    check_pictures(net.drawn(rows, "none"), f["image_none"])
    with families.drawing(wanted.grains("")):
        check_pictures(net.drawn(rows, "random"), f["image_noise"])
    check_pictures(net(wanted.z, wanted.c, psi=s["psi"]), f["image_truncated"])
    near = net.styles(wanted.z, wanted.c, psi=s["psi"], cutoff=cutoff)
    check(near[:2, 0], f["w_truncated_cutoff"]["first layer"])
    check(near[:2, -1], f["w_truncated_cutoff"]["last layer"])
    check_pictures(net.drawn(near), f["image_truncated_cutoff"])
    others = net.styles(wanted.z2, wanted.c)
    mixed = torch.cat([rows[:, : s["mix_cutoff"]], others[:, s["mix_cutoff"] :]], 1)
    check_pictures(net.drawn(mixed), f["image_mixed"])
    net.train().styles(wanted.z, wanted.c)
    check(net.mapping.w_avg, f["w_avg_after"])


PHASES = {"Gmain": "fool", "Greg": "even", "Dmain": "judge", "Dreg": "flatten"}


def labelled(game: StyleGan, wanted: Wanted, c: Tensor, real_c: Tensor) -> None:
    game.labels = lambda batch: real_c if wanted.classes else None
    game.labels_of_fakes = lambda batch: c if wanted.classes else None


def played(phase: str, game: StyleGan, image: Tensor) -> tuple[float, dict[str, list[float]]]:
    """Its loss, and the learner's gradients."""
    loss = sum(getattr(game, PHASES[phase])({"image": image}).values())
    learner = game.generator if phase[0] == "G" else game.discriminator
    loss.backward(inputs=[*learner.parameters()])
    return loss.item(), families.gradients(learner)


PLAYED = [pytest.param(key, nullcontext, id=key) for key in (*PHASES, "Gmain_augmented", "Dreg_augmented")]
PLAYED += [  # Triton's interpreter takes its time, so `make test` plays a smaller game as on a GPU: see below
    pytest.param(key, partial(as_on_a_gpu, block=2**17), marks=pytest.mark.slow, id=f"{key} as on a GPU")
    for key in ("Greg", "Dmain", "Dreg_augmented")
]


@pytest.mark.parametrize(("key", "computed"), PLAYED)
def test_a_phase_equals_the_published_one(wanted, key, computed):
    phase, _, augmented = key.partition("_")
    if phase == "Greg" and not wanted.s["pl_weight"]:
        assert "path" not in {phase.name for phase in wanted.game().configure_phases()}
        return
    figure = wanted.figures[key]
    ada = Ada().double() if augmented else None
    if ada is not None:
        ada.p.fill_(0.8)
    game = wanted.game(ada)
    game.path_every = game.r1_every = 1  # gain 1
    labelled(game, wanted, wanted.c, wanted.real_c)
    with computed(), families.drawing(wanted.of_phase(phase, ada)):
        loss, slopes = played(phase, game, wanted.real)
    check(slopes, figure["grads"])
    check(game.generator.mapping.w_avg, figure["w_avg_after"])
    per_sample = figure["reports"][f"Loss/{phase[0]}/{'reg' if phase[1:] == 'reg' else 'loss'}"]
    check(loss, sum(per_sample) / len(per_sample))
    if phase == "Greg":
        check(game._means[0].item(), figure["pl_mean"])


def test_a_phase_is_as_on_a_cpu_by_what_a_gpu_computes():
    found = []
    for computed in (nullcontext, partial(as_on_a_gpu, block=2**12)):
        torch.manual_seed(0)
        wide = dict(base=64, most=4, clamp=0.5)
        generator = StyleGenerator(8, latent=3, style=3, mapping=1, **wide)
        ada = Ada()
        ada.p.fill_(0.5)
        game = StyleGan(generator, StyleDiscriminator(8, group=2, **wide), ada=ada).double()
        for noise in (name for name, _ in generator.named_parameters() if name.endswith("noise_strength")):
            torch.nn.init.ones_(generator.get_parameter(noise))
        with computed():
            found.append(played("Greg", game, torch.rand(4, 3, 8, 8, dtype=torch.float64)))
    for ours, theirs in zip(*found, strict=True):
        check(ours, theirs)
    assert families.DEVICE != "cpu" or found[0] != found[1]  # the control: sums are in another order


def phase_by_phase(game: StyleGan, wanted: Wanted) -> None:
    """Each phase of a training gets its own draws and labels."""

    def own(name: str, play: Callable[..., Any]) -> Callable[..., Any]:
        def as_published(batch: dict[str, Tensor]) -> Any:
            phase = f"step{game.step}.{name}"
            z, names = wanted.normal(f"{phase}.z"), (f"{phase}.c", f"step{game.step}.real_c")
            labelled(game, wanted, *(wanted.recipe.labels(each, wanted.batch, wanted.classes) for each in names))
            with families.drawing(wanted.of_phase(phase, game.ada, z)):
                return play(batch)

        return as_published

    for name, method in PHASES.items():
        setattr(game, method, own(name, getattr(game, method)))


@pytest.mark.parametrize(
    ("config", "key"),
    [("A", "training_ada"), *(pytest.param(config, "training", marks=pytest.mark.slow) for config in CONFIGS)],
)
def test_a_training_equals_the_published_one(golden, config, key):
    wanted = Wanted(golden[config])
    figure, s = wanted.figures[key], wanted.s
    ada = None
    if key == "training_ada":
        ada = Ada(s["ada"]["target"], int(1000 * s["ada"]["kimg"])).double()
        ada.p.fill_(s["ada"]["p"])
    game = wanted.game(ada)
    begun = {name: weight.clone() for name, weight in game.state_dict().items()}
    found: list[dict[str, Any]] = []
    step = game.training_step

    def kept(batch: Any) -> None:
        step(batch)
        state = {"pl_mean": game.path_mean.item(), "w_avg": size(game.generator.mapping.w_avg)}
        found.append(state | ({} if game.ada is None else {"p": game.ada.p.item()}))

    game.training_step = kept
    steps = len(figure["steps"])
    batches = Whole(steps, batches=lambda step: {"image": wanted.pictures(f"step{step}.real")})
    phase_by_phase(game, wanted)
    trainer(PhaseStrategy("ddp"), 1, steps).fit(game, batches)
    for ours, theirs in zip(found, figure["steps"], strict=True):
        check(ours, {name: theirs[name] for name in ours}, 1e-7)

    def check_moved(player: str, name: str) -> None:
        after = game.get_submodule(player).state_dict()
        moved = {key: size(after[key] - begun[f"{player}.{key}"]) for key in figure["moved"][name]}
        check(moved, figure["moved"][name], 1e-7)

    check_moved("generator", "G")
    check_moved("discriminator", "D")
    with game.averaged(), torch.no_grad():
        check_moved("generator", "G_ema")
        check_pictures(game.generator.eval()(wanted.z, wanted.c), figure["image_ema"], 1e-7)
