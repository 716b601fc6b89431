"""A game, and the words of its author: averages, pools, sounds, and what the CPU reads late."""

import copy
import io
import wave
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from gan import GanModule, Player, later, noise
from gan.ema import Ema, half_life
from gan.files.errors import UserError
from gan.noise import Place
from gan.pool import ImagePool
from gan.sound import Sound
from strategies import PhaseStrategy
from tests.support.hard_games import Teacher
from tests.support.parity import distance, parts, train, trainer


@pytest.mark.parametrize(
    ("words_of_it", "error", "words"),
    [
        ({}, UserError, r"Mine has no configure_players\(\); yield a Player"),
        ({"configure_players": lambda self: []}, UserError, r"Mine has no configure_phases\(\)"),
        ({"configure_players": lambda self: None, "configure_phases": lambda self: []}, UserError, "has no player; yi"),
        ({"configure_players": lambda self: [self.generatr]}, AttributeError, "generatr"),  # an author's own mistake
    ],
)
def test_a_game_without_players_or_phases_says_what_to_write(words_of_it, error, words):
    with pytest.raises(error, match=words):
        type("Mine", (GanModule,), words_of_it)().assemble()


def test_a_player_that_follows_another_one_has_its_blocks():
    """A pipeline cuts both in the same places."""
    game = Teacher()
    generator, *more = game.configure_players()
    slow = Player("slow", copy.deepcopy(generator.module), follows="generator", ema=0.9)
    game.configure_players = lambda: [slow, replace(generator, blocks=["0"]), *more]
    game.assemble()
    assert game.players["slow"].blocks == ["0"]


@pytest.mark.parametrize("parts_", [1, 4])
def test_a_shared_fake_is_made_once_a_step_and_micro_batch_and_only_learners_require_gradients(parts_):
    made, flags = [], []

    class Counting(Teacher):
        micro_batches = parts_

        def fake(self, real):
            made.append(1)
            return super().fake(real)

        def judge(self, batch):
            loss = super().judge(batch)
            flags.append({name: next(p.module.parameters()).requires_grad for name, p in self.players.items()})
            return loss

    train(Counting, policy="single", steps=3)
    assert len(made) == 3 * parts_
    assert flags == [{"generator": False, "discriminator": True, "teacher": False}] * 3 * parts_


def test_a_frozen_player_changes_in_nothing_not_even_its_statistics():
    game = Teacher()
    before = copy.deepcopy(game.teacher).double().state_dict()
    trainer(PhaseStrategy("single", check=False), 1, 3).fit(game, parts(3))
    assert distance(game.teacher.state_dict(), before) == 0


# ---- ema ----


def test_swapping_and_back_is_exact_also_after_an_error():
    net = nn.Linear(3, 2)
    ema = Ema(dict(net.named_parameters()), lambda updates: 0.9)
    net.weight.data += 1
    weight, average = net.weight.detach().clone(), ema.average[0].clone()
    with pytest.raises(KeyError), ema.swapped():
        assert torch.equal(net.weight, average) and not torch.equal(average, weight)
        raise KeyError
    assert torch.equal(net.weight, weight) and torch.equal(ema.average[0], average)


def test_buffers_are_averaged_if_they_are_asked_for_and_whole_numbers_are_copied():
    net = nn.BatchNorm1d(2)
    ema = Ema({}, lambda updates: 0.9, network=net)  # a rank that owns no weight counts as the others do
    net.running_mean += 1
    net.num_batches_tracked += 7
    ema.update()
    assert ema.updates == 1 and ema.of_buffers["num_batches_tracked"] == 7
    assert torch.allclose(ema.of_buffers["running_mean"], torch.tensor(0.1))


def test_a_half_life_in_images_with_a_beginning():
    decay = half_life(1000, batch_size=50)
    assert decay(0) == decay(99) == pytest.approx(0.5 ** (1 / 20))
    rising = half_life(1000, batch_size=50, ramp_up=0.05)
    assert rising(0) == 0  # the average begins as the weights
    assert rising(200) == pytest.approx(0.5 ** (50 / 500))  # a twentieth of 10,000 images
    assert rising(400) == rising(4000) == pytest.approx(decay(0))


# ---- pool ----


