"""Every game: it learns, shows and scores.

That its training is the same on all ranks is found by `make matrix`, and of quick games by tests/scenes/games.py.
"""

from functools import partial

import pytest
import torch
from torch import nn

from gan import GanModule, noise
from gan.ema import half_life
from gan.games.biggan import BigGan
from gan.games.byol import Byol
from gan.games.cut import Cut
from gan.games.cyclegan import CycleGan
from gan.games.dmd2 import Dmd2, Dmd2Lora
from gan.games.from_noise import projections, wasserstein
from gan.games.hifigan import HifiGan
from gan.games.pix2pix import Pix2pix, half_then_down, linear_decay
from gan.games.r3gan import R3Gan
from gan.games.sean import Sean
from gan.games.spade import Spade, edges_of
from gan.games.stylegan import StyleGan
from gan.games.vqgan import VqGan
from gan.games.wgan_gp import WganGp
from gan.runs.sides import cut_networks
from nets.ada import Ada, Augmentation
from nets.biggan import BigDiscriminator, BigGenerator
from nets.blocks import onehot
from nets.byol import Online, ResnetEncoder, perceptron
from nets.denoiser import Denoiser, ExactDenoiser, Head
from nets.discriminator import MultiScaleDiscriminator, PatchGan
from nets.hifigan import HifiGenerator, Judges, PeriodJudges, ScaleJudges
from nets.mel import Mel
from nets.r3 import R3Discriminator, R3Generator
from nets.resnet import ResnetGenerator, UNet
from nets.sean.generator import SeanGenerator, StyleEncoder
from nets.stylegan import StyleDiscriminator, StyleGenerator
from nets.vgg import Lpips, Vgg16, Vgg19
from nets.vqgan import VqAutoencoder
from nets.wgan import WganCritic, WganGenerator
from strategies import PhaseStrategy
from tests.support import narrow_vgg
from tests.support.parity import BATCH, often, parts, trainer

LABELS, SIZE = 4, 16


def judge(edges: bool) -> MultiScaleDiscriminator:
    return MultiScaleDiscriminator(LABELS + edges + 3, 2, 2, gain=1.0)


def painter(style: int | None, edges: bool) -> SeanGenerator:
    return SeanGenerator(LABELS, style, 2, 3, upsamplings=2, gain=1.0, edges=edges)


RATES = dict(labels=LABELS, steps=12, generator_rate=1e-3, discriminator_rate=4e-3)


def sean(**settings) -> Sean:
    """As published, with the edges of instances."""
    torch.manual_seed(0)
    networks = StyleEncoder(4, 2, gain=1.0), painter(4, True), judge(True)
    return Sean(*networks, Vgg19(narrow_vgg.state()), **RATES, **settings)


def sean_once() -> Sean:
    """The same with one fake a step, and with pixels."""
    return sean(fake_once=True, pixels=10.0)


def spade() -> Spade:
    """Without edges."""
    torch.manual_seed(0)
    return Spade(painter(None, False), judge(False), Vgg19(narrow_vgg.state()), **RATES)


def pix2pix() -> Pix2pix:
    torch.manual_seed(0)
    net = UNet(LABELS, 3, 2, depth=3, dropouts=1)
    return Pix2pix(net, PatchGan(LABELS + 3, 2, 2), linear_decay(12), labels=LABELS, rate=1e-3)


def cyclegan() -> CycleGan:
    torch.manual_seed(0)
    make = partial(ResnetGenerator, width=2, blocks=1), partial(PatchGan, 3, 2, 2, norm="instance")
    return CycleGan(*make, linear_decay(12), rate=1e-3, pool=2 * BATCH)


def cut(spread: float = 2.0, **settings) -> Cut:
    """With patches of the same picture as negatives, some of each layer's, and identities.

    Vectors begin with biases of this spread: gradients of a vector of no length would be large, and have rounding to
    match. With 0.5, one device with weights that are 2e-16 apart has states that are 4e-9 apart after ten steps.
    """
    torch.manual_seed(0)
    networks = cut_networks(3, 2, 5, vectors=8, judge=2, layers=2)
    for parameter in networks[1].parameters():
        nn.init.normal_(parameter, std=spread)
    return Cut(*networks, linear_decay(12), rate=1e-3, patches=20, **settings)


def fastcut() -> Cut:
    """Some batches mirrored, and patches of all pictures as negatives."""
    return cut(0.5, identity=False, flips=True, all_negatives=True)


