"""Pictures to train on that most machines can have: the people of the font fonts-noto-color-emoji, one PNG each.

sudo apt install fonts-noto-color-emoji
python samples/people.py data/people
python -m gan.fit stylegan2 --data data/people --size 32
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont, features

FONT = Path("/usr/share/fonts/truetype/noto/NotoColorEmoji.ttf")
PIXELS = 109  # the only size of the font's pictures
PICTURE = (136, 128)
TONES = ("", *map(chr, range(0x1F3FB, 0x1F400)))  # of skin; without one, the person is yellow
JOINER, AS_A_PICTURE = "\u200d", "\ufe0f"
GENDERS = ("", f"{JOINER}\u2640{AS_A_PICTURE}", f"{JOINER}\u2642{AS_A_PICTURE}")
ADULTS = "👨👩🧑"
TRADES = ("⚕️", "⚖️", "✈️", *"🌾🍳🎓🎤🎨🏫🏭💻💼🔧🔬🚀🚒")
HAIR = "🦰🦱🦳🦲"
OF_ANY_GENDER = "👮🕵💂👷👳👱🧝🙍🙎💁🙋"
OTHERS = "👦👧🧒👶👴👵🧓👲🧕🤵👰🤴👸👼🎅🤶🧔🙇"


def people() -> Iterator[str]:
    """Each person as the characters that a font joins to one picture: a person, a skin tone, a trade or a gender."""
    for tone in TONES:
        for adult in ADULTS:
            yield adult + tone
            yield from (f"{adult}{tone}{JOINER}{trade}" for trade in (*TRADES, *HAIR))
        for person in OF_ANY_GENDER:
            yield from (f"{person}{tone}{gender}" for gender in GENDERS)
        yield from (person + tone for person in OTHERS)


def draw(font: ImageFont.FreeTypeFont, person: str) -> Image.Image | None:
    """The font's picture of a person. None if the font knows only the parts, and shows them side by side."""
    if font.getlength(person) > PICTURE[0] * 1.1:
        return None
    picture = Image.new("RGBA", PICTURE, (255, 255, 255, 0))
    ImageDraw.Draw(picture).text((0, 0), person, font=font, embedded_color=True)
    return picture


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the pictures go")
    parser.add_argument("--font", type=Path, default=FONT, help="the font's file, if it is elsewhere")
    options = parser.parse_args()
    if not options.font.is_file():
        sys.exit(f"there is no {options.font}; on Debian type: sudo apt install fonts-noto-color-emoji")
    if not features.check("raqm"):
        sys.exit(
            "Pillow finds no FriBiDi, and needs it to join characters; on Debian type: sudo apt install libfribidi0"
        )
    font = ImageFont.truetype(options.font, PIXELS, layout_engine=ImageFont.Layout.RAQM)
    options.folder.mkdir(parents=True, exist_ok=True)
    drawn = {}  # by pixels: a font may have one picture for two names
    for person in people():
        picture = draw(font, person)
        if picture is not None and picture.getbbox():
            drawn.setdefault(picture.tobytes(), (person, picture))
    for person, picture in drawn.values():
        picture.save(options.folder / f"{'-'.join(f'{ord(each):x}' for each in person)}.png")
    print(f"{len(drawn)} people in {options.folder}")


if __name__ == "__main__":
    main()