def images(step, first, rows):
    """Images that tell their step and place."""
    return torch.tensor([[step * 100.0 + place] for place in range(first, first + rows)])


def play(pool, steps, first, rows, total=4, start=0, parts=1):
    """What the pool shows for these rows, which come in so many micro-batches."""
    shown = []
    for step in range(start, steps):
        found = images(step, first, rows)
        for part in range(parts):
            with noise.at(Place((7, step, "d"), first + part, rows // parts, total, stride=parts)):
                found[part::parts] = pool.query(found[part::parts])
        shown.append(found)
    return torch.stack(shown)


def test_it_fills_then_shows_an_old_image_half_of_the_time():
    shown = play(ImagePool(20), 400, 0, 4)[..., 0]
    steps = (shown // 100).long()
    now = torch.arange(400)[:, None]
    assert (steps[:5] == now[:5]).all()  # 20 images for 4 places: five each
    assert (steps[5:15] < now[5:15]).any()
    share = (steps[5:] < now[5:]).double().mean()
    assert 0.45 < share < 0.55
    assert (shown.long() % 100 == torch.arange(4)).all()  # each place gets back its own


def test_a_pool_resumes_exactly_and_travels_to_ranks_and_micro_batches(tmp_path):
    whole = play(ImagePool(8), 60, 0, 4)
    one = ImagePool(8)
    play(one, 30, 0, 4)
    torch.save(one.state_dict(), tmp_path / "pool.pt")
    resumed = []
    for first in (0, 2):
        pool = ImagePool(8)
        pool.load_state_dict(torch.load(tmp_path / "pool.pt", weights_only=True))  # plain data
        resumed.append(play(pool, 60, first, 2, start=30, parts=2))
        assert set(pool.own()) == {first, first + 1}  # and answers for its own places only
    assert torch.equal(torch.cat(resumed, dim=1), whole[30:])
    empty = play(ImagePool(8), 60, 0, 4, start=30)
    assert not torch.equal(empty, whole[30:])


def test_images_are_kept_without_their_graph_and_outside_a_phase_pass_unchanged():
    pool = ImagePool(4)
    image = torch.ones(2, 1, requires_grad=True)
    assert torch.equal(pool.query(image * 2), image.detach() * 2)
    assert pool.slots == {}
    with noise.at(Place((0,), 0, 2, 2)):
        assert not pool.query(image * 2).requires_grad
        none = ImagePool(0)
        assert torch.equal(none.query(image), image) and torch.equal(none.query(-image), -image) and not none.slots


# ---- sound ----


def test_a_file_has_the_samples_and_the_rate():
    sound = Sound(torch.tensor([0.0, 1.0, -1.0, 0.5, 7.0], dtype=torch.float64), 16000)
    with wave.open(io.BytesIO(sound.wav())) as file:
        assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (1, 2, 16000)
        assert np.frombuffer(file.readframes(9), "<i2").tolist() == [0, 32767, -32767, 16384, 32767]


# ---- later ----


def test_together_it_is_read_once_in_the_order_of_the_questions(monkeypatch):
    found, reads, tolist = [], [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda values: reads.append(values) or tolist(values))
    with later.together():
        for values in (torch.tensor([0.1, float("nan")]), torch.tensor([7, 2**24]), torch.tensor([True])):
            later.read(values, found.append)
        later.read(torch.tensor([1e-300], dtype=torch.float64), found.append)
        assert not found
        later.now()
        assert len(found) == 4
    assert len(reads) == 1
    assert found[1:] == [[7, 2**24], [1], [1e-300]]
    assert found[0][0] == torch.tensor(0.1).item() and found[0][1] != found[0][1]


def test_the_end_reads_what_is_left_but_not_after_an_error_and_outside_it_is_read_at_once():
    found = []
    with later.together():
        later.read(torch.tensor([0.5], dtype=torch.bfloat16), found.extend)
        later.read(torch.tensor([257]), found.extend)  # which a half would round
    assert found == [0.5, 257]
    with pytest.raises(ValueError, match="mine"), later.together():
        later.read(torch.ones(1), found.extend)
        raise ValueError("mine")
    later.read(torch.tensor([1.0, 2.0]), found.extend)
    assert found == [0.5, 257, 1, 2]