def r3gan() -> R3Gan:
    """With class labels, augmentation, and schedules that all move."""
    torch.manual_seed(0)
    networks = R3Generator(4, (4, 4, 2), classes=3, embedding=2), R3Discriminator((4, 4, 2), classes=3)
    ranges = dict(rate=(1e-3, 5e-4), ema=(0, 200), p=(0.3, 0.6), images=4 * BATCH)
    return R3Gan(*networks, batch_size=BATCH, augment=Augmentation("r3gan"), **ranges)


def biggan() -> BigGan:
    """With class labels, chunks of noise, attention, micro-batches, and averages of all buffers."""
    torch.manual_seed(0)
    rule = dict(size=(SIZE, SIZE), width=2, classes=3, attention=[16])
    networks = BigGenerator(latent=8, shared=4, hierarchical=True, **rule), BigDiscriminator(**rule)
    for net in networks:
        for name, weight in net.named_parameters():
            if name.endswith("gamma"):
                nn.init.ones_(weight)
    rules = dict(judge_steps=2, ortho=(1e-2, 1e-2), ema=0.9, ema_start=2)
    return BigGan(*networks, rates=(1e-3, 1e-3), **rules)


def wgan_gp() -> WganGp:
    torch.manual_seed(0)
    return WganGp(WganGenerator(4, (4, 4, 2)), WganCritic((4, 4, 2)), rate=1e-3, critic_steps=3, ema=0.9)


def stylegan() -> StyleGan:
    """With both lazy penalties more than once in ten steps; wide enough that no style turns all channels off.

    (Demodulation would divide by that, and gradients of 1e5 have rounding to match.)
    """
    return StyleGan(*style_networks(), r1_every=4, path_every=3, ema=0.9)


def style_networks(**settings) -> tuple[StyleGenerator, StyleDiscriminator]:
    """Noise counts, as it does not at first."""
    torch.manual_seed(0)
    networks = (
        StyleGenerator(SIZE, latent=8, style=8, mapping=2, base=8 * SIZE, most=8, **settings),
        StyleDiscriminator(SIZE, base=2 * SIZE, most=4, **settings),
    )
    for name, weight in networks[0].named_parameters():
        if name.endswith("noise_strength"):
            nn.init.constant_(weight, 0.1)
    return networks


def stylegan_ada() -> StyleGan:
    """With classes, the published average, and augmentation whose probability moves quickly."""
    rules = dict(r1_every=4, path_every=3, ema=half_life(64, BATCH, 0.5))
    return StyleGan(*style_networks(classes=3), ada=Ada(-1.5, 64), ada_every=2, **rules)


def dmd2() -> Dmd2:
    torch.manual_seed(0)
    teacher = ExactDenoiser(torch.rand(8, 3, SIZE, SIZE) * 2 - 1)
    student, fake_score = R3Generator(4, (4, 4, 2)), Denoiser((4, 4), embedding=4)
    return Dmd2(student, fake_score, Head(4), teacher, student_every=3, adversarial=0.1, head_weight=0.1, ema=0.9)


def hifigan() -> HifiGan:
    """With weight norm, and with spectral norm in the first judge of scales."""
    torch.manual_seed(0)
    judges = Judges(ScaleJudges(2, (2, 4), (4,), groups=2), PeriodJudges((2, 3), (2, 4)))
    generator = HifiGenerator(4, 8, (4, 2), (8, 4), (3, 5), ((1, 3),) * 2)
    return HifiGan(generator, judges, Mel(1000, 4, 16, 8), rate=1e-3)


def dmd2_lora() -> Dmd2Lora:
    """The base has its weights; test_dmd2_lora.py has one that learns first."""
    torch.manual_seed(0)
    base = Denoiser((4, 4), embedding=4)
    nn.init.normal_(base.paint.weight, std=0.1)
    rules = dict(student_every=3, adversarial=0.1, head_weight=0.1, ema=0.9)
    return Dmd2Lora(base, Head(4), SIZE, rank=2, **rules)


def vqgan() -> VqGan:
    """The discriminator joins after three steps. There are more codes than samples to begin with."""
    torch.manual_seed(0)
    net = VqAutoencoder(3, 8, (1, 1, 1), 1, (2,), features=4, code=4, codes=40, groups=2, learning="ema")
    return VqGan(net, PatchGan(3, 2, 2), rate=1e-3, start=3)


