"""ADE20K scene parsing (Zhou et al. 2017): 20,210 + 2,000 pictures of scenes, 150 classes and 'other'."""

from pathlib import Path

from datasets.files.pairs import PICTURES, Column, Pairs, Size, look_up_split, unpacked_folder

NAMES = """other wall building sky floor tree ceiling road bed windowpane grass cabinet sidewalk person earth door table
mountain plant curtain chair car water painting sofa shelf house sea mirror rug field armchair seat fence desk rock
wardrobe lamp bathtub railing cushion base box column signboard chest_of_drawers counter sand sink skyscraper fireplace
refrigerator grandstand path stairs runway case pool_table pillow screen_door stairway river bridge bookcase blind
coffee_table toilet flower book hill bench countertop stove palm kitchen_island computer swivel_chair boat bar
arcade_machine hovel bus towel light truck tower chandelier awning streetlight booth television_receiver airplane
dirt_track apparel pole land bannister escalator ottoman bottle buffet poster stage van ship fountain conveyer_belt
canopy washer plaything swimming_pool stool barrel basket waterfall tent bag minibike cradle oven ball food step tank
trade_name microwave pot animal bicycle lake dishwasher screen blanket sculpture hood sconce vase traffic_light tray
ashcan fan pier crt_screen plate monitor bulletin_board shower radiator glass clock flag"""


class ADE20K(Pairs):
    """`images/{training,validation}/*.jpg` with `annotations/{training,validation}/*.png`.

    They lie in `root` or in `root/ADEChallengeData2016`. Splits are "train" and "val". Labels are numbered as in the
    files: 0 is 'other', and 1 to 150 are the classes.
    """

    label_names = tuple(name.replace("_", " ") for name in NAMES.split())
    num_labels = len(label_names)

    def __init__(self, root: str | Path, split: str = "train", size: Size = 256) -> None:
        part = look_up_split(split, {"train": "training", "val": "validation"})
        pictures = Column("picture", (f"images/{part}",), suffixes=PICTURES)
        maps = Column("label map", (f"annotations/{part}",))
        super().__init__(unpacked_folder(root, "ADEChallengeData2016"), (pictures, maps), size)
