"""What a card says. That its lines load the networks is tested in tests/system/test_export.py."""

from gan.app.exporting.card import needs_of


def test_a_card_names_the_module_that_makes_a_network():
    assert "the packages `nets` and `gan`" in needs_of("nets.stylegan.Generator")
    assert "its module `my_gan`, on Python's path" in needs_of("my_gan.Generator")