def vqgan_learned() -> VqGan:
    """Codes that learn by their gradient, LPIPS, and a discriminator with ActNorm."""
    torch.manual_seed(0)
    net = VqAutoencoder(3, 8, (1, 1), 1, (), features=4, code=4, codes=8, groups=2)
    lins = {f"lin{number}.model.1.weight": torch.full((1, 1, 1, 1), 0.1) for number in range(5)}
    lpips = Lpips(Vgg16(narrow_vgg.state16(), True), lins)
    return VqGan(net, PatchGan(3, 2, 2, norm="act"), lpips, rate=1e-3, start=3)


def byol() -> Byol:
    torch.manual_seed(0)
    online = Online(ResnetEncoder((4, 4)), perceptron(4, 8, 4))
    return Byol(online, perceptron(4, 8, 4), labels=LABELS, steps=12, decay=0.9)


MADE = (
    *(sean, sean_once, spade, pix2pix, cyclegan, cut, fastcut, r3gan, biggan, wgan_gp),
    *(stylegan, stylegan_ada),
    *(dmd2, dmd2_lora, hifigan, vqgan, vqgan_learned, byol),
)
GAMES = {game.__name__: game for game in MADE}
FROM_NOISE = ("r3gan", "biggan", "wgan_gp", "stylegan", "dmd2", "dmd2_lora")


