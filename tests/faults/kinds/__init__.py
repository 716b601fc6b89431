"""The kinds of cases, and how many of a hundred each is.

To add one, write a function that takes a `Case`: it copies a known run, damages something by the case's dice, says
what, and runs commands. Every rule is held after each of them. Then give it a line here.
"""

from tests.faults.case import Kind
from tests.faults.kinds.checkpoints import damaged_checkpoints
from tests.faults.kinds.command_lines import command_lines
from tests.faults.kinds.data import damaged_data, data_damaged_meanwhile
from tests.faults.kinds.outputs import outputs_in_the_way
from tests.faults.kinds.packets import packets
from tests.faults.kinds.settings import damaged_settings

KINDS: dict[str, tuple[Kind, int]] = {
    "words": (command_lines, 30),
    "settings": (damaged_settings, 20),
    "checkpoints": (damaged_checkpoints, 24),
    "data": (damaged_data, 11),
    "outputs": (outputs_in_the_way, 5),
    "meanwhile": (data_damaged_meanwhile, 5),
    "packets": (packets, 5),
}
