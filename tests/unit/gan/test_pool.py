"""The image pool: half of what it shows is old, and it follows the sample."""

import torch

from gan import noise
from gan.noise import Place
from gan.pool import ImagePool


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
    share = (steps[5:] < now[5:]).double().mean()
    assert 0.45 < share < 0.55
    assert (shown.long() % 100 == torch.arange(4)).all()  # each place gets back its own


def test_two_ranks_show_what_one_shows():
    whole = play(ImagePool(8), 50, 0, 4)
    halves = torch.cat([play(ImagePool(8), 50, first, 2) for first in (0, 2)], dim=1)
    assert torch.equal(halves, whole)
    assert torch.equal(play(ImagePool(8), 50, 0, 4, parts=2), whole)


def test_a_pool_resumes_exactly_and_travels_to_another_number_of_ranks():
    whole = play(ImagePool(8), 60, 0, 4)
    one = ImagePool(8)
    play(one, 30, 0, 4)
    state = one.state_dict()
    resumed = []
    for first in (0, 2):
        pool = ImagePool(8)
        pool.load_state_dict(state)
        resumed.append(play(pool, 60, first, 2, start=30))
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


def test_its_state_is_plain_data(tmp_path):
    pool = ImagePool(4)
    play(pool, 3, 0, 4)
    torch.save(pool.state_dict(), tmp_path / "pool.pt")
    other = ImagePool(4)
    other.load_state_dict(torch.load(tmp_path / "pool.pt", weights_only=True))
    assert other.slots.keys() == pool.slots.keys()