def pictures(step: int, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """A batch with everything that any game asks for; label 3 is in few pictures."""
    generator = torch.Generator().manual_seed(2000 + step)

    def picture() -> torch.Tensor:
        return torch.rand(BATCH, 3, SIZE, SIZE, generator=generator, dtype=torch.float64).to(dtype) * 2 - 1

    def label() -> torch.Tensor:
        coarse = torch.randint(0, 3, (BATCH, 4, 4), generator=generator)
        coarse[step % BATCH, 0] = 3
        return coarse.repeat_interleave(4, 1).repeat_interleave(4, 2)

    names = ("image", "style_image", "truth", "region_truth", "a", "b", "truth_a", "truth_b")
    batch = {name: picture() for name in names} | {"label": label(), "style_label": label()}
    batch["edges"] = torch.randint(0, 2, (BATCH, SIZE, SIZE), generator=generator)
    batch["region"] = torch.randint(0, 3, (BATCH,), generator=generator)
    batch["class"] = batch["region"]
    wave = torch.rand(BATCH, 256, generator=generator, dtype=torch.float64) * 2 - 1
    return batch | {"wave": wave.to(dtype)}


# ---- what ranks move, and score ----


def _score(game, world: int) -> float:
    """The validation score of an untrained game on two batches."""
    made = trainer(PhaseStrategy("ddp"), world, 1)
    (result,) = made.validate(game(), parts(2, world, pictures), verbose=False)
    return result.get("val/distance") or result["val/neighbour_error"]


@pytest.mark.parametrize("name", often([*FROM_NOISE, "byol"], ["stylegan", "byol"]))
def test_the_score_is_the_same_on_two_ranks(name, ranks):
    one = _score(GAMES[name], 1)
    assert ranks(2).run(_score, GAMES[name], 2) == pytest.approx([one, one], rel=1e-6)


# ---- a grid ----


@pytest.mark.parametrize("name", [name for name in GAMES if name != "hifigan"])
def test_show_gives_titled_pictures(name):
    columns = GAMES[name]().eval().show(pictures(0, torch.float32))
    assert len(columns) >= 3
    for column in columns.values():
        assert not column.requires_grad
        maps = column.dtype == torch.int64
        assert maps or (column.isfinite().all() and column.std() > 0)
        assert column.shape == ((BATCH, SIZE, SIZE) if maps else (BATCH, 3, SIZE, SIZE))


# ---- what is particular to a game ----


def painted(game: GanModule, monkeypatch, colour: float) -> None:
    monkeypatch.setattr(
        game.generator, "forward", lambda mask, *rest: torch.full((len(mask), 3, *mask.shape[2:]), colour)
    )


def logged(game: GanModule, batch: dict[str, torch.Tensor], monkeypatch) -> dict[str, float]:
    """What a game's validation says of a batch."""
    found = {}
    monkeypatch.setattr(game, "log", lambda name, value, **_: found.update({name: value.item()}))
    game.validation_step(batch)
    return found


def halves(left: int, right: int) -> torch.Tensor:
    label = torch.full((BATCH, SIZE, SIZE), left)
    label[:, :, SIZE // 2 :] = right
    return label


def test_sean_scores_only_regions_that_the_style_picture_has(monkeypatch):
    game = sean_once()
    painted(game, monkeypatch, 0.0)
    truth = torch.full((BATCH, 3, SIZE, SIZE), 0.5)
    truth[:, :, :, SIZE // 2 :] = 1.0  # label 1, of which the styles say nothing
    batch = {"image": truth, "style_image": truth, "truth": truth, "label": halves(0, 1), "style_label": halves(0, 0)}
    assert logged(game, batch, monkeypatch) == {"val/transfer_error": pytest.approx(0.25)}


def test_sean_changes_the_style_of_one_region(monkeypatch):
    """A generator by hand: every pixel has its region's first code, and a tenth of label 1's spills over label 0."""
    game = sean_once()
    style = torch.zeros(BATCH, LABELS, 4)
    style[:, :, 0] = torch.tensor([0.25, 0.75, 0.5, 0.5])
    monkeypatch.setattr(game, "styles", lambda image, mask: style * image.mean((1, 2, 3)).view(-1, 1, 1))

    def paint(mask, codes):
        own = (mask[:, :LABELS] * codes[:, :, :1, None]).sum(1)
        spilt = mask[:, 0] * codes[:, 1, 0].view(-1, 1, 1) / 10
        return (own + spilt + noise.randn((len(mask), 1, 1), like=own)).unsqueeze(1).expand(-1, 3, -1, -1)

    monkeypatch.setattr(game.generator, "forward", paint)
    ones = torch.ones(BATCH, 3, SIZE, SIZE)
    batch = {"image": ones, "style_image": -ones, "label": halves(0, 1), "style_label": halves(1, 0)}
    batch |= {"region": torch.ones(BATCH, dtype=torch.int64)}
    before, after = game.restyle(batch)
    # The grain is there, the same before and after, so what was measured is the style's doing.
    assert before[:, 0, 0, 0].std() > 0.1
    wanted = torch.where(halves(0, 1) == 1, -1.5, -0.15).unsqueeze(1).expand(-1, 3, -1, -1)
    torch.testing.assert_close(after - before, wanted)


def test_sean_takes_styles_from_the_other_picture():
    game = sean().eval()
    batch = pictures(0, torch.float32)
    torch.manual_seed(0)
    one = game.transfer(batch)
    torch.manual_seed(0)
    same = game.transfer(batch | {"image": torch.zeros_like(batch["image"])})
    torch.manual_seed(0)
    other = game.transfer(batch | {"style_image": torch.zeros_like(batch["image"])})
    assert torch.equal(one, same)
    assert not torch.allclose(one, other, atol=1e-3)


def test_sean_without_another_picture_repaints_its_own():
    game = sean().eval()
    batch = pictures(0, torch.float32)
    alone = {name: batch[name] for name in ("image", "label", "edges")}
    same = alone | {"style_image": batch["image"], "style_label": batch["label"]}
    torch.testing.assert_close(game.transfer(alone), game.transfer(same))
    assert list(game.show(alone)) == ["shape", "style", "output", "truth"]


def test_the_losses_are_the_published_ones():
    """Written out: means over two scales, where the real side follows the fake in one forward; weighted features."""
    game, batch = sean().eval(), pictures(0, torch.float32)
    fake = torch.rand(BATCH, 3, SIZE, SIZE)
    game.repaint = lambda *_: fake
    planes = torch.cat([onehot(batch["label"], LABELS, fake), batch["edges"].float()[:, None]], 1)
    on_fake, on_real = (game.discriminator(torch.cat([planes, image], 1)) for image in (fake, batch["image"]))
    hinge = matching = judged = 0.0
    for ours, theirs in zip(on_fake, on_real, strict=True):
        hinge -= ours[-1].mean().item() / 2
        judged += ((1 - theirs[-1]).clamp_min(0).mean() + (1 + ours[-1]).clamp_min(0).mean()).item() / 2
        matching += 10 / 2 * sum((a - b).abs().mean().item() for a, b in zip(ours[:-1], theirs[:-1], strict=True))
    pairs = zip((1 / 32, 1 / 16, 1 / 8, 1 / 4, 1), game.vgg(fake), game.vgg(batch["image"]), strict=True)
    perceptual = 10 * sum(weight * (one - other).abs().mean().item() for weight, one, other in pairs)
    losses = {name: loss.item() for name, loss in game.fool(batch).items()}
    assert losses == pytest.approx({"hinge": hinge, "matching": matching, "perceptual": perceptual}, rel=1e-5)
    assert game.judge(batch)["hinge"].item() == pytest.approx(judged, rel=1e-5)


@pytest.mark.parametrize(("game", "forwards"), [(sean, 2), (sean_once, 1)])
def test_the_discriminator_gets_a_fresh_fake_or_the_generators_own(game, forwards, monkeypatch):
    made, painted, judged = game(), [], []
    forward, compare = made.generator.forward, made.compare

    def paint(mask, codes):
        painted.append((torch.is_grad_enabled(), made.generator.conv_img.weight.clone(), forward(mask, codes)))
        return painted[-1][2]

    monkeypatch.setattr(made.generator, "forward", paint)
    monkeypatch.setattr(made, "compare", lambda mask, fake, real: judged.append(fake) or compare(mask, fake, real))
    trainer(PhaseStrategy("ddp"), 1, 2).fit(made, parts(2, batches=pictures))
    assert len(painted) == 2 * forwards
    assert len(judged) == 4
    assert not judged[1].requires_grad
    if forwards == 2:
        assert [learning for learning, *_ in painted] == [True, False] * 2
        assert not torch.equal(painted[0][1], painted[1][1])  # made by the updated generator
        assert not torch.equal(judged[0], judged[1])
    else:
        assert torch.equal(judged[0], judged[1])


def test_the_rates_hold_for_fifty_epochs_and_fall_in_fifty():
    """At the start of each epoch they are the published ones, which fall in steps of an epoch."""
    batches = 7
    for epoch in range(101):
        published = 1.0 if epoch < 50 else 1.0 - (epoch - 50) / 50
        assert half_then_down(100 * batches, epoch * batches) == pytest.approx(published)
    assert half_then_down(8, 9) == 0.0


def test_where_no_edges_are_given_the_labels_edges_serve():
    label = torch.tensor([[[0, 0, 1], [0, 0, 1], [2, 0, 1]]]).expand(BATCH, -1, -1)
    wanted = torch.tensor([[0, 1, 1], [1, 1, 1], [1, 1, 1]]).bool()
    assert torch.equal(edges_of(label)[0], wanted)
    assert torch.equal(sean().mask(label)[0, LABELS].bool(), wanted)


@pytest.mark.parametrize("game", [pix2pix, hifigan])
def test_a_fake_is_made_once_a_step_and_used_twice(game, monkeypatch):
    made, seen = game(), []
    forward = made.generator.forward
    monkeypatch.setattr(made.generator, "forward", lambda given: seen.append(given) or forward(given))
    trainer(PhaseStrategy("ddp"), 1, 3).fit(made, parts(3, batches=pictures))
    assert len(seen) == 3


def test_cyclegan_shows_past_fakes_to_the_discriminators():
    game = cyclegan()
    trainer(PhaseStrategy("ddp"), 1, 4).fit(game, parts(4, batches=pictures))
    assert {len(slots) for slots in game.past_b.slots.values()} == {2}
    assert set(game.past_a.slots) == set(range(BATCH))


def test_the_distance_sees_a_shift_and_not_the_order():
    generator = torch.Generator().manual_seed(0)
    one = projections(torch.rand(64, 3, 16, 16, generator=generator))
    assert wasserstein(one, one.flip(0)) == 0
    other = projections(torch.rand(64, 3, 16, 16, generator=generator))
    assert wasserstein(one, other + 1) > 5 * wasserstein(one, other) > 0


def test_hifigan_judges_as_in_the_paper_and_the_judges_learn_first():
    """Least squares without a half, summed over the judges. The generator's turn: tests/unit/gan/games/."""
    game, batch = hifigan().eval(), pictures(0, torch.float32)
    assert [phase.name for phase in game.configure_phases()] == ["discriminators", "generator"]
    ours, theirs = (game.discriminators(each) for each in (game.voice(batch), batch["wave"]))
    judged = game.judge(batch)
    for name in ("mpd", "msd"):
        pairs = zip(theirs[name], ours[name], strict=True)
        wanted = sum((real[-1] - 1).square().mean() + made[-1].square().mean() for real, made in pairs)
        torch.testing.assert_close(judged[name], wanted)
