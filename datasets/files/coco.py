"""COCO-Stuff (Caesar et al. 2018): 118,287 + 5,000 pictures, 91 kinds of things and 91 of stuff."""

from pathlib import Path

from datasets.files.pairs import PICTURES, Column, Pairs, Size, look_up_split

NAMES = """person, bicycle, car, motorcycle, airplane, bus, train, truck, boat, traffic light, fire hydrant, street
sign, stop sign, parking meter, bench, bird, cat, dog, horse, sheep, cow, elephant, bear, zebra, giraffe, hat, backpack,
umbrella, shoe, eye glasses, handbag, tie, suitcase, frisbee, skis, snowboard, sports ball, kite, baseball bat, baseball
glove, skateboard, surfboard, tennis racket, bottle, plate, wine glass, cup, fork, knife, spoon, bowl, banana, apple,
sandwich, orange, broccoli, carrot, hot dog, pizza, donut, cake, chair, couch, potted plant, bed, mirror, dining table,
window, desk, toilet, door, tv, laptop, mouse, remote, keyboard, cell phone, microwave, oven, toaster, sink,
refrigerator, blender, book, clock, vase, scissors, teddy bear, hair drier, toothbrush, hair brush, banner, blanket,
branch, bridge, building-other, bush, cabinet, cage, cardboard, carpet, ceiling-other, ceiling-tile, cloth, clothes,
clouds, counter, cupboard, curtain, desk-stuff, dirt, door-stuff, fence, floor-marble, floor-other, floor-stone,
floor-tile, floor-wood, flower, fog, food-other, fruit, furniture-other, grass, gravel, ground-other, hill, house,
leaves, light, mat, metal, mirror-stuff, moss, mountain, mud, napkin, net, paper, pavement, pillow, plant-other,
plastic, platform, playingfield, railing, railroad, river, road, rock, roof, rug, salad, sand, sea, shelf, sky-other,
skyscraper, snow, solid-other, stairs, stone, straw, structural-other, table, tent, textile-other, towel, tree,
vegetable, wall-brick, wall-concrete, wall-other, wall-panel, wall-stone, wall-tile, wall-wood, water-other, waterdrops,
window-blind, window-other, wood, void"""


class CocoStuff(Pairs):
    """`images/{train,val}2017/*.jpg` with `stuffthingmaps/{train,val}2017/*.png`.

    The pictures may also lie in `{train,val}2017`, where their archive unpacks them. With `edges`, there are also
    one-channel PNGs of instance numbers in `instances/{train,val}2017`. Splits are "train" and "val". Labels are
    numbered as in the files, 0 to 181. Void is 255 in the files and becomes 182.
    """

    label_names = tuple(" ".join(name.split()) for name in NAMES.split(","))
    num_labels = len(label_names)
    void = {255: 182}  # noqa: RUF012

    def __init__(self, root: str | Path, split: str = "train", size: Size = 256, edges: bool = False) -> None:
        part, root = look_up_split(split, {"train": "train2017", "val": "val2017"}), Path(root).expanduser()
        pictures = part if (root / part).is_dir() else f"images/{part}"
        columns = [
            Column("picture", (pictures,), suffixes=PICTURES),
            Column("label map", (f"stuffthingmaps/{part}",)),
        ]
        if edges:
            columns.append(Column("instance map", (f"instances/{part}",)))
        super().__init__(root, columns, size)
